"""What a head drafts in a busy engine is what a fresh one drafts for the same tokens: what it reads is never stale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.batch import pack
from foredraft.heads.base import CORRECTIONS
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.registry import ProposerChoice, parse_spec
from foredraft.types import Draft, Sequence, Work
from tests.backends import KERNELS, greedy_and_at
from tests.tiny_heads import KINDS, random_head, save_head, save_heads, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

FEW = dict.fromkeys(range(6), 9.0)  # so that a head that knows nothing is sometimes right


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_heads(folder, tmp_path_factory.mktemp("heads")))


def recorded(llm: LLM, spec: str) -> list[tuple[Sequence, int, Draft]]:
    """A list that grows with every draft that the proposer makes: for which sequence, of what budget."""
    llm.engine.speculation.prepare(parse_spec(spec))
    proposer = llm.engine.speculation.assignments.proposers[str(parse_spec(spec).choices[0])].proposer
    propose, calls = proposer.propose, []

    def recording(sequences: list[Sequence], budgets: list[int], min_score: float) -> list[Draft]:
        drafts = propose(sequences, budgets, min_score)
        copies = [replace(one, token_ids=list(one.token_ids)) for one in sequences]
        calls.extend(zip(copies, budgets, drafts, strict=True))
        return drafts

    proposer.propose = recording  # type: ignore[method-assign]
    return calls


def drafted_afresh(llm: LLM, spec: str, sequence: Sequence, budget: int) -> Draft:
    """By an engine that has computed nothing of the sequence before."""
    choice = parse_spec(spec).choices[0]
    proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice(choice.name, choice.options))
    fresh = replace(sequence, num_computed_tokens=0, block_table=[])
    assert llm.engine.scheduler.pool.reserve(fresh, fresh.num_tokens + 64)
    llm.engine.runner.forward(pack([Work(fresh, fresh.num_tokens - 1)], llm.engine.kv.block_size))
    fresh.num_computed_tokens = fresh.num_tokens - 1
    (draft,) = proposer.propose([fresh], [budget], 0.0)
    proposer.release([fresh.id])
    proposer.close()
    llm.engine.scheduler.pool.free(fresh)
    return draft


@pytest.mark.parametrize(("kernels", "temperature"), greedy_and_at(0.8, KERNELS), indirect=["kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_fresh_engine(
    folder: Path, heads: str, kind: str, temperature: float, kernels: str
) -> None:
    """After prefix hits, rejected and moved nodes, chunks, preemption, and steps without a draft."""
    compare_with_fresh(folder, heads, kind, temperature)


def compare_with_fresh(folder: Path, heads: str, kind: str, temperature: float) -> None:
    shared = [(7 * place) % VOCAB for place in range(35)]
    prompts = [[*shared, *((11 * seed + place) % VOCAB for place in range(5 + 9 * seed))] for seed in range(5)]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True, logit_bias=FEW)
    # Chunks do not depend on what steps take: a busy machine would have smaller ones, and perhaps no preemption.
    options: Any = {
        "kv_cache_tokens": 256,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 60,
        "max_chunk_s": float("inf"),
    }
    busy = LLM(str(folder), head=heads, spec="off", **options)
    calls = recorded(busy, kind)
    outputs: list[Any] = []
    for index, prompt in enumerate(prompts):
        busy.engine.add(str(index), prompt, params, parse_spec(kind))
        for _ in range(3):
            busy.engine.step()
    while busy.engine.has_work:
        outputs += [event.output for event in busy.engine.step() if event.output is not None]
    metrics = [output.metrics for output in outputs]
    assert sum(one.preemptions for one in metrics) > 0 and sum(one.cached_tokens for one in metrics) > 0
    assert sum(one.accepted_tokens for one in metrics) > 20
    fresh = LLM(str(folder), head=heads, spec="off", kv_cache_tokens=2048, prefix_caching=False)
    drafts = [call for call in calls if call[2]]
    assert len(drafts) > 60
    for sequence, budget, draft in drafts[::6]:
        assert draft == drafted_afresh(fresh, kind, sequence, budget)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_catches_up_after_steps_without_a_draft(folder: Path, heads: str, kind: str) -> None:
    """The target's steps have left taps, so a head that was off drafts in the next step what it would have anyway."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias=FEW)
    llm = LLM(str(folder), head=heads, spec="off", kv_cache_tokens=2048)
    prompt = [(5 * place) % VOCAB for place in range(40)]
    (plain,) = llm.generate([prompt], params, spec="off")
    calls = recorded(llm, kind)
    (again,) = llm.generate([[*prompt, *plain.token_ids[:20]]], replace(params, max_tokens=10), spec=kind)
    assert again.token_ids == plain.token_ids[20:] and again.metrics.cached_tokens >= 48
    sequence, budget, draft = calls[1]  # in the first step, the last token of the prompt has not been run
    assert not calls[0][2] and draft
    fresh = LLM(str(folder), head=heads, spec="off", kv_cache_tokens=2048, prefix_caching=False)
    assert draft == drafted_afresh(fresh, kind, sequence, budget)


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_the_shape_that_was_asked_for(folder: Path, heads: str, kind: str, tree: str) -> None:
    llm = LLM(str(folder), head=heads, spec="off")
    params = SamplingParams().resolved({})
    sequences = [
        Sequence(seed, "", 0, [(seed + 3 * place) % VOCAB for place in range(20)], 1, params, 0, 9) for seed in range(4)
    ]
    drafts = [drafted_afresh(llm, f"{kind}:tree={tree},k=3,nodes=8,width=3", one, 16) for one in sequences]
    shapes = {draft.parents for draft in drafts}
    if tree == "chain":
        assert shapes == {(-1, 0, 1)}
        return
    assert all(len(draft) == 8 for draft in drafts)
    if tree == "static":
        assert len(shapes) == 1 and drafts[0].depth == 3
        return
    for sequence, draft in zip(sequences, drafts, strict=True):  # no candidate that was left out is more probable
        wide = drafted_afresh(llm, f"{kind}:k=3,nodes=64,width=3", sequence, 64)
        assert sorted(draft.scores, reverse=True) == pytest.approx(sorted(wide.scores, reverse=True)[:8])


