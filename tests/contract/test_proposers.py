"""What every proposer in the registry keeps to, whatever it guesses by."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.batch import pack
from foredraft.errors import InvalidSpec
from foredraft.llm import LLM
from foredraft.outputs import RequestOutput
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, parse_spec, proposer_names
from foredraft.types import Draft, Sequence, Work
from tests.grammars import record
from tests.steady_controller import SteadyController
from tests.tiny_heads import KINDS, save_heads
from tests.tiny_models import VOCAB, random_model, save_model

ALL = proposer_names()
HEADS = list(KINDS)
OTHERS = [name for name in ALL if name not in HEADS]
PAIRS = [f"{one}+{other}" for one, other in combinations(OTHERS, 2)]
TWOS = [OTHERS[start : start + 2] for start in range(0, len(OTHERS), 2)]
# Every two proposers are together in some of these.
FOURS = ["+".join(one + other) for one, other in combinations(TWOS, 2)]
FOURS += [*(f"suffix+{head}" for head in HEADS), "quantised+eagle+medusa+dflash"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary: another architecture, other weights."""
    return save_model(random_model("qwen2", seed=5), tmp_path_factory.mktemp("sibling"))


class Forcing:
    """A grammar that allows every token, and forces three after every one."""

    num_accepted = 0
    error = None

    def mask(self, path: Items[int]) -> torch.Tensor:
        return torch.ones(VOCAB, dtype=torch.bool)

    def accept(self, tokens: Items[int]) -> None: ...

    def num_valid(self, path: Items[int]) -> int:
        return len(path)

    def forced(self, path: Items[int]) -> list[int]:
        return [(path[-1] + step) % VOCAB for step in (1, 2, 3)]

    def is_complete(self, path: Items[int]) -> bool:
        return False


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trained heads of every kind, but for the training."""
    return str(save_heads(folder, tmp_path_factory.mktemp("heads")))


class Bench:
    """A target to guess for, and sequences that have slots for their tokens and a draft."""

    def __init__(self, folder: Path, sibling: Path, heads: str) -> None:
        self.engine = LLM(str(folder), head=heads).engine
        self.needed = {"draft_model": {"model": str(sibling)}}
        self.next_id = 0

    def proposer(self, name: str) -> Proposer:
        """A new one, that knows nothing yet."""
        return self.engine.speculation.assignments.make_proposer(ProposerChoice(name, self.needed.get(name, {})))

    def propose(self, proposer: Proposer, sequences: list[Sequence], budgets: list[int]) -> list[Draft]:
        """Drafts for sequences of which the target has run all tokens but the last, as it has in a step."""
        works = [Work(replace(one, num_computed_tokens=0), one.num_tokens - 1) for one in sequences]
        self.engine.runner.forward(pack(works, self.engine.kv.block_size))
        for one in sequences:
            one.num_computed_tokens = one.num_tokens - 1
        return proposer.propose(sequences, budgets, 0.0)

    def sequence(self, tokens: list[int], **fields: Any) -> Sequence:
        self.next_id += 1
        params = SamplingParams(prediction=text(0, 300), **fields).resolved({})
        made = Sequence(
            self.next_id, "", 0, list(tokens), 1, params, seed=self.next_id, max_tokens=999, constraint=Forcing()
        )
        assert self.engine.scheduler.pool.reserve(made, len(tokens) + 100)
        return made


@pytest.fixture(scope="module")
def bench(folder: Path, sibling: Path, heads: str) -> Bench:
    return Bench(folder, sibling, heads)


def text(seed: int, length: int) -> list[int]:
    """Text that repeats itself here and there."""
    chance = random.Random(seed)
    tokens = [chance.randrange(20) for _ in range(8)]
    while len(tokens) < length:
        start = chance.randrange(len(tokens))
        tokens += tokens[start : start + chance.randrange(1, 9)] if chance.random() < 0.7 else [chance.randrange(20)]
    return tokens[:length]


@pytest.mark.parametrize("name", ALL)
def test_budgets_are_kept_and_drafts_are_trees(bench: Bench, name: str) -> None:
    proposer = bench.proposer(name)
    drafted = 0
    for seed in range(15):
        live = bench.sequence(text(seed, 60))
        for budget in (0, 1, 3, 100):
            (draft,) = bench.propose(proposer, [live], [budget])
            assert len(draft) <= min(budget, proposer.num_lookahead_tokens)
            assert all(parent < node for node, parent in enumerate(draft.parents))
            assert all(0 < score <= 1 for score in draft.scores)
            for node, parent in enumerate(draft.parents):
                assert parent < 0 or draft.scores[node] <= draft.scores[parent], "a child is reached no oftener"
            edges = list(zip(draft.parents, draft.tokens, strict=True))
            assert len(set(edges)) == len(edges), "no guess is made twice"
            assert set(draft.origin) <= {name}
            drafted += len(draft)
    assert drafted > 50, "it does guess"


@pytest.mark.parametrize("name", ALL)
def test_state_is_a_function_of_the_committed_tokens(bench: Bench, name: str) -> None:
    """Growing with a text, asked at every step or now and then, it guesses what a fresh one guesses from the whole."""
    tokens = text(3, 40)
    grown, lazy = bench.proposer(name), bench.proposer(name)
    live, late = bench.sequence(tokens[:10]), bench.sequence(tokens[:10])
    late.seed = live.seed
    for end in range(10, 40):
        live.token_ids = tokens[:end]
        (draft,) = bench.propose(grown, [live], [16])
        if end % 7 == 0:
            late.token_ids = tokens[:end]
            assert [draft] == bench.propose(lazy, [late], [16])
            other = bench.sequence(tokens[:end])
            other.seed = live.seed
            assert [draft] == bench.propose(bench.proposer(name), [other], [16])


@pytest.mark.parametrize("name", ALL)
def test_state_after_tokens_are_taken_back_is_that_of_a_fresh_one(bench: Bench, name: str) -> None:
    """Only guesses are ever taken back: in a chain of stages, one is asked about a text that the next one refuses."""
    proposer, committed = bench.proposer(name), text(3, 40)
    live = bench.sequence(committed)
    for turn, taken_back in enumerate((5, 1, 12, 30)):
        live.token_ids = [*committed, *text(50 + turn, taken_back)]
        bench.propose(proposer, [live], [16])
        committed = [*committed, *text(70 + turn, 4)]
        live.token_ids = committed
        fresh = bench.sequence(committed)
        fresh.seed = live.seed
        drafts = bench.propose(proposer, [live], [16])
        assert drafts == bench.propose(bench.proposer(name), [fresh], [16])


@pytest.mark.parametrize("name", ALL)
def test_sequences_do_not_mix_and_release_leaves_nothing(bench: Bench, name: str) -> None:
    proposer = bench.proposer(name)
    texts = [bench.sequence(text(seed, 50), temperature=0.7) for seed in range(4)]
    together = bench.propose(proposer, texts, [8] * 4)
    for one, draft in zip(texts, together, strict=True):
        assert bench.propose(bench.proposer(name), [one], [8]) == [draft]
    proposer.release([one.id for one in texts])
    proposer.release([77_777])  # unknown: nothing happens
    texts[0].token_ids = text(40, 50)  # another text under the id of one that is gone
    again = bench.propose(proposer, [texts[0]], [8])
    assert again == bench.propose(bench.proposer(name), [texts[0]], [8])


@pytest.mark.parametrize("name", ["draft_model", "quantised", "early_exit", *HEADS])
def test_sampled_drafts_come_from_the_distribution_that_they_state(bench: Bench, name: str) -> None:
    """First guesses over many seeds against the stated q: a G-test that passes, and fails against another q."""
    proposer, draws = bench.proposer(name), 600
    live = bench.sequence(text(1, 20), temperature=0.3, top_k=6, acceptance="rejection")
    bench.propose(proposer, [live], [1])  # the target has run the tokens
    counts: Counter[int] = Counter()
    for seed in range(draws):
        live.seed = seed
        (draft,) = proposer.propose([live], [1], 0.0)
        counts[draft.tokens[0]] += 1
    q = draft.q[0]
    assert set(counts) <= set(q.nonzero().flatten().tolist())

    def misfit(p: dict[int, float]) -> float:
        return 2 * sum(count * math.log(count / (draws * p[token])) for token, count in counts.items())

    stated = {token: float(q[token]) for token in q.nonzero().flatten().tolist()}
    assert misfit(stated) < 25  # 5 degrees of freedom: exceeded once in 7,000
    flatter = {token: p**0.5 for token, p in stated.items()}
    assert misfit({token: p / sum(flatter.values()) for token, p in flatter.items()}) > 25


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_model(random_model("llama"), tmp_path)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidSpec, match=r"2 tokens differ: 'a' \(\d+ there, \d+ here\), 'b'"):
        LLM(str(folder)).generate("x", spec=f"draft_model:model={other}")
    with pytest.raises(InvalidSpec, match="draft_model needs a model"):
        LLM(str(folder)).generate("x", spec="draft_model")


RUNS = [
    *((spec, temperature, "match") for spec in ALL for temperature in (0.0, 0.8)),
    *((spec, 0.0, acceptance) for spec in ALL for acceptance in ("rejection", "block")),
    *((spec, 0.8, "match") for spec in FOURS),
    *(pytest.param(spec, 0.8, "match", marks=pytest.mark.slow) for spec in PAIRS),  # what the fours cover in part
]
FLAGS = {"type": "array", "minItems": 9, "items": record(flag={"type": "boolean"})}
PREDICTED = [token % VOCAB for token in text(90, 200)]
ADAPTIVE = ["auto", "auto(ngram+quantised)", "auto(suffix+ngram+early_exit)"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("spec", ADAPTIVE)
def test_the_controller_changes_no_text(folder: Path, spec: str, acceptance: str, temperature: float) -> None:
    """Greedy under any rule, sampled under the match rule; and it says in every step why it did what it did."""
    few = dict.fromkeys(range(5), 9.0)  # so that there is something to copy
    prompts = [[token % VOCAB for token in text(20 + seed, 24 + 5 * seed)] for seed in range(5)]
    params = SamplingParams(
        max_tokens=50, temperature=temperature, seed=3, ignore_eos=True, logit_bias=few, acceptance=acceptance
    )
    plain = LLM(str(folder)).generate(prompts, params, spec="off")
    llm = LLM(str(folder), kv_cache_tokens=304, max_num_batched_tokens=40, max_num_seqs=5)
    llm.engine.speculation.controller = SteadyController()
    drafted = llm.generate(prompts, params, spec=spec)
    for on, off in zip(drafted, plain, strict=True):
        assert on.metrics.decisions
        if temperature == 0 or acceptance == "match":
            assert (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs)
    assert sum(on.metrics.drafted_tokens for on in drafted) > 100


@pytest.fixture(scope="module")
def plain_outputs(folder: Path) -> Callable[[list[list[int]], SamplingParams], list[RequestOutput]]:
    """What plain decoding gives; computed once, whatever is compared with it."""
    llm, known = LLM(str(folder), prefix_caching=False), dict[str, list[RequestOutput]]()

    def outputs(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        key = repr((prompts, params))
        if key not in known:
            known[key] = llm.generate(prompts, params, spec="off")
        return known[key]

    return outputs


@pytest.mark.parametrize(("spec", "temperature", "acceptance"), RUNS)
def test_the_text_is_that_of_plain_decoding(
    folder: Path,
    sibling: Path,
    heads: str,
    plain_outputs: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
    spec: str,
    temperature: float,
    acceptance: str,
) -> None:
    """With batch mates, chunks, preemption and an abort in between. The other rules keep greedy text and the law of
    sampled text (see test_rules.py), not the sampled text itself."""
    spec = spec.replace("draft_model", f"draft_model:model={sibling}")
    prompts = [[token % VOCAB for token in text(seed, 20 + 7 * seed)] for seed in range(6)]
    params = SamplingParams(
        max_tokens=32,
        temperature=temperature,
        seed=3,
        logprobs=1,
        ignore_eos=True,
        acceptance=acceptance,
        top_k=3,
        grammar=FLAGS if "grammar" in spec else None,
        prediction=PREDICTED if "prediction" in spec else None,
    )
    plain = plain_outputs(prompts, params)
    llm = LLM(str(folder), head=heads, kv_cache_tokens=304, max_num_seqs=6, max_num_batched_tokens=40)
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


def test_a_batch_of_mixed_proposers_in_a_pool_that_is_too_small(folder: Path, sibling: Path, heads: str) -> None:
    """Eight requests, each with its own proposer, temperature and rule of ending, in 60 % of the blocks they need; two
    more come and are aborted. Every text is the one it is alone and plain."""
    model = f"draft_model:model={sibling},k=3,width=2"
    specs = ["ngram", "suffix", model, "quantised:k=3", "early_exit", "lookahead", "staged", "ngram+suffix+quantised"]
    prompts = [[token % VOCAB for token in text(20 + seed, 24 + 5 * seed)] for seed in range(8)]
    few = dict.fromkeys(range(5), 9.0)  # so that texts repeat themselves and all have something to guess
    params = [
        SamplingParams(
            max_tokens=48, temperature=0.9 * (index % 2), seed=index, logprobs=2, ignore_eos=True, logit_bias=few
        )
        for index in range(8)
    ]
    plain = [LLM(str(folder)).generate([p], one, spec="off")[0] for p, one in zip(prompts, params, strict=True)]
    need = sum(-(-(len(prompt) + 48) // 16) for prompt in prompts)
    llm = LLM(str(folder), kv_cache_tokens=16 * int(0.6 * need), max_num_seqs=10, max_num_batched_tokens=64)
    for index in range(8):
        llm.engine.add(str(index), prompts[index], params[index], parse_spec(specs[index]))
        if index in (2, 5):
            llm.engine.add(f"gone {index}", prompts[index][:20], params[index], parse_spec(specs[-index]))
    outputs = {}
    for step in range(10_000):
        if not llm.engine.has_work:
            break
        if step in (4, 9):
            llm.engine.abort("gone 2" if step == 4 else "gone 5")
        outputs.update({event.request_id: event.output for event in llm.engine.step() if event.output is not None})
        llm.engine.scheduler.check_integrity()
    for index, off in enumerate(plain):
        on = outputs[str(index)]
        assert on is not None and (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs), specs[index]
        assert on.metrics.drafted_tokens > 0, specs[index]
    assert sum(output.metrics.preemptions for output in outputs.values() if output) > 0
