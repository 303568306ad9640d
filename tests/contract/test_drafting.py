"""Models that guess: a model that guesses for itself is never wrong, so any stale K or V shows as a refused guess."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.errors import InvalidModel, InvalidSpec
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.model.whole_model import ModelDrafter
from foredraft.proposers.registry import ProposerChoice, parse_spec
from foredraft.types import Draft, Sequence
from tests.tiny_models import VOCAB, random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


SETTINGS = [
    "draft_model:model={0},k=4",
    "draft_model:model={0},k=3,width=2",
    "early_exit:layers=3,k=3,width=3",
    "staged:chain=ngram>draft_model(model={0}),k=5",
    "staged:chain=ngram>early_exit>draft_model(model={0}),k=5",
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_that_drafts_for_itself_is_never_wrong(folder: Path, setting: str, temperature: float) -> None:
    """Alone and in a batch that is preempted, aborted and fed in chunks."""
    prompts = [[(17 * seed + 3 * place) % VOCAB for place in range(15 + 9 * seed)] for seed in range(4)]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    spec = parse_spec(setting.format(folder))
    llm = LLM(str(folder), kv_cache_tokens=208, max_num_seqs=4, max_num_batched_tokens=60)
    for index, prompt in enumerate(prompts):
        llm.engine.add(str(index), prompt, params, spec)
    outputs: list[Any] = []
    while llm.engine.has_work:
        outputs += [event.output for event in llm.engine.step() if event.output is not None]
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        assert output.metrics.accepted_tokens > 20
        assert set(output.metrics.acceptance_per_depth) == {1.0}


def test_a_prefix_that_is_found_in_the_cache_is_not_run_again(folder: Path) -> None:
    """Unless the guessing model has not run it: blocks that only the target filled are no use to it."""
    llm = LLM(str(folder))
    spec, params = f"draft_model:model={folder},k=2", SamplingParams(max_tokens=4, ignore_eos=True)
    shared = [(7 * place) % VOCAB for place in range(64)]
    rows = count_rows(llm, spec)
    llm.generate([[*shared, 1]], params, spec="off")
    llm.generate([[*shared, 2]], params, spec=spec)
    assert rows() >= 64, "the target's prefix was cached, the guessing model's was not"
    llm.generate([[*shared, 3]], params, spec=spec)
    assert rows() < 16, "now both are"


def test_nothing_is_shared_between_requests_of_different_salts(folder: Path) -> None:
    """Neither the target's prefix, nor the drafting model's, nor remembered answers."""
    llm = LLM(str(folder))
    model = f"draft_model:model={folder},k=2"
    prompt, rows = [(7 * place) % VOCAB for place in range(65)], count_rows(llm, model)

    def run(salt: str) -> tuple[int, int, int]:
        params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True, cache_salt=salt)
        (copied,) = llm.generate([prompt], params, spec="suffix")
        llm.generate([prompt], params, spec=model)
        return copied.metrics.cached_tokens, copied.metrics.accepted_tokens, rows()

    first, again = run("one"), run("one")
    assert first[0] == 0 and again[0] == 64, "the target's prefix"
    assert first[1] < 10 < again[1], "remembered answers"
    assert first[2] >= 65 > again[2], "the drafting model's prefix"
    assert run("other") == first


def count_rows(llm: LLM, spec: str) -> Any:
    """A function that tells how many rows the guessing model has run since it was last asked."""
    llm.engine.speculation.prepare(parse_spec(spec))
    proposer = llm.engine.speculation.assignments.proposers[str(parse_spec(spec).choices[0])].proposer
    assert isinstance(proposer, ModelDrafter)
    forward, seen = proposer.runner.runner.forward, [0]

    def counting(batch: Any) -> Any:
        seen[0] += batch.num_rows
        return forward(batch)

    proposer.runner.runner.forward = counting  # type: ignore[method-assign]

    def since() -> int:
        rows, seen[0] = seen[0], 0
        return rows

    return since


def kinds_of_draft_model(llm: LLM, **options: str) -> tuple[set[str], set[str], set[str]]:
    """Of its embedding, its layers and its output head."""
    proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice("draft_model", dict(options)))
    assert isinstance(proposer, ModelDrafter)
    embedding, *layers, head = proposer.runner.runner.decoder.weight_kinds
    return set(embedding), {kind for kinds in layers for kind in kinds}, set(head)


def test_a_draft_model_has_no_more_bits_than_its_target(folder: Path, tmp_path: Path) -> None:
    """In 4 bits it has 4 throughout, but for the embedding, which may be the head too."""
    llm = LLM(str(folder), dtype="int4")
    embedding, *layers, head = llm.engine.runner.decoder.weight_kinds
    assert (embedding, set(layers), head) == (("q8",), {("q4",)}, ("q8",))
    assert kinds_of_draft_model(llm, model=str(folder)) == ({"q8"}, {"q4"}, {"q4"})
    assert kinds_of_draft_model(llm, model=str(folder), dtype="int8") == ({"q8"}, {"q8"}, {"q8"})
    assert kinds_of_draft_model(LLM(str(folder)), model=str(folder)) == ({"f32"}, {"f32"}, {"f32"})
    tied = save_model(random_model("llama-tied"), tmp_path)
    assert kinds_of_draft_model(llm, model=str(tied)) == ({"q8"}, {"q4"}, {"q8"})


def test_a_long_text_is_caught_up_with_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder))
    monkeypatch.setattr("foredraft.proposers.model.drafter.CATCH_UP", 100)
    proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice("draft_model", {"model": str(folder)}))
    text = make_sequence(llm, [(5 * place) % VOCAB for place in range(250)])
    sizes = [len(proposer.propose([text], [4], 0.0)[0]) for _ in range(4)]
    assert sizes == [0, 0, 4, 4]


def test_a_long_prompt_does_not_hold_up_a_running_stream(folder: Path) -> None:
    """Sequences that are behind share two tiles of rows while another one drafts, first come first served."""
    llm = LLM(str(folder), kv_cache_tokens=2048)
    spec = f"draft_model:model={folder},k=4"
    rows = count_rows(llm, spec)
    proposer = llm.engine.speculation.assignments.proposers[str(parse_spec(spec).choices[0])].proposer
    stream, *new = (
        make_sequence(llm, [(5 * place + size) % VOCAB for place in range(size)], id=size) for size in (8, 100, 90)
    )
    assert len(proposer.propose([stream], [4], 0.0)[0]) == 4
    rows()
    sizes: list[list[int]] = []
    while not sizes or not all(sizes[-1]):
        sizes.append([len(draft) for draft in proposer.propose([stream, *new], [4] * 3, 0.0)])
        drafted = sum(sizes[-1])
        assert rows() <= 32 + drafted + 3, "catch-up tokens, draft tokens, and the last known ones"
    assert sizes == [[4, 0, 0]] * 3 + [[4, 4, 0]] * 2 + [[4, 4, 4]]
    last, others = make_sequence(llm, [3] * 400, id=400), make_sequence(llm, [4] * 300, id=300)
    assert [len(draft) for draft in proposer.propose([last, others], [4] * 2, 0.0)] == [4, 4], "nobody else waits"


def test_a_stage_that_cannot_be_built_leaves_no_model_behind(folder: Path, tmp_path: Path) -> None:
    llm = LLM(str(folder))
    with pytest.raises(InvalidModel):
        llm.generate([[1, 2]], spec=f"staged:chain=quantised>draft_model(model={tmp_path / 'nowhere'})")
    assert set(llm.engine.kv.groups) == {"target"}
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), spec=f"staged:chain=quantised>draft_model(model={folder})")
    assert "quantised int4" in llm.engine.kv.groups


@pytest.mark.parametrize(("prompt_logprobs", "checks"), [(None, 0), (2, 1)])
def test_params_are_not_checked_again_for_every_run(
    folder: Path, prompt_logprobs: int | None, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes long with many biases. Prompt logprobs are taken out once: the draft model owes none."""
    llm = LLM(str(folder))
    proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice("draft_model", {"model": str(folder)}))
    text = make_sequence(llm, [5, 4, 3, 2], logit_bias=dict.fromkeys(range(50), 1.0), prompt_logprobs=prompt_logprobs)
    check, seen = SamplingParams.__post_init__, []

    def counted(params: SamplingParams) -> None:
        seen.append(params)
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    assert len(proposer.propose([text], [4], 0.0)[0]) == 4
    assert len(seen) == checks


