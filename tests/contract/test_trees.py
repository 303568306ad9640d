"""Drafts never change a text: random trees, partly right, go through the engine and leave ids and logprob bits as
they were."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.outputs import CompletionOutput
from foredraft.params import SamplingParams
from foredraft.proposers.base import Proposer
from foredraft.proposers.registry import ProposerChoice, Spec
from foredraft.types import Draft, Sequence
from tests.backends import BACKENDS, greedy_and_at
from tests.tiny_models import VOCAB, random_model, save_model

PROMPTS = [[(7 * i * j + i) % VOCAB for j in range(1, 12 + 9 * i)] for i in range(1, 7)]


class RandomTrees(Proposer):
    """Knows the right text, and guesses trees in which it is mixed with rubbish."""

    name = "random_trees"
    num_lookahead_tokens = 12

    def __init__(self, texts: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self.texts = texts
        self.random = random.Random(seed)
        self.released: set[int] = set()

    def propose(self, sequences: Items[Sequence], budgets: Items[int], min_score: float) -> list[Draft]:
        return [self._tree(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _tree(self, sequence: Sequence, budget: int) -> Draft:
        right = self.texts[tuple(sequence.token_ids[: sequence.num_prompt_tokens])][sequence.num_output_tokens :]
        tokens: list[int] = []
        parents: list[int] = []
        trunk = [-1]  # nodes on the right path
        for _ in range(self.random.randint(0, budget)):
            if self.random.random() < 0.6 and len(trunk) <= len(right):
                parents.append(trunk[-1])
                tokens.append(right[len(trunk) - 1])
                trunk.append(len(tokens) - 1)
            else:
                parents.append(self.random.randint(-1, len(tokens) - 1))
                tokens.append(self.random.randrange(VOCAB))
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), (self.name,) * len(tokens))

    def release(self, sequence_ids: Iterable[int]) -> None:
        self.released.update(sequence_ids)


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "qwen3-moe", "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model(request.param), tmp_path_factory.mktemp("tiny"))


def run(llm: LLM, params: SamplingParams, spec: Spec) -> list[CompletionOutput]:
    outputs: dict[int, CompletionOutput] = {}
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add(str(index), prompt, params, spec)
    while llm.engine.has_work:
        for event in llm.engine.step():
            if event.output is not None:
                outputs[int(event.request_id)] = event.output
        llm.engine.scheduler.check_integrity()
    return [outputs[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(("backend", "temperature"), greedy_and_at(0.9, BACKENDS))
def test_drafts_do_not_change_the_text(folder: Path, backend: str, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=11, logprobs=2, ignore_eos=True, presence_penalty=0.5, top_k=40
    )
    plain = run(LLM(str(folder), backend=backend, dtype="float32", device="cpu"), params, Spec())
    texts = {tuple(prompt): output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)}
    for seed, options in enumerate(
        [{}, {"kv_cache_tokens": 256, "max_num_seqs": 5}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}]
    ):
        llm = LLM(str(folder), backend=backend, dtype="float32", device="cpu", **options)
        proposer = RandomTrees(texts, seed)
        llm.engine.speculation.assignments.install(ProposerChoice(proposer.name), proposer)
        drafted = run(llm, params, Spec((ProposerChoice(proposer.name),)))
        for off, on in zip(plain, drafted, strict=True):
            assert on.token_ids == off.token_ids
            assert on.text == off.text
            assert on.logprobs == off.logprobs
        assert sum(output.metrics.accepted_tokens for output in drafted) > 60
        assert len(proposer.released) == len(PROMPTS)
        if "kv_cache_tokens" in options:
            assert sum(output.metrics.preemptions for output in drafted) > 0
