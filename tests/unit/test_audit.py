"""The audit: what is sound passes, and what is known to be wrong fails. The models are stand-ins."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.audit import distribution, rows
from foredraft.audit.distribution import (
    CASES,
    VOCAB,
    Case,
    Drafter,
    Rule,
    Text,
    distribution_checks,
    sampled_chain,
    unsampled_chain,
    unsampled_tree,
)
from foredraft.audit.prompts import BUILT_IN
from foredraft.audit.report import Check
from foredraft.audit.text import num_prompts, text_checks, unusable_proposers, with_pairs
from foredraft.cli.main import run
from foredraft.errors import InvalidModel, InvalidPrompt, InvalidSpec
from foredraft.outputs import CompletionOutput, RequestOutput
from foredraft.reports.prompts import Question, read_suite, spread
from foredraft.sampling.rules import RULES, Chance, Outcome, Target
from foredraft.types import Draft, TokenLogprob
from tests.unit.fake_llm import METRICS

SAMPLES = 500


def no_tick() -> None:
    """Nobody watches."""


def distribution_check(case: Case) -> Check:
    (check,) = distribution_checks(SAMPLES, no_tick, [case])
    return check


class TestLaw:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_the_real_rules_pass(self, case: Case) -> None:
        check = distribution_check(case)
        assert check.passed, check.detail

    def test_the_statistic_and_its_tail_are_scipys(self) -> None:
        test = distribution.g_test(Counter({(0,): 30, (1,): 50, (2,): 20}), {(0,): 0.3, (1,): 0.4, (2,): 0.3})
        assert (test.statistic, test.p_value) == pytest.approx((6.095750807094401, 0.04745964995661144))
        assert distribution.chi_square_tail(80.0, 63) == pytest.approx(0.0728954893246227)

    def test_rare_texts_share_a_cell_that_is_expected_often_enough(self) -> None:
        rare = {(token,): 0.01 for token in range(4)}
        test = distribution.g_test(Counter({(4,): 60, (5,): 40}), {**rare, (4,): 0.56, (5,): 0.4})
        assert test.cells == 2  # the four rare texts and the next one, for the four alone are expected 4 times

    def test_holm_is_stricter_than_each_test_alone_and_stops_at_the_first_that_stands(self) -> None:
        assert distribution.holm([0.04, 0.5], 0.05) == [True, True]
        assert distribution.holm([0.5, 0.02, 0.04], 0.05) == [True, True, True]
        assert distribution.holm([0.04, 0.01], 0.05) == [False, False]


def judge_one(draft: Draft, target: Target, chance: Chance, refused: Callable[[Tensor, Tensor], list[int]]) -> Outcome:
    """The rejection rule for one draft token, with something else to do once it is rejected."""
    p, q, token = target.distribution(-1, []), draft.q[0], draft.tokens[0]
    if chance.accepts(min(1.0, float(p[token] / q[token])), 0, 0):
        return [0], [token, chance.draw(target.distribution(0, [token]), 1)]
    return [], refused(p, q)


def resamples_from_p(draft: Draft, target: Target, chance: Chance) -> Outcome:
    return judge_one(draft, target, chance, lambda p, q: [chance.draw(p, 0)])


def bonus_after_rejection(draft: Draft, target: Target, chance: Chance) -> Outcome:
    """The token after the rejected one is emitted as if that one stood."""

    def refused(p: Tensor, q: Tensor) -> list[int]:
        rest = (p - q).clamp(min=0)
        return [chance.draw(rest / rest.sum(), 0), chance.draw(target.distribution(0, [draft.tokens[0]]), 1)]

    return judge_one(draft, target, chance, refused)


class SharedCoin:
    """One coin for all decisions of a draft."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        return self._chance.accepts(probability, 0, 0)

    def draw(self, probabilities: Tensor, position: int) -> int:
        return self._chance.draw(probabilities, position)


def shared_coin(draft: Draft, target: Target, chance: Chance) -> Outcome:
    return RULES["rejection"](draft, target, SharedCoin(chance))


