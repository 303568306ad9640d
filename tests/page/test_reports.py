"""The reports of `bench` and `simulate` in a window of 1,280 pixels: nothing must be scrolled to the side, and axe-core
finds no violation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.bench.cells import cells_of
from foredraft.bench.report import Results
from foredraft.bench.report import write_report as write_bench_report
from foredraft.config import EngineConfig
from foredraft.simulate.fleet import Outcome, Slo
from foredraft.simulate.machine_file import read_machine
from foredraft.simulate.report import write_report as write_fleet_report
from foredraft.simulate.study import SettingAnswer, Study, TrafficAnswer
from tests.page.open_page import OpenPage
from tests.page.test_accessible import violations
from tests.unit.test_bench import COST, make_run

pytestmark = pytest.mark.page

MACHINE = Path(__file__).parents[2] / "docs" / "machines" / "neoverse-n1-int4.json"
SPECS = {"off": 2.0, "auto": 1.3, "suffix": 1.6, "auto(suffix+eagle:nodes=16)": 1.2, "ngram:k=4": 1.7, "ngram:k=8": 1.8}
CATEGORIES = ("writing", "mathematical reasoning", "retrieval-augmented generation")
RATES = [2.0, 4.0, 8.0, 12.0, 16.0]


def bench_report(folder: Path) -> None:
    runs = [
        make_run(spec, 10 * place + number, seconds * (1 + number / 10), batch=batch, category=category)
        for batch in (1, 8)
        for place, category in enumerate(CATEGORIES)
        for number in range(3)
        for spec, seconds in SPECS.items()
    ]
    cells = cells_of(runs, COST, "float32")
    facts = {"cpu": "a processor"}, {"python": "3"}, {"name": "a model"}, {"specs": list(SPECS)}
    write_bench_report(Results(*facts, cells, runs, COST), folder)


def outcome(qps: float, most: float) -> Outcome:
    wait = 1 / max(0.05, 1 - qps / most)
    return Outcome(
        qps, min(qps, most), 0.9, 90 * qps, wait, wait, 4 * wait, 0.02, 0.02, 0.05 * wait, wait, 0.03 * wait, 0
    )


def fleet_report(folder: Path) -> None:
    """One traffic that is served, and one that is an overload."""

    def setting(spec: str, qps: float, most: float) -> SettingAnswer:
        sweep = [outcome(rate, most) for rate in RATES]
        return SettingAnswer(spec, outcome(qps, most), 0.8 * most, most, 3, sweep, [1.0] * len(RATES))

    answers = [
        TrafficAnswer(name, qps, RATES, [setting("off", qps, 13.0), setting("auto(suffix+eagle:nodes=16)", qps, 14.0)])
        for name, qps in (("chat", 10.0), ("documents", 15.0))
    ]
    study = Study(read_machine(MACHINE), EngineConfig(), Slo(ttft=5, itl=0.1), attain=0.9)
    write_fleet_report(answers, study, 4, {"command": "foredraft simulate"}, folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("write", [bench_report, fleet_report])
def test_it_fits(browser: Any, tmp_path: Path, write: Any, scheme: str) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path)
    size = {"width": 1280, "height": 900}
    with OpenPage.opened(browser, (tmp_path / "report.html").as_uri(), viewport=size, color_scheme=scheme) as page:
        wide = "[document.documentElement, ...document.querySelectorAll('.wide')]"
        found = page.tab.evaluate(f"{wide}.map((each) => [each.scrollWidth, each.clientWidth])")
        assert len(found) > 1 and all(needed <= given for needed, given in found)
        drawn = page.tab.locator("svg").evaluate_all("drawings => drawings.map((each) => each.outerHTML)")
        assert len(drawn) >= 4 and not any("#ffffff" in each for each in drawn), "no white ground in a dark page"
        assert violations(page) == []


def test_an_overload_is_named(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fleet_report(tmp_path)
    with OpenPage.opened(browser, (tmp_path / "report.html").as_uri()) as page:
        first, second = page.tab.locator("p.answer").all_text_contents()
        assert "overload" not in first and "that is an overload with every setting" in second
        assert page.tab.get_by_role("cell", name="overload").count() == 4
        assert page.tab.locator("h1 + p").get_attribute("class") == "answer", "it leads with the answer"
