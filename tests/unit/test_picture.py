"""The picture in README.md is drawn from a recorded run: it is well-formed, complete, and the one that is committed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import picture

    yield picture
    sys.modules.pop("picture", None)


@pytest.fixture
def recorded(picture: ModuleType) -> dict[str, Any]:
    return json.loads(picture.RUNS.read_text(encoding="utf-8"))


def test_the_committed_picture_is_that_of_the_recorded_run(picture: ModuleType, recorded: dict[str, Any]) -> None:
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(recorded), "run: python tools/picture.py"
    assert picture.PICTURE.relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_both_sides_have_one_text_and_all_of_their_runs(picture: ModuleType, recorded: dict[str, Any]) -> None:
    plain, speculative = recorded["plain"], recorded["speculative"]
    assert [text for text, _ in plain["pieces"]] == [text for text, _ in speculative["pieces"]]
    assert {origin for _, origin in plain["pieces"]} == {"target"}
    for decoding in (plain, speculative):
        assert len(list(picture.runs_of(decoding))) == decoding["runs"]
    assert speculative["runs"] < plain["runs"] == len(plain["pieces"])


def drawn(picture: ModuleType, pieces: list[tuple[str, str]], runs: int) -> ElementTree.Element:
    plain = [(text, "target") for text, _ in pieces]
    record = {
        "model": "a <model>",
        "task": 'Say "a & b".',
        "plain": {"spec": "off", "runs": len(plain), "pieces": plain},
        "speculative": {"spec": "x+y", "runs": runs, "pieces": pieces},
    }
    return ElementTree.fromstring(picture.draw(record))


def test_markup_in_a_text_is_escaped_and_nothing_is_lost(picture: ModuleType) -> None:
    pieces = [("<b>", "target"), (" &amp;", "x"), ("\n  if", "y"), (" a<b:", "target"), ("", "x")]
    root = drawn(picture, pieces, 3)
    written = "".join(text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") is None)
    assert written == 2 * "<b>&amp;ifa<b:"
    assert root.get("viewBox") and "href" not in ElementTree.tostring(root, encoding="unicode")


def test_a_run_over_two_lines_is_one_run_with_two_boxes(picture: ModuleType) -> None:
    root = drawn(picture, [("a", "x"), ("\nb", "target"), ("c", "x")], 2)
    boxes = [box.get("data-run") for box in root.iter(f"{SVG}rect") if box.get("data-run")]
    assert boxes == ["0", "1", "2", "0", "0", "1"]  # plain: a run per token; speculative: the first has two lines
    tints = [box.get("class") for box in root.iter(f"{SVG}rect") if box.get("class") in ("first", "second")]
    assert tints == ["first", "first", "first"], "two draft tokens, and the legend"
