"""Grammars under speculation: every answer fits its grammar and is the one that plain decoding gives."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from foredraft.llm import LLM
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice
from foredraft.sampling import grammar as grammar_module
from foredraft.sampling.grammar import GrammarConstraint
from foredraft.types import Sequence
from tests.grammars import SCHEMAS, record
from tests.steady_controller import SteadyController
from tests.tiny_heads import save_heads
from tests.tiny_models import random_model, save_model

pytest.importorskip("llguidance")

FREE = ["suffix", "ngram+suffix", "grammar", "ngram+suffix+grammar", "auto"]
MODELS = ["quantised:k=5", "early_exit:k=3,width=2", "staged:chain=grammar>quantised", "quantised+grammar"]
HEADS = ["eagle:k=3", "dflash:k=3", "medusa", "suffix+eagle"]
PROMPTS = [[5, 6, 7 + index] for index in range(len(SCHEMAS))]
WORDS = {"regex": "([a-f]{2,5} ){3,6}end"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    made = LLM(str(folder), threads=1, max_num_seqs=64)
    made.engine.speculation.controller = SteadyController()
    return made


def every_schema(**fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=120, seed=index, grammar=schema, **fields)
        for index, schema in enumerate(SCHEMAS.values())
    ]


def check_answers(outputs: Items[RequestOutput], names: Items[str] = tuple(SCHEMAS)) -> None:
    """What has ended by itself fits its schema; most has."""
    ended = [(name, output) for name, output in zip(names, outputs, strict=True) if output.finish_reason == "stop"]
    for name, output in ended:
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])
    assert len(ended) >= len(names) - 3, [output.text for output in outputs if output.finish_reason != "stop"]


def answers(outputs: Items[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.text, output.finish_reason, output.logprobs) for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_fit_their_schemas_and_are_those_of_plain_decoding(llm: LLM, temperature: float) -> None:
    params = every_schema(temperature=temperature, logprobs=2)
    plain = llm.generate(PROMPTS, params, spec="off")
    check_answers(plain)
    for spec in (*FREE, *MODELS) if temperature else FREE:
        drafted = llm.generate(PROMPTS, params, spec=spec)
        assert answers(drafted) == answers(plain), spec
        assert sum(output.metrics.accepted_tokens for output in drafted) > 100, spec
        llm.engine.speculation.clear()


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_heads_draft_what_grammars_allow(folder: Path, tmp_path: Path, temperature: float) -> None:
    llm = LLM(str(folder), head=str(save_heads(folder, tmp_path)), spec="off", threads=1, max_num_seqs=64)
    params, prompts, names = every_schema(temperature=temperature)[::2], PROMPTS[::2], list(SCHEMAS)[::2]
    plain = llm.generate(prompts, params, spec="off")
    check_answers(plain, names)
    for spec in HEADS:
        drafted = llm.generate(prompts, params, spec=spec)
        assert answers(drafted) == answers(plain), spec
        assert sum(output.metrics.accepted_tokens for output in drafted) > 50, spec


def test_the_reference_backend_masks_too(folder: Path) -> None:
    llm = LLM(str(folder), threads=1, max_num_seqs=64, backend="torch")
    params, prompts, names = every_schema(temperature=1.0, top_p=0.9)[::4], PROMPTS[::4], list(SCHEMAS)[::4]
    plain = llm.generate(prompts, params, spec="off")
    check_answers(plain, names)
    assert answers(llm.generate(prompts, params, spec="ngram+suffix+grammar")) == answers(plain)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("spec", ["quantised:k=4", "early_exit:k=3,width=2"])
def test_answers_fit_their_schemas_under_the_other_rules(llm: LLM, spec: str, acceptance: str) -> None:
    """Greedy ones are those of plain decoding, too. The draft is drawn from the masked distribution, so it is not
    rejected for its form."""
    greedy, sampled = (every_schema(temperature=t, acceptance=acceptance)[::3] for t in (0.0, 1.0))
    prompts, names = PROMPTS[::3], list(SCHEMAS)[::3]
    assert answers(llm.generate(prompts, greedy, spec=spec)) == answers(llm.generate(prompts, greedy, spec="off"))
    outputs = llm.generate(prompts, sampled, spec=spec)
    check_answers(outputs, names)
    assert sum(output.metrics.accepted_tokens for output in outputs) > 50


def test_forced_tokens_are_never_rejected(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, every_schema(temperature=1.0), spec="grammar")
    drafted = sum(output.metrics.drafted_tokens for output in outputs)
    assert drafted == sum(output.metrics.accepted_tokens for output in outputs) > 500


def test_free_proposers_waste_no_row_on_what_the_grammar_forbids(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = every_schema(temperature=0.0)
    pruned = llm.generate(PROMPTS, params, spec="ngram+suffix")
    llm.engine.speculation.clear()
    monkeypatch.setattr("foredraft.engine.speculation.pruned", lambda draft, sequence: draft)
    whole = llm.generate(PROMPTS, params, spec="ngram+suffix")
    assert answers(pruned) == answers(whole)
    rows = [sum(output.metrics.drafted_tokens for output in outputs) for outputs in (pruned, whole)]
    assert rows[0] < 0.8 * rows[1]


class TestMutants:
    """What the tests above would notice."""

    def difference(self, llm: LLM) -> bool:
        params = every_schema(temperature=1.0)
        plain, drafted = (answers(llm.generate(PROMPTS, params, spec=spec)) for spec in ("off", "ngram+suffix"))
        return plain != drafted or any(finish == "error" for _, _, finish, _ in drafted)

    def test_without_a_mutation_there_is_no_difference(self, llm: LLM) -> None:
        assert not self.difference(llm)

    def test_a_mask_that_ignores_the_path(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = GrammarConstraint.mask
        monkeypatch.setattr(GrammarConstraint, "mask", lambda self, path: whole(self, ()))
        assert self.difference(llm)

    def test_a_parser_that_does_not_roll_back(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def move(self: GrammarConstraint, matcher: Any, path: Items[int]) -> int:
            behind = len(self._tokens) - self.num_accepted
            consumed = matcher.try_consume_tokens(list(path[behind:]))
            self._tokens += path[behind : behind + consumed]
            return min(len(path), behind + consumed)

        monkeypatch.setattr(GrammarConstraint, "_move", move)
        assert self.difference(llm)


class TestEnds:
    def test_a_complete_grammar_ends_the_request_without_a_token_more(self, llm: LLM) -> None:
        for ignore_eos in (False, True):
            params = SamplingParams(temperature=0, ignore_eos=ignore_eos, grammar={"choice": ["yes", "no"]})
            for spec in ("off", "grammar"):
                (output,) = llm.generate([[5, 6]], params, spec=spec)
                assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
                assert output.text in ("yes", "no") and len(output.token_ids) == len(output.text)

    def test_a_grammar_that_may_end_or_go_on_ends_with_an_end_token(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar={"regex": "a+"}, logit_bias={1: 5.0})
        plain, drafted = (llm.generate([[5, 6]], params, spec=spec)[0] for spec in ("off", "ngram+grammar"))
        assert (plain.token_ids[-1], set(plain.text), plain.finish_reason) == (1, {"a"}, "stop")
        assert answers([plain]) == answers([drafted])
        ignored = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, grammar={"regex": "a+"})
        (output,) = llm.generate([[5, 6]], ignored, spec="off")
        assert (output.text, output.finish_reason) == ("a" * 40, "length")

    def test_a_complete_grammar_counts_for_more_than_the_limit(self, llm: LLM) -> None:
        for limit, reason in ((2, "length"), (3, "stop")):
            params = SamplingParams(max_tokens=limit, temperature=0, grammar={"choice": ["yes"]})
            for spec in ("off", "grammar"):
                (output,) = llm.generate([[5, 6]], params, spec=spec)
                assert (output.text, output.finish_reason) == ("yes"[:limit], reason)

    def test_stops_cut_a_forced_path(self, llm: LLM) -> None:
        grammar = record(alpha={"const": "beta"}, gamma={"const": "delta"})
        params = SamplingParams(max_tokens=60, temperature=0, stop=["eta"], grammar=grammar)
        for spec in ("off", "grammar", "suffix+grammar"):
            (output,) = llm.generate([[5, 6]], params, spec=spec)
            assert (output.text, output.outputs[0].stop_reason) == ('{"alpha": "b', "eta")

    def test_penalties_and_bias_do_not_lead_out_of_the_grammar(self, llm: LLM) -> None:
        params = every_schema(
            temperature=1.0, presence_penalty=2.0, repetition_penalty=5.0, logit_bias={1: 100.0, 60: 100.0}, top_k=2
        )
        plain = llm.generate(PROMPTS, params, spec="off")
        check_answers(plain)
        assert answers(llm.generate(PROMPTS, params, spec="ngram+suffix+grammar")) == answers(plain)


class TestEngine:
    def test_samples_of_a_request_have_constraints_of_their_own(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, n=5, grammar=WORDS)
        plain, drafted = (llm.generate([[5, 6]], params, spec=spec)[0] for spec in ("off", "ngram+suffix+grammar"))
        assert [one.text for one in plain.outputs] == [one.text for one in drafted.outputs]
        assert len({one.text for one in plain.outputs}) == 5

    def test_preemption_prefix_hits_and_aborts_change_nothing(self, folder: Path) -> None:
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=index, grammar=WORDS) for index in range(8)]
        prompts = [[*range(5, 45), index] for index in range(8)]
        plain = [LLM(str(folder), threads=1).generate([p], one, spec="off")[0] for p, one in zip(prompts, params)]
        llm = LLM(str(folder), threads=1, kv_cache_tokens=336, max_num_seqs=8, max_num_batched_tokens=40)
        streams = llm.stream_many(prompts, params, spec="ngram+suffix+grammar")
        gone = llm.stream(prompts[0], params[0], spec="grammar")
        next(gone)
        outputs = {}
        for event in streams:
            if event.output is not None:
                outputs[int(event.request_id)] = event.output
            if len(outputs) == 2:
                gone.close()  # type: ignore[attr-defined]
        assert [outputs[index].text for index in range(8)] == [output.text for output in plain]
        assert sum(output.metrics.preemptions for output in outputs.values()) > 0
        again = llm.generate(prompts, params, spec="suffix")
        assert [output.text for output in again] == [output.text for output in plain]
        assert sum(output.metrics.cached_tokens for output in again) > 0
        pool = llm.engine.scheduler.pool
        assert not llm.engine.has_work and pool.num_free_blocks == pool.num_blocks

    def test_a_grammar_that_exceeds_a_limit_ends_its_own_request_only(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hungry = SamplingParams(max_tokens=200, temperature=1.0, seed=1, grammar={"regex": "(.*a.{200})b"})
        monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 120)
        fine = SamplingParams(max_tokens=60, temperature=1.0, seed=1, grammar=WORDS)
        for spec in ("off", "grammar+ngram", "quantised"):
            failed, other = llm.generate([[5, 6], [5, 6]], [hungry, fine], spec=spec)
            assert failed.finish_reason == "error" and "too many states" in (failed.error or "")
            assert other.finish_reason == "stop"

    def test_a_draft_model_stops_where_the_grammar_allows_nothing(self, llm: LLM) -> None:
        """As after an error, or where it lacks all tokens that are allowed."""

        class Nothing(GrammarConstraint):
            def mask(self, path: Items[int]) -> torch.Tensor:
                return torch.full((320,), len(path) < 2)

        for acceptance in ("match", "rejection"):
            params = SamplingParams(temperature=0.5, acceptance=acceptance).resolved({})
            compiled = llm.engine.grammars.compile({"regex": "a+"})
            proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice("early_exit", {"k": "6"}))
            sequence = Sequence(0, "", 0, [5, 6, 7], 3, params, 0, 99, constraint=Nothing(compiled, False))
            assert llm.engine.scheduler.pool.reserve(sequence, 30)
            (draft,) = proposer.propose([sequence], [6], 0.0)
            assert len(draft) == 2
            llm.engine.scheduler.pool.free(sequence)

    def test_a_choice_of_thousands_of_words_has_the_same_text_with_drafts(self, llm: LLM) -> None:
        words = [f"c{index}" for index in range(3000)]
        params = [SamplingParams(temperature=1.0, seed=seed, grammar={"choice": words}) for seed in range(8)]
        prompts = [[5, 6]] * len(params)
        plain = llm.generate(prompts, params, spec="off")
        assert {output.text for output in plain} <= set(words) and len({output.text for output in plain}) > 4
        for spec in ("grammar", "ngram+suffix+grammar", "quantised"):
            assert answers(llm.generate(prompts, params, spec=spec)) == answers(plain), spec

    def test_auto_names_the_grammar_only_where_there_is_one(self, llm: LLM) -> None:
        without, under = llm.generate(
            [[5, 6], [5, 6]], [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, grammar=WORDS)], spec="auto"
        )
        assert not any("grammar" in reason for reason in without.metrics.decisions)
        assert llm.generate([[5, 6]], every_schema()[4], spec="auto")[0].metrics.by_origin["grammar"] > 0
        assert under.finish_reason is not None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_default_model_answers_in_json(default_model: Path, temperature: float) -> None:
    """At the default model's vocabulary of 49,152 tokens, of which many spell the same text."""
    llm = LLM(str(default_model), dtype="int4", max_num_seqs=16)
    prompts = [[{"role": "user", "content": f"Write JSON that shows an example of: {name}."}] for name in SCHEMAS]
    params = every_schema(temperature=temperature)
    plain = llm.chat(prompts, params, spec="off")  # type: ignore[arg-type]
    check_answers(plain)
    for spec in (*FREE, "quantised:k=5+grammar", "early_exit:k=3,width=2"):
        llm.engine.speculation.clear()
        assert answers(llm.chat(prompts, params, spec=spec)) == answers(plain), spec  # type: ignore[arg-type]
