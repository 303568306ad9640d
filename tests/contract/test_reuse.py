"""A seed that is used again: `rejection` and `block` keep the target's distribution, whatever proposers remember.

The real engine writes texts of two possible tokens, with store, merge and controller. Every seed is used twice, and the
second texts are counted: the store may then hold what the same seed drew before. A G-test compares the counts with the
exact distribution. The same test sees the bias once coins decide about drafts that the store remembers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.audit.distribution import GTest, g_test
from foredraft.engine import engine
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.sampling.rules import RULES, Outcome
from foredraft.types import Draft, Sequence
from tests.steady_controller import SteadyController
from tests.tiny_models import VOCAB, random_model, save_model

ONE, OTHER = 20, 30
PROMPT = [ONE, ONE, 7, 8, 9]  # there is something to copy the first time, and more in the store the second time
LENGTH = 5
TEMPERATURE = 3.0  # no text is so unlikely that it never comes
BATCH = 250
FEW = BATCH  # texts; MANY takes minutes
MORE = {"rejection": 1500, "block": 2500}  # texts, enough to see the bias: under `block` it is small
MANY = pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
COPIED = "auto(suffix:min_n=1+ngram:min_n=1,max_n=1,which=earliest)"
SAMPLED = "suffix:min_n=1+early_exit:layers=1,k=3"

Text = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    made = LLM(
        str(folder),
        dtype="float32",
        threads=1,
        kv_cache_tokens=32 * BATCH,
        max_num_seqs=BATCH,
        max_num_batched_tokens=32 * BATCH,
        max_chunk_s=1e6,  # nothing depends on the clock: neither who runs together nor what the controller drafts
    )
    made.engine.speculation.controller = SteadyController()
    return made


def written(llm: LLM, prompts: list[list[int]], seeds: Iterable[int], spec: str, rule: str, length: int) -> list[Text]:
    """What each seed writes after its prompt. Every seed has a salt of its own, so the store knows its texts alone."""
    params = [
        SamplingParams(
            max_tokens=length,
            temperature=TEMPERATURE,
            top_k=2,
            seed=seed,
            ignore_eos=True,
            acceptance=rule,
            logit_bias={ONE: 100.0, OTHER: 100.0},
            cache_salt=str(seed),
        )
        for seed in seeds
    ]
    outputs = llm.generate(prompts, params, spec=spec)
    assert spec == "off" or sum(output.metrics.drafted_tokens for output in outputs) > len(outputs) / 2
    return [tuple(output.token_ids) for output in outputs]


def second_texts(llm: LLM, samples: int, spec: str, rule: str) -> list[Text]:
    """Every seed writes twice; what it wrote the second time."""
    texts: list[Text] = []
    for start in range(0, samples, BATCH):
        write = partial(written, llm, [PROMPT] * BATCH, range(start, start + BATCH), spec, rule, LENGTH)
        write()
        texts += write()
    return texts


def target_distribution(llm: LLM, prompt: list[int], length: int) -> dict[Text, float]:
    """The exact probability of every text of two tokens."""
    texts = list(product((ONE, OTHER), repeat=length))
    outputs = llm.generate([[*prompt, *text] for text in texts], SamplingParams(max_tokens=1, prompt_logprobs=0))
    weights: dict[Text, float] = {}  # the model's probability of a text's last token
    for text, output in zip(texts, outputs, strict=True):
        for size, logprob in enumerate((output.prompt_logprobs or [])[-length:], 1):
            weights[text[:size]] = math.exp(logprob.logprob / TEMPERATURE)
    return {
        text: math.prod(
            weights[text[:size]] / sum(weights[*text[: size - 1], token] for token in (ONE, OTHER))
            for size in range(1, length + 1)
        )
        for text in texts
    }


def fit(llm: LLM, samples: int, spec: str, rule: str) -> GTest:
    return g_test(Counter(second_texts(llm, samples, spec, rule)), target_distribution(llm, PROMPT, LENGTH))


@pytest.mark.parametrize("samples", [FEW, MANY])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("spec", [COPIED, SAMPLED])
def test_a_seed_that_is_used_again_keeps_the_distribution(llm: LLM, samples: int, spec: str, rule: str) -> None:
    test = fit(llm, samples, spec, rule)
    assert test.p_value > 1e-4, test


def coins_for_everything(rule: Any, draft: Draft, target: Any, chance: Any) -> Outcome:
    """The rule as it would be if a token that nobody sampled were taken for a sample of a point mass."""
    point_masses = torch.eye(VOCAB, dtype=torch.float64)[list(draft.tokens)]
    outcome: Outcome = rule(replace(draft, q=point_masses) if draft.q is None else draft, target, chance)
    return outcome


@pytest.mark.parametrize("remembers", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_the_bias_shows_when_coins_decide_and_the_store_remembers(
    llm: LLM, rule: str, remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coins without a store do no harm, nor does the store without coins (below)."""
    monkeypatch.setitem(RULES, rule, partial(coins_for_everything, RULES[rule]))
    if remembers:
        monkeypatch.setattr(Sequence, "may_be_remembered", True)
    test = fit(llm, MORE[rule], COPIED, rule)
    assert (test.p_value > 1e-4) is not remembers, test


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_copied_drafts_change_no_text_even_if_the_store_holds_it(
    llm: LLM, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `match`: the output is a function of prompt and seed."""
    plain = written(llm, [PROMPT] * BATCH, range(BATCH), "off", rule, LENGTH)
    monkeypatch.setattr(Sequence, "may_be_remembered", True)
    assert second_texts(llm, BATCH, COPIED, rule) == plain
    store = llm.engine.speculation.assignments.proposers["suffix:min_n=1"].proposer
    assert len(store._stores) == BATCH, "each seed found its own text there"  # type: ignore[attr-defined]


QUOTED = 3  # tokens of the first answer, which the second prompt quotes


@pytest.mark.parametrize(
    ("spec", "rule", "own_noise"),
    [
        ("off", "rejection", True),
        ("off", "rejection", False),
        (SAMPLED, "rejection", True),
        (SAMPLED, "block", True),
        pytest.param(SAMPLED, "rejection", False, marks=pytest.mark.slow),
        pytest.param(SAMPLED, "block", False, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_may_quote_what_its_seed_has_written(
    llm: LLM, spec: str, rule: str, own_noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the quoting prompt lies at the very positions of the quoted answer. Both answers together have the
    distribution of two answers with seeds of their own, but not if noise were keyed by seed and position alone."""
    if not own_noise:
        monkeypatch.setattr(engine, "prompt_key", lambda prompt, acceptance: 0)
    counts: Counter[Text] = Counter()
    for start in range(0, FEW, BATCH):
        seeds = range(start, start + BATCH)
        first = written(llm, [PROMPT] * BATCH, seeds, spec, rule, QUOTED)
        quoting = [[*text, *PROMPT[QUOTED:]] for text in first]
        second = written(llm, quoting, seeds, spec, rule, QUOTED)
        counts.update((*one, *other) for one, other in zip(first, second, strict=True))
    expected = {
        (*one, *other): p * then
        for one, p in target_distribution(llm, PROMPT, QUOTED).items()
        for other, then in target_distribution(llm, [*one, *PROMPT[QUOTED:]], QUOTED).items()
    }
    test = g_test(counts, expected)
    assert (test.p_value > 1e-4) is own_noise, test
