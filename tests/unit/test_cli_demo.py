"""`foredraft demo`: what it decodes, in which order, and what it says of that. The model is a stand-in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.cli.demo import PROMPTS, Decoding, head_sentence
from foredraft.outputs import CompletionOutput
from tests.unit.cli_command import Command, cli_command
from tests.unit.fake_llm import METRICS


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return cli_command(monkeypatch, capsys)


BOTH = ("--spec", "ngram+suffix")


class TestDemo:
    def test_without_a_terminal_it_prints_plain_lines(self, command: Command) -> None:
        result = command("demo", *BOTH)
        assert result.code == 0
        assert result.out.count("Hello there.") == len(PROMPTS)
        assert "\x1b" not in result.out + result.err
        last_row = [line for line in result.out.splitlines() if line.strip()][-1]
        assert last_row.split() == ["all", "yes", "3.00", "7.5", "22.5", "3.00x"]

    def test_json(self, command: Command) -> None:
        *prompts, total = command("demo", *BOTH, "--json").records
        assert [record["prompt"] for record in prompts] == list(PROMPTS.values())
        for record in prompts:
            assert set(record) == {"prompt", "same_text", "plain", "speculative", "speedup"}
            assert record["same_text"] is True
            assert record["plain"] == METRICS.__dict__
            assert record["speculative"]["by_origin"] == {"target": 1, "ngram": 1, "suffix": 1}
            assert record["speedup"] == pytest.approx(3)
        assert total["total"]["same_text"] is True
        assert total["total"]["speedup"] == pytest.approx(3)

    def test_speculation_comes_first_and_neither_cache_nor_proposers_know_the_prompt(self, command: Command) -> None:
        opened, *requests, _ = command("demo", "--spec", "suffix", "--json").log
        warm_up, queried = requests[:2], requests[2:]
        assert opened[2]["prefix_caching"] is False
        assert [spec for *_, spec in warm_up] == ["off", "suffix"]
        assert not any(prompt in PROMPTS.values() for _, prompts, *_ in warm_up for prompt in prompts)
        assert [spec for *_, spec in queried] == ["suffix", "off"] * len(PROMPTS)
        assert [prompts[0][0]["content"] for _, prompts, *_ in queried[::2]] == list(PROMPTS.values())

    def test_what_the_head_did_is_told_in_one_sentence(self) -> None:
        def told(spec: str, decided: dict[str, int], by_origin: dict[str, int]) -> str:
            metrics = replace(METRICS, decisions=decided, by_origin=by_origin)
            output = CompletionOutput(0, "", [], "stop", None, 0, None, None, metrics)
            return head_sentence([Decoding(spec, output=output)] * 2)

        often = told("auto", {"eagle: drafted": 9, "suffix: drafted": 9}, {"eagle": 20})
        assert often == "The trained head (eagle) drafted in 100% of the steps, and 40 of all tokens are its."
        seldom = told("auto", {"eagle: drafted": 1, "eagle: probe": 1, "eagle: resting": 18}, {"eagle": 1})
        assert "drafted in 10% of the steps, and 2 of all" in seldom and "more time than it saves" in seldom
        assert "(eagle) was left out" in told("auto", {"eagle: probe": 1, "eagle: ledger": 19}, {})
        assert "No trained head took part" in told("auto", {"suffix: drafted": 3}, {"suffix": 3})
        assert told("suffix", {}, {"suffix": 3}) == ""

    @pytest.mark.parametrize("arguments", [[], ["--json"]])
    def test_a_text_that_differs_exits_1(self, command: Command, arguments: list[str]) -> None:
        result = command("demo", *BOTH, "--model", "some/unfaithful", *arguments)
        assert result.code == 1
        assert result.err.count(": the texts differ.\n") == len(PROMPTS)
        assert "NO" in result.out or all(record["same_text"] is False for record in result.records[:-1])

    def test_a_failed_request_is_told_and_exits_1(self, command: Command) -> None:
        result = command("demo", error="The logits are not numbers.")
        assert result.code == 1
        assert "cook a soup, plain: The logits are not numbers.\n" in result.err
