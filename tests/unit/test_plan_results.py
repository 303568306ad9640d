"""`foredraft plan --from`: what was measured comes first, lengths follow from it, and a bad file is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan_command import CURVE, Command, cell, fails_with_one_sentence, plan_command, results, written


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return plan_command(monkeypatch, capsys)


@pytest.fixture
def curve(tmp_path: Path) -> str:
    return written(tmp_path / "verify.json", CURVE)


def test_the_best_per_category_and_batch(command: Command, tmp_path: Path) -> None:
    file = results(
        tmp_path,
        cell("off", 1.0, "code"),
        cell("ngram", 1.4, "code"),
        cell("suffix", 1.8, "code"),
        cell("suffix", 1.03, "code", batch=8),
        cell("ngram", 0.7, "code", batch=32),
        cell("suffix", 0.9, "code", batch=32),
        cell("ngram", 0.95, "chat"),
        cell("off", None),
        cell("ngram", 1.2, tokens_per_run=1.9),
    )
    record = command("--from", file, "--json").record
    choices = [(each["category"], each["batch"], each["spec"], each["ratio_to_off"]) for each in record["choices"]]
    assert choices == [
        ("all", 1, "ngram", 1.2),
        ("code", 1, "suffix", 1.8),
        ("code", 8, "suffix", 1.03),
        ("code", 32, "off", 1.0),
        ("chat", 1, "off", 1.0),
    ]
    (flip,) = record["flips"]
    assert (flip["category"], flip["pays_at"], flip["flip_batch"]) == ("code", 8, 32)
    assert record["best_spec"] == "ngram"

    out = command("--from", file).out
    assert "code, 1 concurrent request: use suffix, 1.80 times as fast as off." in out
    assert "code, 8 concurrent requests: suffix gains only 3.0 %, so leave it off unless" in out
    assert "code, 32 concurrent requests: leave it off; suffix has 0.90 of its speed." in out
    assert "code: it pays at 8 concurrent requests, no longer at 32: turn it off above 8." in out
    assert "chat, 1 concurrent request: leave it off; ngram has 0.95 of its speed." in out
    assert "all: it pays" not in out


def test_lengths_follow_from_the_acceptance_and_the_costs_in_the_file(
    command: Command, tmp_path: Path, curve: str
) -> None:
    given = command("--alpha", "0.8", "--cost", "0.02", "--verify-cost", curve, "--json").record
    four = given["table"][4]
    ngram = cell("ngram", four["speedup"], tokens_per_run=four["expected_tokens"], drafted_per_run=4.0)
    found = command("--from", results(tmp_path, cell("auto", 5.0), ngram), "--json").record
    assert set(given) < set(found)
    assert found["best_spec"] == "auto", "which has no lengths of its own to look at"
    for key in ("best_k", "flip_batch"):
        assert found[key] == given[key]
    for key in ("speedup", "expected_tokens", "break_even_alpha", "break_even_cost"):
        assert found[key] == pytest.approx(given[key])
    assert [row["speedup"] for row in found["table"]] == pytest.approx([row["speedup"] for row in given["table"]])


@pytest.mark.parametrize("ratio", [0.7, 1.05, 1.23])
@pytest.mark.parametrize("others", [{"batch": 1}, {"batch": 2, "group_sizes": [2, 2], "tokens_per_s": 100.0}])
def test_what_is_promised_for_a_measured_length_is_what_was_measured(
    command: Command, tmp_path: Path, ratio: float, others: dict[str, Any]
) -> None:
    """Whatever the setting's acceptance by depth and its drafting time would lead to, and with prompts that take a
    third of the time or more."""
    drafting = {"drafted_per_run": 3.0, "draft_time_per_run_s": 0.0001, "acceptance_per_depth": [0.8, 0.7, 0.9]}
    eagle = cell("eagle", ratio, tokens_per_run=2.2, **drafting, **others)
    file = results(tmp_path, cell("off", 1.0, **others), eagle)
    record = command("--from", file, "--json").record
    assert record["table"][3]["expected_tokens"] == pytest.approx(2.2)
    assert record["table"][3]["speedup"] == pytest.approx(ratio)
    assert record["speedup"] == max(row["speedup"] for row in record["table"]) < 1.5
    assert f"eagle was measured at {ratio:.2f} with 3.0 draft tokens per run." in record["recommendation"]


def test_a_ratio_that_the_figures_cannot_explain_is_named(command: Command, tmp_path: Path) -> None:
    file = results(tmp_path, cell("ngram", 2.4, tokens_per_run=1.5, drafted_per_run=1.0))
    told = command("--from", file, "--json").record["recommendation"]
    assert "ngram was measured at 2.40 with 1.0 draft tokens per run. Its figures explain only 1.44, so rely on" in told


def test_a_batch_is_looked_at_as_such(command: Command, tmp_path: Path) -> None:
    figures = {"tokens_per_run": 2.5, "drafted_per_run": 2.0}
    alone, eight = (cell("ngram", ratio, batch=n, **figures) for n, ratio in ((1, 2.3), (8, 1.2)))
    shorter = command("--from", results(tmp_path, eight), "--json").record
    longer = command("--from", results(tmp_path, alone), "--json").record
    assert 0 < shorter["best_k"] < longer["best_k"]


def test_off_may_be_best_though_another_length_would_pay(command: Command, tmp_path: Path) -> None:
    file = results(tmp_path, cell("off", 1.0), cell("ngram", 1.0))
    record = command("--from", file, "--json").record
    assert record["best_spec"] == "off" and record["best_k"] > 0
    assert "None of the settings that were measured gained that" in record["recommendation"]
    poor = command("--from", results(tmp_path, cell("ngram", 0.9, acceptance_rate=0.0)), "--json").record
    assert (poor["best_spec"], poor["best_k"], poor["speedup"]) == ("off", 0, 1.0)


def test_the_promised_fields_are_enough(command: Command, tmp_path: Path) -> None:
    file = written(tmp_path / "results.json", {"cells": [cell("ngram", 1.2)], "runs": []})
    record = command("--from", file, "--json").record
    assert record["table"][1]["expected_tokens"] == pytest.approx(1.45, rel=0.01), (
        "1.25 draft tokens brought half a token"
    )
    assert record["break_even_alpha"] == pytest.approx(0.2) and record["flip_batch"] is None
    file = written(tmp_path / "less.json", {"cells": [cell("ngram", 1.2, tokens_per_run=None)], "runs": []})
    record = command("--from", file, "--json").record
    assert record["table"][1]["expected_tokens"] == pytest.approx(1.4)
    assert "Its figures explain only 1.00" in record["recommendation"]
    assert fails_with_one_sentence(command("--from", file, "--batch-max", "8"))


def test_what_changed_a_text_is_never_chosen(command: Command, tmp_path: Path) -> None:
    file = results(tmp_path, cell("fast", 3.0, same_text=False), cell("ngram", 1.5))
    assert command("--from", file, "--json").record["best_spec"] == "ngram"
    assert "Left out where their texts were not those of off: fast." in command("--from", file).out


def test_settings_are_named_only_where_they_differ(command: Command, tmp_path: Path) -> None:
    file = results(tmp_path, cell("ngram", 1.5), cell("ngram", 0.8, temperature=0.8))
    out = command("--from", file).out
    assert "all, temperature 0.0, 1 concurrent request: use ngram" in out
    assert "all, temperature 0.8, 1 concurrent request: leave it off" in out
    assert "int4" not in out


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (cell("ngram", None), "Cell 1 of "),
        (cell("ngram", -1.0), "ratio_to_off above 0"),
        (cell("ngram", float("nan")), "ratio_to_off above 0"),
        (cell("ngram", 1.2, batch=0), "batch"),
        (cell("ngram", 1.2, temperature=[1]), "Cell 1 of "),
        ({"spec": "ngram"}, "Cell 1 of "),
        ("ngram", "Cell 1 of "),
    ],
)
def test_a_bad_cell_is_named(command: Command, tmp_path: Path, bad: Any, sentence: str) -> None:
    result = command("--from", results(tmp_path, cell("off", 1.0), bad))
    assert fails_with_one_sentence(result), result
    assert sentence in result.err


@pytest.mark.parametrize("cells", [[], [cell("off", 1.0)], [cell("fast", 3.0, same_text=False)]])
def test_nothing_to_compare_is_an_error(command: Command, tmp_path: Path, cells: list[Any]) -> None:
    assert fails_with_one_sentence(command("--from", results(tmp_path, *cells)))