class CoinsByPlace(SharedCoin):
    """A coin per place in the text: a draft that begins before the end of a refused one meets its coins again."""

    def accepts(self, probability: float, position: int, trial: int) -> bool:
        return self._chance.accepts(probability, position + trial, 0)


def coins_met_again(draft: Draft, target: Target, chance: Chance) -> Outcome:
    return RULES["block"](draft, target, CoinsByPlace(chance))


def states(change: Callable[[Tensor], Tensor]) -> Drafter:
    """A chain that states another q than the one that it was drawn from."""

    def drafter(text: Text, seed: int) -> Draft:
        draft = sampled_chain(text, seed)
        return replace(draft, q=change(draft.q))

    return drafter


def point_masses(drafter: Drafter) -> Drafter:
    """A draft that nobody sampled, stated as if it had been, so that coins are thrown for it."""

    def stated(text: Text, seed: int) -> Draft:
        draft = drafter(text, seed)
        return replace(draft, q=torch.eye(VOCAB, dtype=torch.float64)[list(draft.tokens)])

    return stated


MUTANTS: dict[str, tuple[Rule, Drafter]] = {
    "resamples from p": (resamples_from_p, sampled_chain),
    "bonus after a rejection": (bonus_after_rejection, sampled_chain),
    "shared coin": (shared_coin, point_masses(unsampled_tree)),
    "coins met again by the next block": (coins_met_again, point_masses(unsampled_chain)),
    "q not renormalised": (RULES["rejection"], states(lambda q: q * 0.5)),
    "untempered q": (RULES["rejection"], states(lambda q: (q.log() / 3).softmax(-1))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_distribution_of_what_is_wrong_fails(name: str) -> None:
    check = distribution_check(Case(name, *MUTANTS[name]))
    assert not check.passed, check.detail


class FakeLLM:
    """Answers with three tokens; `lies` are the specs under which one token of one prompt differs in some way."""

    def __init__(self, lies: dict[str, str] | None = None, drafted: int = 5) -> None:
        self.lies = lies or {}
        self.drafted = drafted
        self.batches: list[int] = []
        self.forgotten = 0
        self.engine = SimpleNamespace(runner=None, speculation=SimpleNamespace(clear=self._forget))

    def _forget(self) -> None:
        self.forgotten += 1

    def encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise InvalidPrompt("This model has no chat template.")
        return [len(prompt)]

    def generate(self, prompts: list[list[int]], params: Any, spec: str) -> list[RequestOutput]:
        self.batches.append(len(prompts))
        lie = self.lies.get(spec)
        if lie == "refused":
            raise InvalidSpec(f"{spec} needs an option.")
        if lie == "unfit":
            raise InvalidModel(f"{spec} does not fit the model.")
        return [
            RequestOutput(str(index), None, prompt, [self._output(prompt[0], lie if index == 1 else None)])
            for index, prompt in enumerate(prompts)
        ]

    def _output(self, first: int, lie: str | None) -> CompletionOutput:
        tokens = [first, 5, 6 + (lie == "token")]
        top = -0.0 if lie == "bits" else 0.0
        logprobs = [TokenLogprob(token, -0.5, {9: top}) for token in tokens]
        kept = 2 if lie == "length" else 3
        reason = "stop" if lie == "ending" else "length"
        error = "It broke." if lie == "error" else None
        reasons = {lie: 1} if lie in ("proposer failed", "controller failed") else {"drafted": 2}
        metrics = replace(METRICS, decisions=reasons, drafted_tokens=self.drafted)
        return CompletionOutput(0, "", tokens[:kept], reason, None, 7, logprobs[:kept], None, metrics, error)

    def close(self) -> None:
        """Nothing is open."""


def text_audit(llm: FakeLLM, specs: list[str], prompts: int = 3) -> list[Check]:
    return list(text_checks(llm, BUILT_IN[:prompts], specs, 3, no_tick))  # type: ignore[arg-type]


class TestSameText:
    def test_sound_specs_pass_in_both_modes_with_their_figures(self) -> None:
        checks = text_audit(FakeLLM(), ["ngram", "suffix"])
        assert [check.name for check in checks] == [
            f"same text: {spec}, {mode}" for mode in ("greedy", "seeded") for spec in ("ngram", "suffix")
        ]
        assert all(check.passed for check in checks)
        assert checks[0].detail == "3 prompts, 9 tokens, 1.00 tokens per run"

    @pytest.mark.parametrize(
        ("lie", "where"),
        [
            ("token", "prompt 1 differs at token 2: 7 instead of 6"),
            ("bits", "prompt 1 differs at token 0: log probability"),
            ("length", "prompt 1 differs at token 2: one text ends there"),
            ("ending", "prompt 1 ends with stop instead of length"),
            ("error", "prompt 1 failed: It broke."),
            ("proposer failed", "proposer failed in 1 of 3 texts"),
            ("controller failed", "controller failed in 1 of 3 texts"),
        ],
    )
    def test_whatever_differs_fails_and_is_pointed_at(self, lie: str, where: str) -> None:
        sound, wrong = text_audit(FakeLLM({"suffix": lie}), ["ngram", "suffix"])[:2]
        assert sound.passed
        assert not wrong.passed
        assert where in wrong.detail

    def test_a_check_of_nothing_says_so(self) -> None:
        (check, *_) = text_audit(FakeLLM(drafted=0), ["ngram"])
        assert check.passed
        assert check.detail == "3 prompts, 9 tokens, 1.00 tokens per run, nothing was drafted"

    def test_prompts_run_eight_at_once(self) -> None:
        llm = FakeLLM()
        list(text_checks(llm, [*BUILT_IN, *BUILT_IN[:3]], ["ngram"], 3, no_tick))  # type: ignore[arg-type]
        assert llm.batches == [8, 3] * 4
        assert llm.forgotten == 4, "no answer is drafted from an earlier run of its prompt"

    def test_pairs_run_on_fewer_prompts(self) -> None:
        llm = FakeLLM()
        list(text_checks(llm, BUILT_IN * 10, ["ngram+suffix"], 3, no_tick))  # type: ignore[arg-type]
        assert llm.batches == [*[8] * 10, *[8] * 2] * 2
        assert (num_prompts("a+b", 40), num_prompts("a+b", 5), num_prompts("a", 40)) == (8, 5, 40)

    def test_the_default_is_every_proposer_that_needs_no_option_and_every_pair(self) -> None:
        llm: Any = FakeLLM({"suffix": "refused", "quantised": "unfit"})
        assert unusable_proposers(llm) == {
            "suffix": "suffix needs an option.",
            "quantised": "quantised does not fit the model.",
            "grammar": "it drafts only for requests that have a grammar.",
            "prediction": "it drafts only for requests that have a prediction.",
        }
        assert with_pairs(["a", "b", "c"]) == ["a", "b", "c", "auto", "a+b", "a+c", "b+c"]


class TestPrompts:
    def test_a_limit_is_spread_over_the_categories(self) -> None:
        questions = [Question(category, f"{category}{n}") for category in "abcd" for n in range(3)]
        assert [question.text for question in spread(questions, 6)] == ["a0", "b0", "c0", "d0", "a1", "c1"]
        assert [question.text for question in spread(questions, 2)] == ["a0", "c0"]
        assert len(spread(questions, 100)) == 12

    @pytest.mark.parametrize("line", ["", "{", "[]", '{"category": "a", "turns": []}', '{"turns": ["hi"]}'])
    def test_a_bad_suite_is_named(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "suite.jsonl"
        file.write_text(line)
        with pytest.raises(InvalidPrompt, match=r"suite\.jsonl"):
            read_suite(file)


def test_row_counts_that_the_backend_uses_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(name="native", row_counts=(1, 2, 4, 8))
    runner: Any = SimpleNamespace(backend=backend, decoder=SimpleNamespace(linears=[]))
    monkeypatch.setattr(rows, "agreeing_row_counts", lambda backend, linears: (1, 2, 4))
    monkeypatch.setattr(rows, "layers_agree", lambda backend, decoder: True)
    linear, layer = rows.row_checks(runner, no_tick)
    assert (linear.passed, layer.passed) == (False, True)
    assert linear.detail == "the same bits in runs of 1, 2, 4 rows; native uses 1, 2, 4, 8"


class TestCommand:
    @pytest.fixture
    def audit(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
        """Runs `foredraft audit ARGUMENTS...` with a stand-in for the model and without its rows."""
        monkeypatch.setattr(rows, "row_checks", lambda runner, tick: [Check("rows: any", True, "1, 2")])
        monkeypatch.setattr(distribution, "CASES", CASES[:1])
        monkeypatch.setattr(
            distribution,
            "distribution_checks",
            lambda samples, tick: [Check("distribution: any", True, f"{samples} texts")],
        )

        def call(*arguments: str, lies: dict[str, str] | None = None) -> tuple[int, str, str]:
            module = ModuleType("foredraft.llm")
            module.LLM = lambda model, **options: FakeLLM(lies)  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "foredraft.llm", module)
            monkeypatch.setattr(sys, "argv", ["foredraft", "audit", *arguments])
            with pytest.raises(SystemExit) as ended:
                run()
            out, err = capsys.readouterr()
            assert isinstance(ended.value.code, int)
            return ended.value.code, out, err

        return call

    def test_json_is_one_line_of_the_promised_shape(self, audit: Callable[..., Any]) -> None:
        code, out, err = audit("--json", "--spec", "ngram", "--samples", "600")
        assert (code, out.count("\n")) == (0, 1)
        record = json.loads(out)
        assert [json.loads(line) for line in err.splitlines()] == record["checks"], "each as it is done"
        assert set(record) == {"passed", "checks"}
        assert record["passed"] is True
        assert [check["name"] for check in record["checks"]] == [
            "same text: ngram, greedy",
            "same text: ngram, seeded",
            "distribution: any",
            "rows: any",
        ]
        assert record["checks"][2] == {"name": "distribution: any", "passed": True, "detail": "600 texts"}

    def test_proposers_that_need_options_are_left_out_and_named(self, audit: Callable[..., Any]) -> None:
        code, out, err = audit("--json", lies={"suffix": "refused", "quantised": "unfit"})
        assert code == 0
        assert "suffix" not in out and "quantised" not in out
        assert err.splitlines()[:2] == [
            "suffix is left out: suffix needs an option.",
            "quantised is left out: quantised does not fit the model.",
        ]

    @pytest.mark.parametrize("arguments", [(), ("--json",)])
    def test_each_check_is_shown_when_it_is_done(
        self, audit: Callable[..., Any], arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def row_checks(runner: Any, tick: Any) -> Any:
            raise InvalidModel("It ends here.")

        monkeypatch.setattr(rows, "row_checks", row_checks)
        code, out, err = audit(*arguments, "--spec", "ngram")
        assert code == 2
        shown = err.splitlines()[:-1] if arguments else out.splitlines()
        assert ["same text: ngram, greedy" in shown[0], "distribution: any" in shown[-1], len(shown)] == [True, True, 3]

    def test_a_failed_check_ends_with_1(self, audit: Callable[..., Any]) -> None:
        code, out, _ = audit("--spec", "ngram", lies={"ngram": "token"})
        assert code == 1
        assert out.splitlines()[0].startswith("FAILED  same text: ngram, greedy: prompt 1 differs at token 2")
        assert out.splitlines()[-1] == "2 of 4 checks passed."
        code, out, _ = audit("--json", "--spec", "ngram", lies={"ngram": "token"})
        assert (code, json.loads(out)["passed"]) == (1, False)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--spec", "nonsense"],
            ["--suite", "nowhere.jsonl"],
            ["--limit", "0"],
            ["--samples", "1"],
            ["--max-tokens", "0"],
        ],
    )
    def test_bad_arguments_end_with_2_and_one_sentence(self, audit: Callable[..., Any], arguments: list[str]) -> None:
        code, out, err = audit(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_tables_are_far_enough_apart_to_tell_rules_apart() -> None:
    assert float(torch.minimum(distribution.TARGET[()], distribution.DRAFTER[()]).sum()) < 0.8
