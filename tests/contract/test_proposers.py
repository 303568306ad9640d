"""What every proposer in the registry keeps to, whatever it guesses by."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers.merge import merge
from foredraft.proposers.registry import ProposerChoice, build_proposer, parse_spec, proposer_names
from foredraft.types import Commit, Draft, Sequence
from tests.tiny_models import VOCAB, random_model, save_model

ALL = [pytest.param(name, id=name) for name in proposer_names()]
PAIRS = [f"{one}+{other}" for i, one in enumerate(proposer_names()) for other in proposer_names()[i + 1 :]]


def sequence(id: int, tokens: list[int], num_prompt_tokens: int = 1) -> Sequence:
    params = SamplingParams().resolved({})
    return Sequence(id, str(id), 0, list(tokens), num_prompt_tokens, params, seed=id, max_tokens=999)


def text(seed: int, length: int) -> list[int]:
    """Text that repeats itself here and there."""
    chance = random.Random(seed)
    tokens = [chance.randrange(20) for _ in range(8)]
    while len(tokens) < length:
        start = chance.randrange(len(tokens))
        tokens += tokens[start : start + chance.randrange(1, 9)] if chance.random() < 0.7 else [chance.randrange(20)]
    return tokens[:length]


@pytest.mark.parametrize("name", ALL)
def test_budgets_are_kept_and_drafts_are_trees(name: str) -> None:
    proposer = build_proposer(ProposerChoice(name))
    guessed = 0
    for seed in range(30):
        tokens = text(seed, 60)
        for budget in (0, 1, 3, 100):
            (draft,) = proposer.propose([sequence(seed, tokens)], [budget])
            assert len(draft) <= min(budget, proposer.num_lookahead_tokens)
            assert all(parent < node for node, parent in enumerate(draft.parents))
            assert all(0 < score <= 1 for score in draft.scores)
            for node, parent in enumerate(draft.parents):
                assert parent < 0 or draft.scores[node] <= draft.scores[parent], "a child is reached no oftener"
            edges = list(zip(draft.parents, draft.tokens, strict=True))
            assert len(set(edges)) == len(edges), "no guess is made twice"
            assert set(draft.origin) <= {name}
            guessed += len(draft)
    assert guessed > 100, "it does guess"


@pytest.mark.parametrize("name", ALL)
def test_state_is_a_function_of_the_committed_tokens(name: str) -> None:
    """Growing with a text, asked at every step or now and then, it guesses what a fresh one guesses from the whole."""
    tokens = text(3, 80)
    grown, lazy = build_proposer(ProposerChoice(name)), build_proposer(ProposerChoice(name))
    live, late = sequence(0, tokens[:10]), sequence(0, tokens[:10])
    for end in range(10, 80):
        live.token_ids = tokens[:end]
        (draft,) = grown.propose([live], [16])
        fresh = build_proposer(ProposerChoice(name))
        assert (draft,) == tuple(fresh.propose([sequence(9, tokens[:end])], [16]))
        if end % 7 == 0:
            late.token_ids = tokens[:end]
            assert [draft] == lazy.propose([late], [16])


@pytest.mark.parametrize("name", ALL)
def test_sequences_do_not_mix_and_release_leaves_nothing(name: str) -> None:
    proposer = build_proposer(ProposerChoice(name))
    texts = [sequence(id, text(id, 50)) for id in range(4)]
    together = proposer.propose(texts, [8] * 4)
    for one, draft in zip(texts, together, strict=True):
        assert build_proposer(ProposerChoice(name)).propose([one], [8]) == [draft]
    proposer.release([one.id for one in texts])
    proposer.release([77])  # unknown: nothing happens
    other = sequence(0, text(40, 50))  # the id of a text that is gone
    assert proposer.propose([other], [8]) == build_proposer(ProposerChoice(name)).propose([other], [8])


def test_the_suffix_store_forgets_the_oldest_answers() -> None:
    from foredraft.proposers.suffix import Suffix, SuffixOptions

    proposer = Suffix(SuffixOptions(store=100))
    for id in range(50):
        done = sequence(id, [1000 + 37 * id + j for j in range(30)])
        proposer.observe([Commit(done, (), (), (), "stop")])
    assert proposer._num_stored <= 100
    assert len(proposer._store) <= 100 * proposer.options.max_n
    old, new = sequence(90, [7, 1001, 1002, 1003]), sequence(91, [7, 1000 + 37 * 49 + 1, 1000 + 37 * 49 + 2])
    assert [len(draft) > 0 for draft in proposer.propose([old, new], [8, 8])] == [False, True]
    while proposer._stored:
        proposer._enter(proposer._store.remove, proposer._stored.popleft())
    assert len(proposer._store) == 0, "what is forgotten leaves nothing behind"


def test_merging_keeps_the_best_nodes_and_their_ancestors() -> None:
    chance = random.Random(5)
    for _ in range(200):
        drafts = [random_draft(chance, origin) for origin in ("a", "b", "c")]
        budget = chance.randrange(0, 20)
        merged = merge(drafts, budget)
        whole = merge(drafts, 1000)
        assert len(merged) == min(budget, len(whole))
        assert paths(merged) <= paths(whole) == set().union(*(paths(draft) for draft in drafts))
        if len(merged) < len(whole):
            dropped = sorted(whole.scores, reverse=True)[len(merged) :]
            assert min(merged.scores, default=1.0) >= max(dropped)
        edges = list(zip(merged.parents, merged.tokens, strict=True))
        assert len(set(edges)) == len(edges)


def random_draft(chance: random.Random, origin: str) -> Draft:
    parents: list[int] = []
    scores: list[float] = []
    for node in range(chance.randrange(0, 12)):
        parents.append(chance.randrange(-1, node))
        above = scores[parents[-1]] if parents[-1] >= 0 else 1.0
        scores.append(above * chance.random())
    tokens = tuple(chance.randrange(4) for _ in parents)
    return Draft(tokens, tuple(parents), tuple(scores), (origin,) * len(tokens))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Every node as the tokens that lead to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("spec", [*proposer_names(), *PAIRS])
@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(folder: Path, spec: str, temperature: float, acceptance: str) -> None:
    """With batch mates, chunks, preemption and an abort in between. The other rules keep greedy text and the law, not
    the sampled text itself."""
    if temperature and acceptance != "match":
        pytest.skip("sampled text follows the seed under the match rule only")
    prompts = [[token % VOCAB for token in text(seed, 20 + 7 * seed)] for seed in range(6)]
    params = SamplingParams(
        max_tokens=50, temperature=temperature, seed=3, logprobs=1, ignore_eos=True, acceptance=acceptance, top_k=3
    )
    plain = LLM(str(folder)).generate(prompts, params, spec="off")
    llm = LLM(str(folder), kv_cache_tokens=304, max_num_seqs=6, max_num_batched_tokens=40)
    for index, prompt in enumerate(prompts):
        llm.engine.add(str(index), prompt, params, parse_spec(spec))
    llm.engine.add("gone", prompts[0], params, parse_spec(spec))
    outputs = {}
    for step in range(10_000):
        if not llm.engine.has_work:
            break
        if step == 5:
            llm.engine.abort("gone")
        outputs.update({event.request_id: event.output for event in llm.engine.step() if event.output is not None})
        llm.engine.scheduler.check_integrity()
    for index, off in enumerate(plain):
        on = outputs[str(index)]
        assert on is not None
        assert on.token_ids == off.token_ids
        assert on.logprobs == off.logprobs
    assert sum(output.metrics.drafted_tokens for output in outputs.values() if output) > 0
