"""The benchmark: what is measured in which order, what the figures mean, and what is left behind."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.bench import measure as measure_module
from foredraft.bench.cells import (
    Decoded,
    cells_of,
    flip,
    group_times,
    k_sweeps,
    plateau,
    predicted_ratio,
    ratio,
    unrest,
)
from foredraft.bench.measure import Group, Plan, Run, groups_of, in_turn, measure, num_timed_runs, verify_curve
from foredraft.bench.report import Results, page, write_report
from foredraft.bench.suite import built_in, load_suite
from foredraft.control.economics import VerifyCurve
from foredraft.errors import ForedraftError, InvalidPrompt
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.reports.prompts import Question
from tests.tiny_models import random_model, save_model
from tests.unit.timed_llm import TimedLLM

COST = VerifyCurve((1, 2, 4), (0.010, 0.012, 0.020))
QUESTIONS = [Question(category, f"{category}{n}") for n in range(3) for category in "ab"]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = TimedLLM()
    monkeypatch.setattr(measure_module, "time", SimpleNamespace(perf_counter=lambda: fake.clock))
    return fake


def make_run(spec: str, group: int, seconds: float, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "prompt": group,
        "category": "a",
        "batch": 1,
        "group": group,
        "group_size": 1,
        "repeat": 0,
        "temperature": 0.0,
        "spec": spec,
        "tokens": 10,
        "seconds": seconds,
        "target_runs": 10 if spec == "off" else 5,
        "tokens_per_run": 1.0 if spec == "off" else 2.0,
        "acceptance_per_depth": [] if spec == "off" else [0.5],
        "by_origin": {"target": 10} if spec == "off" else {"target": 5, spec: 5},
        "drafted": 0 if spec == "off" else 10,
        "accepted": 0 if spec == "off" else 5,
        "draft_time_s": 0.0,
        "verify_time_s": 0.1,
        "token_ids_hash": f"text {group}",
    }
    return Run(**{**fields, **changes})


class TestSuite:
    def test_six_kinds_of_at_least_six_distinct_prompts(self) -> None:
        questions = built_in()
        kinds = [question.category for question in questions]
        assert len(set(kinds)) == 6
        assert all(kinds.count(kind) >= 6 for kind in kinds)
        assert len({question.text for question in questions}) == len(questions)

    def test_a_limit_is_spread_over_the_kinds(self) -> None:
        assert len({question.category for question in load_suite("builtin", 6)}) == 6
        assert len(load_suite("builtin")) == len(built_in())

    def test_a_file_in_the_format_of_spec_bench(self, tmp_path: Path) -> None:
        file = tmp_path / "suite.jsonl"
        file.write_text('{"question_id": 1, "category": "x", "turns": ["hi", "again"]}\n')
        assert load_suite(str(file)) == [Question("x", "hi")]


class TestOrder:
    def test_groups_hold_one_category_and_are_full(self) -> None:
        halves = [Group("a", (0, 2)), Group("b", (1, 3)), Group("a", (4, 0)), Group("b", (5, 1))]
        assert groups_of(QUESTIONS, 2) == halves
        assert groups_of(QUESTIONS, 4) == [Group("a", (0, 2, 4, 0)), Group("b", (1, 3, 5, 1))]
        assert [group.prompts for group in groups_of(QUESTIONS, 1)] == [(n,) for n in range(6)]

    def test_every_setting_is_first_in_its_turn(self) -> None:
        assert [in_turn(["x", "y", "z"], turn) for turn in range(4)] == [
            ["x", "y", "z"],
            ["y", "z", "x"],
            ["z", "x", "y"],
            ["x", "y", "z"],
        ]

    def test_settings_are_interleaved_and_their_order_rotates(self, llm: Any) -> None:
        plan = Plan(("ngram", "suffix"), max_tokens=3, repeats=2)
        measure(llm, QUESTIONS[:2], plan, lambda: None)
        warm_up, timed = llm.log[:3], llm.log[3:]
        assert [spec for spec, *_ in warm_up] == ["off", "ngram", "suffix"]
        order = [spec for spec, *_ in timed]
        rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
        assert rounds[0] == ["off", "ngram", "suffix"]
        assert rounds[1] == rounds[2] == ["ngram", "suffix", "off"]
        assert rounds[3] == ["suffix", "off", "ngram"]
        assert [texts for _, texts, _ in timed] == [["a0"]] * 6 + [["b0"]] * 6

    def test_stores_are_cleared_and_others_hidden_before_every_run(self, llm: Any) -> None:
        measure(llm, QUESTIONS[:2], Plan(("ngram", "suffix"), repeats=1), lambda: None)
        assert llm.forgotten == len(llm.log)
        assert llm.seen == [set() if spec == "off" else {spec} for spec, *_ in llm.log]
        assert set(llm.engine.speculation.assignments.proposers) == {"ngram", "suffix"}

    def test_the_controller_knows_other_prompts_and_never_this_one(self, llm: Any) -> None:
        measure(llm, QUESTIONS[:2], Plan(("auto", "auto(ngram)"), repeats=2), lambda: None)
        warm_up = ["0a", "0a"]  # backwards
        assert llm.known[2:] == [warm_up] * 4 + [[*warm_up, "a0"]] * 4
        assert llm.engine.speculation.controller.texts == [*warm_up, "a0", "b0"]

    def test_all_settings_write_with_the_same_seeds_and_only_calls_are_timed(self, llm: Any) -> None:
        ticks: list[None] = []
        plan = Plan(("ngram",), batches=(2,), temperatures=(0.0, 0.8), repeats=1, seed=2**63 - 2)
        runs = measure(llm, QUESTIONS, plan, lambda: ticks.append(None))
        timed = llm.log[2:]
        assert len(ticks) == len(timed) == num_timed_runs(QUESTIONS, plan) == 16
        seeds = {spec: [s for name, _, s in timed if name == spec] for spec in plan.settings}
        assert seeds["off"] == seeds["ngram"]
        assert seeds["off"][0] == (2**63 - 2, 0)
        assert {(run.spec, run.seconds) for run in runs} == {("off", 1.0), ("ngram", 0.5)}
        assert {(run.prompt, run.group_size) for run in runs} == {(prompt, 2) for prompt in range(6)}

    def test_a_prompt_that_does_not_fit_is_named(self, llm: Any) -> None:
        with pytest.raises(InvalidPrompt, match="Prompt 1 of the suite has 100 tokens"):
            measure(llm, [QUESTIONS[0], Question("a", "x" * 100)], Plan(("ngram",)), lambda: None)
        assert llm.log == []

    @pytest.mark.parametrize(
        "fields",
        [{"specs": ("what",)}, {"batches": (0,)}, {"batches": (257,)}, {"repeats": 0}, {"temperatures": (-1.0,)}],
    )
    def test_a_bad_plan_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ForedraftError):
            Plan(**{"specs": ("ngram",), **fields})

    def test_off_is_measured_once_whether_queried_for_or_not(self) -> None:
        assert Plan(("ngram", "off", "ngram")).settings == ("off", "ngram")


class TestCells:
    def test_a_groups_time_is_its_median_over_the_repeats(self) -> None:
        runs = [make_run("off", 0, seconds, repeat=n) for n, seconds in enumerate((3.0, 1.0, 9.0))]
        assert group_times([*runs, make_run("off", 1, 2.0)]) == {0: 3.0, 1: 2.0}

    def test_unrest_is_seen_in_plain_runs_that_differ(self) -> None:
        def runs(spec: str, group: int, *seconds: float) -> list[Run]:
            return [make_run(spec, group, each, repeat=repeat) for repeat, each in enumerate(seconds)]

        quiet = [*runs("off", 0, 1.0, 1.1, 1.19), *runs("ngram", 0, 1.0, 9.0), *runs("off", 1, 5.0)]
        assert unrest(quiet) == (1, 0)
        assert unrest([*quiet, *runs("off", 2, 1.0, 1.21)]) == (2, 1)

    def test_a_ratio_is_one_of_sums_over_the_groups_that_both_have(self) -> None:
        total, quartiles = ratio({0: 4.0, 1: 2.0, 2: 99.0}, {0: 1.0, 1: 2.0, 3: 99.0})
        assert total == pytest.approx(2.0)
        assert quartiles == pytest.approx([1.75, 2.5, 3.25])
        assert ratio({0: 4.0}, {0: 2.0}) == (2.0, []), "one group has no quartiles"

    def test_cells_by_category_and_over_all(self) -> None:
        runs = [
            make_run(spec, group, seconds, category=category)
            for group, category, times in ((0, "a", (4.0, 1.0)), (1, "b", (2.0, 2.0)))
            for spec, seconds in zip(("off", "ngram"), times, strict=True)
        ]
        cells = {(cell.spec, cell.category): cell for cell in cells_of(runs, COST, "float32")}
        assert list(cells) == [(spec, category) for category in ("a", "b", "all") for spec in ("off", "ngram")]
        assert cells["ngram", "a"].ratio_to_off == pytest.approx(4.0)
        assert cells["ngram", "b"].ratio_to_off == pytest.approx(1.0)
        everything = cells["ngram", "all"]
        assert everything.ratio_to_off == pytest.approx(2.0)
        assert everything.tokens_per_s == pytest.approx(20 / 3)
        assert (everything.prompts, everything.group_sizes, everything.tokens_per_run) == (2, [1, 1], 2.0)
        assert everything.acceptance_rate == pytest.approx(0.5)
        assert everything.acceptance_per_depth == pytest.approx([0.5])
        assert everything.by_origin == {"target": 10, "ngram": 10}
        others = 6.0 - 20 * 0.010  # two texts of ten tokens, plain; drafted: ten runs of three rows
        assert everything.predicted_ratio == pytest.approx(6.0 / (others + 10 * 0.016))
        assert cells["off", "all"].ratio_to_off == 1.0

    def test_a_drafts_cost_is_in_plain_steps_of_the_batch(self) -> None:
        runs = [
            make_run(spec, 0, 1.0, batch=2, group_size=2, prompt=prompt, draft_time_s=0.03 * (spec == "ngram"))
            for spec in ("off", "ngram")
            for prompt in (0, 1)
        ]
        plain, drafted, *_ = cells_of(runs, COST, "float32")
        assert plain.draft_steps_per_run == 0
        assert drafted.draft_steps_per_run == pytest.approx(0.03 / 5 / 0.012)

    def test_a_category_named_all_is_counted_once(self) -> None:
        runs = [make_run("off", 0, 2.0, category="all"), make_run("off", 1, 3.0)]
        by_category = {cell.category: cell for cell in cells_of(runs, COST, "float32")}
        assert (by_category["all"].tokens, by_category["all"].seconds) == (20, 5.0)

    def test_repeats_neither_add_tokens_nor_prompts(self) -> None:
        runs = [make_run(spec, 0, 2.0, repeat=n) for n in range(3) for spec in ("off", "ngram")]
        off = cells_of(runs, COST, "float32")[0]
        assert (off.prompts, off.tokens, off.tokens_per_s) == (1, 10, pytest.approx(5.0))

    def test_the_prompts_of_a_group_share_its_time(self) -> None:
        runs = [make_run("off", 0, 2.0, prompt=n, batch=8, group_size=2, token_ids_hash=f"{n}") for n in range(2)]
        (cell, _) = cells_of(runs, COST, "float32")
        assert (cell.seconds, cell.tokens_per_s, cell.group_sizes, cell.same_text) == (2.0, 10.0, [2], True)

    @pytest.mark.parametrize("change", [{"token_ids_hash": "other"}, {"error": "It broke."}])
    def test_a_text_that_differs_or_failed_shows_in_its_cells_only(self, change: dict[str, Any]) -> None:
        runs = [make_run("off", 0, 1.0), make_run("ngram", 0, 1.0), make_run("suffix", 0, 1.0, **change)]
        found = {(cell.spec, cell.category): cell.same_text for cell in cells_of(runs, COST, "float32")}
        assert {key for key, same in found.items() if not same} == {("suffix", "a"), ("suffix", "all")}

    def test_plain_decoding_must_write_the_same_in_every_batch(self) -> None:
        runs = [make_run("off", 0, 1.0), make_run("off", 0, 1.0, batch=8, token_ids_hash="other")]
        assert [cell.same_text for cell in cells_of(runs, COST, "float32")] == [True, True, False, False]

    def test_where_it_flips(self) -> None:
        assert flip([1, 8, 16], [2.0, 1.5, 0.5]) == pytest.approx(12.0)
        assert flip([1, 8], [2.0, 1.5]) is None
        assert flip([1, 8], [0.9, 0.8]) is None

    def test_sweeps_over_k_and_their_plateau(self) -> None:
        specs = ["ngram:k=8", "ngram:k=2", "ngram", "suffix:k=2", "ngram:k=2,max_n=3", "ngram:max_n=3,k=4"]
        assert k_sweeps(specs) == {
            "ngram:k=…": {2: "ngram:k=2", 8: "ngram:k=8"},
            "ngram:k=…,max_n=3": {2: "ngram:k=2,max_n=3", 4: "ngram:max_n=3,k=4"},
        }
        assert plateau({2: 1.2, 4: 1.49, 8: 1.5, 16: 1.3}) == 4


class TestVerifyCost:
    def test_the_prediction(self) -> None:
        flat = VerifyCurve((1, 64), (0.010, 0.010))
        plain, drafted = Decoded(30, 1), Decoded(10, 1, drafted_per_run=4)
        assert predicted_ratio(flat, 0.3, plain, drafted) == pytest.approx(3.0)
        assert predicted_ratio(flat, 0.2, plain, drafted) == pytest.approx(3.0), "plain decoding is not explained away"
        assert predicted_ratio(flat, 0.5, plain, drafted) == pytest.approx(0.5 / 0.3), "a prompt is not sped up"
        slow = replace(drafted, draft_time_per_run_s=0.010)
        assert predicted_ratio(flat, 0.3, plain, slow) == pytest.approx(1.5)
        assert predicted_ratio(COST, 0.0, Decoded(2, 2), Decoded(2, 2, 1.0)) == pytest.approx(0.012 / 0.020)


def make_results(spec: str = "ngram", category: str = "a", same_text: bool = True) -> Results:
    runs = [
        make_run(name, 0, seconds, batch=batch, category=category)
        for batch in (1, 2)
        for name, seconds in (("off", 2.0), (spec, 1.0 * batch**2))
    ]
    cells = [replace(cell, same_text=same_text) for cell in cells_of(runs, COST, "float32")]
    return Results({"cpu": "<cpu>"}, {"python": "3"}, {"name": "<b>model</b>"}, {"specs": [spec]}, cells, runs, COST)


class TestReport:
    def test_all_text_is_escaped_and_nothing_is_fetched(self, tmp_path: Path) -> None:
        results = make_results(category="<script>alert('$x^$')</script> 数")
        assert write_report(results, tmp_path)
        html = (tmp_path / "report.html").read_text()
        assert "<script" not in html
        assert "<b>model" not in html
        assert "&lt;b&gt;model" in html
        assert "http" not in html
        assert "url(" not in html.replace("url(#", "")
        assert "prefers-color-scheme: dark" in html

    def test_plots_are_files_too(self, tmp_path: Path) -> None:
        write_report(make_results("ngram:k=2"), tmp_path)
        assert {file.stem for file in tmp_path.glob("*.svg")} == {
            *("speedup", "tokens_per_run", "acceptance", "verify_cost", "predicted", "batch")
        }
        assert (tmp_path / "report.html").read_text().count("<svg") == 6

    def test_a_text_that_differs_is_hard_to_overlook(self) -> None:
        assert "Some texts differ" in page(make_results(same_text=False), [])
        assert "the same texts" in page(make_results(), [])

    def test_without_matplotlib_there_are_no_plots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        for module in ("reports.drawing", "bench.plots"):
            monkeypatch.delitem(sys.modules, f"foredraft.{module}", raising=False)
        assert not write_report(make_results(), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_the_verify_curve_gives_its_blocks_back(tmp_path: Path) -> None:
    llm = LLM(str(save_model(random_model("llama"), tmp_path)), kv_cache_tokens=320, max_model_len=200, threads=1)
    before = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0), spec="off")[0].token_ids
    curve = verify_curve(llm)
    llm.engine.scheduler.pool.check_integrity([])
    assert all(seconds > 0 for seconds in curve.seconds)
    assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0), spec="off")[0].token_ids == before