def make_sequence(llm: LLM, tokens: list[int], id: int = 99, **fields: Any) -> Sequence:
    params = SamplingParams(**fields).resolved({})
    made = Sequence(id, "", 0, tokens, 1, params, seed=1, max_tokens=999)
    assert llm.engine.scheduler.pool.reserve(made, len(tokens) + 100)
    return made


def test_sampled_siblings_are_drawn_without_replacement(folder: Path) -> None:
    """The first from q, the second from what the first leaves: both stated, both true."""
    llm = LLM(str(folder))
    proposer = llm.engine.speculation.assignments.make_proposer(ProposerChoice("early_exit", {"k": "2", "width": "3"}))
    live = make_sequence(llm, [3, 1, 4, 1, 5, 9, 2, 6], temperature=0.3, top_k=5, acceptance="rejection")
    seconds: dict[int, Counter[int]] = {}
    drafts: dict[int, Draft] = {}
    for seed in range(900):
        live.seed = seed
        (draft,) = proposer.propose([live], [6], 0.0)
        assert draft.parents == (-1, -1, -1, 0, 1, 2)
        first, second, third = draft.tokens[:3]
        assert len({first, second, third}) == 3
        left = draft.q[0].clone()
        left[first] = 0
        assert torch.allclose(draft.q[1], left / left.sum())
        seconds.setdefault(first, Counter())[second] += 1
        drafts[first] = draft
    first = max(seconds, key=lambda token: seconds[token].total())
    counts, q = seconds[first], drafts[first].q[1]
    draws = counts.total()
    misfit = 2 * sum(count * math.log(count / (draws * float(q[token]))) for token, count in counts.items())
    assert draws > 200 and misfit < 25  # 3 degrees of freedom


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("ngram:k=0", "must be from 1 to 64"),
        ("ngram:depth=2", "it has k, min_n, max_n, which"),
        ("auto(ngram+suffix:k=many)", "must be of type int"),
        ("suffix:depth=inf", "above 0 and up to 64"),
        ("suffix:depth=nan", "above 0 and up to 64"),
        ("draft_model:model=x,k=40,width=2", "k times width at most 64"),
        ("draft_model:model=x,dtype=int3", "use auto, float32"),
        ("early_exit:layers=-1", "must be at least 0"),
        ("ngram:k=" + "1" * 5000, "spec has 5008 characters; it may have at most 4096"),
        ("+".join(["ngram"] * 9), "spec joins 9 proposers; it may join at most 8"),
        ("auto(" + "+".join(["ngram"] * 9) + ")", "spec joins 9 proposers; it may join at most 8"),
        ("staged:chain=" + ">".join(["early_exit"] * 5), "chain has 5 stages; it may have at most 4"),
        ("staged:chain=ngram", "needs two stages"),
        ("staged:chain=ngram>suffix", "suffix must be a model"),
        ("staged:chain=ngram>quantised(width=2)", "quantised must be a model that drafts a chain"),
        ("staged:chain=lookahead>quantised", "needs the target argmax"),
        ("staged:chain=off>quantised", "'off' is not one proposer; a chain is NAME>NAME"),
        ("staged:chain=auto>quantised", "'auto' is not one proposer; a chain is NAME>NAME"),
        ("staged:chain=ngram>quantised(bits=5)", "must be 4 or 8"),
        ("staged:chain=ngram>nothing!", "cannot be read"),
        ("staged:width=2", "must be 1"),
    ],
)
def test_bad_settings_are_refused_at_once_with_a_sentence(spec: str, complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        parse_spec(spec)
    with pytest.raises(InvalidSpec, match=complaint):
        LLM("no model is looked for", spec=spec)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer, whose logits are padded to fewer columns than the target's."""
    return save_model(random_model("llama", seed=3, vocab_size=NARROW), tmp_path_factory.mktemp("narrow"))


NARROW = VOCAB - 32
NARROW_SETTINGS = [
    "draft_model:model={0}",
    "draft_model:model={0},k=3,width=2",
    "staged:chain=early_exit>draft_model(model={0})",
]


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
@pytest.mark.parametrize("setting", NARROW_SETTINGS)
def test_a_draft_model_may_have_a_narrower_vocabulary(
    folder: Path, narrow: Path, setting: str, acceptance: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It guesses where it can read the text, also under a bias for tokens that it has not; elsewhere it is silent."""
    few = dict.fromkeys((*range(9), VOCAB - 1), 8.0)
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, acceptance=acceptance, logit_bias=few)
    prompts = [[5, 4, 3, 2], [5, VOCAB - 2, 3]]
    llm = LLM(str(folder))
    readable, unreadable = llm.generate(prompts, params, spec=setting.format(narrow))
    assert [readable.token_ids, unreadable.token_ids] == [
        one.token_ids for one in llm.generate(prompts, params, spec="off")
    ]
    assert readable.metrics.drafted_tokens > 0
    assert unreadable.metrics.drafted_tokens == 0
    sampled = replace(params, temperature=0.8)
    assert llm.generate(prompts[0], sampled, spec=setting.format(narrow))[0].error is None
    assert not caplog.records, "no proposer failed"