SAMPLING_HEADS = [("eagle", "none"), ("medusa", "none"), ("mtp", "none"), *(("dflash", each) for each in CORRECTIONS)]


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize(("kind", "correction"), SAMPLING_HEADS)
def test_sampled_drafts_do_not_depend_on_batch_mates(
    folder: Path, tmp_path: Path, kind: str, correction: str, kernels: str
) -> None:
    """Tokens and every bit of q: the coins of `rejection` and `block` are thrown against it."""
    head = save_head(random_head(tiny_config(kind, folder, correction)), tmp_path)
    compare_with_alone(folder, str(head), kind)


def compare_with_alone(folder: Path, head: str, kind: str) -> None:
    llm = LLM(str(folder), head=head, spec="off", kv_cache_tokens=4096, threads=1)
    prompts = [[(7 * index + 3 * place) % VOCAB for place in range(5 + index)] for index in range(6)]
    seeds = [SamplingParams(max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(6)]
    params = [replace(each, acceptance=rule) for each, rule in zip(seeds, ["rejection", "block"] * 3, strict=True)]
    calls = recorded(llm, kind)
    alone = [llm.generate([prompt], each, spec=kind)[0] for prompt, each in zip(prompts, params, strict=True)]
    drafted = {key(call): call[2] for call in calls if call[2]}
    calls.clear()
    together = llm.generate(prompts, params, spec=kind)
    compared = [(drafted[key(call)], call[2]) for call in calls if key(call) in drafted]
    assert len(compared) > 20
    assert all(one.tokens == other.tokens and torch.equal(one.q, other.q) for one, other in compared)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def key(call: tuple[Sequence, int, Draft]) -> tuple[object, ...]:
    """What a draft may depend on."""
    sequence, budget, _ = call
    return tuple(sequence.token_ids), sequence.seed, budget


@pytest.mark.parametrize("correction", ["none", "markov"])
@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_other_corrections_draft_too(folder: Path, tmp_path: Path, correction: str, acceptance: str) -> None:
    head = save_head(random_head(tiny_config("dflash", folder, correction)), tmp_path)
    llm = LLM(str(folder), head=str(head), spec="off", dtype="int4")
    params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias=FEW, acceptance=acceptance)
    on, off = (llm.generate([[1, 2, 3, 4]], params, spec=spec)[0] for spec in ("dflash", "off"))
    assert on.token_ids == off.token_ids and on.metrics.drafted_tokens > 20 and on.error is None
