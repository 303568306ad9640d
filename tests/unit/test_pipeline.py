"""From logits to a token: penalties and floors against plain references, the draw against brute force and its law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st

from foredraft.params import SamplingParams
from foredraft.sampling import draw, noise, pipeline
from foredraft.sampling.draw import pick
from foredraft.sampling.pipeline import adjust, floor
from tests.unit.unit_helpers import chi_square_p


def resolved(temperature: float = 1.0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, **fields).resolved({})


def eighths(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers on a coarse grid: their sums and differences are exact, and ties are common."""
    return st.integers(low * 8, high * 8).map(lambda n: n / 8)


LOGITS = st.lists(eighths(-12, 12), min_size=1, max_size=40)
HISTORY = st.lists(st.integers(0, 5), max_size=12)


def adjusted(logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Penalties as vLLM applies them, one token at a time."""
    result = list(logits)
    assert params.repetition_penalty is not None
    for token in {*prompt, *output}:
        if result[token] > 0:
            result[token] /= params.repetition_penalty
        else:
            result[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count
        result[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        result[token] += bias
    return result


class TestAdjust:
    @given(
        logits=st.lists(eighths(-12, 12), min_size=6, max_size=20),
        prompt=HISTORY,
        output=HISTORY,
        repetition=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
        presence=eighths(-2, 2),
        frequency=eighths(-2, 2),
        bias=st.dictionaries(st.integers(0, 5), eighths(-100, 100), max_size=4),
    )
    @settings(max_examples=150)
    def test_agrees_with_the_reference(
        self,
        logits: list[float],
        prompt: list[int],
        output: list[int],
        repetition: float,
        presence: float,
        frequency: float,
        bias: dict[int, float],
    ) -> None:
        params = resolved(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
        )
        given_logits = torch.tensor(logits)
        expected = adjusted(logits, params, prompt, output)
        assert adjust(given_logits, params, prompt, output).tolist() == expected
        assert given_logits.tolist() == logits, "the model's logits were overwritten"

    def test_neutral_is_nothing(self) -> None:
        logits = torch.randn(8)
        assert adjust(logits, resolved(), [1, 2], [3]) is logits

    def test_each_penalty_sees_what_it_should(self) -> None:
        logits = torch.tensor([4.0, 4.0, -4.0, 4.0])
        assert adjust(logits, resolved(repetition_penalty=2.0), [0], [2]).tolist() == [2.0, 4.0, -8.0, 4.0]
        assert adjust(logits, resolved(presence_penalty=1.0), [0], [1, 1]).tolist() == [4.0, 3.0, -4.0, 4.0]
        assert adjust(logits, resolved(frequency_penalty=1.0), [0], [1, 1]).tolist() == [4.0, 2.0, -4.0, 4.0]
        assert adjust(logits, resolved(logit_bias={3: -100.0}), [0], [1]).tolist() == [4.0, 4.0, -4.0, -96.0]

    def test_a_mqueried_token_stays_mqueried(self) -> None:
        logits = torch.tensor([-math.inf, 1.0])
        params = resolved(repetition_penalty=2.0, presence_penalty=-1.0, logit_bias={0: 100.0})
        assert adjust(logits, params, [0], [0]).tolist() == [-math.inf, 1.0]


def clear(condition: bool) -> None:
    """What depends on rounding is no question for a reference: skip the example, or complain about a hand-made one."""
    if currently_in_test_context():
        assume(condition)
    else:
        assert condition, "choose another example"


def kept(logits: Sequence[float], params: SamplingParams) -> set[int]:
    """Top-k, top-p and min-p one after the other as in transformers, but tokens of equal logits share one fate."""
    temperature, top_k, top_p, min_p = params.temperature, params.top_k, params.top_p, params.min_p
    assert temperature is not None and top_k is not None and top_p is not None and min_p is not None
    counts = Counter(logits)
    levels = sorted(counts, reverse=True)
    if temperature == 0:
        levels = levels[:1]
    elif 0 < top_k < len(logits):
        last = sorted(logits, reverse=True)[top_k - 1]
        levels = [level for level in levels if level >= last]
    masses = {level: counts[level] * math.exp((level - levels[0]) / (temperature or 1)) for level in levels}
    if top_p < 1:
        total, above, needed = math.fsum(masses.values()), 0.0, []
        for level in levels:
            clear(abs(above / total - top_p) > 1e-9)
            if above / total < top_p:
                needed.append(level)
            above += masses[level]
        levels = needed
    if min_p > 0 and temperature > 0:
        ratios = {level: math.exp((level - levels[0]) / temperature) for level in levels}
        clear(all(abs(ratio - min_p) > 1e-9 or ratio == 1 for ratio in ratios.values()))
        levels = [level for level in levels if ratios[level] >= min_p]
    return {token for token, logit in enumerate(logits) if logit >= levels[-1]}


def survivors(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    return set((logits >= floor(logits, params)).nonzero().flatten().tolist())


class TestFloor:
    @given(
        logits=LOGITS,
        temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0, 50.0]),
        top_k=st.integers(-1, 45),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    )
    @settings(max_examples=250)
    def test_agrees_with_the_reference(
        self, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        params = resolved(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert survivors(torch.tensor(logits), params) == kept(logits, params)

    @pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
    @pytest.mark.parametrize("top_k", [0, 5, 700])
    @pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
    def test_agrees_with_the_reference_in_a_large_nucleus(self, spread: float, top_k: int, top_p: float) -> None:
        """Beyond the first look at the best few hundred; with and without ties."""
        generator = torch.Generator().manual_seed(5)
        logits = (torch.randn(3000, generator=generator) * spread * 64).round() / 64
        params = resolved(top_k=top_k, top_p=top_p)
        assert survivors(logits, params) == kept(logits.tolist(), params)

    def test_ties_at_the_floor_stay(self) -> None:
        logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
        assert survivors(logits, resolved(top_k=2)) == {1, 2, 3, 4}
        assert survivors(logits, resolved(top_p=0.6)) == {1, 2, 3, 4}
        assert survivors(logits, resolved(0.0)) == {1}
        assert survivors(torch.full((7,), 2.0), resolved(top_k=1, top_p=0.1, min_p=1.0)) == set(range(7))

    def test_the_best_always_stays(self) -> None:
        logits = torch.tensor([-5.0, 1.0, 0.5])
        for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}):
            for temperature in (0.0, 1e-6, 1.0, 100.0):
                assert survivors(logits, resolved(temperature, **fields)) == {1}

    def test_top_p_looks_at_what_top_k_left(self) -> None:
        """Of [1/2, 1/4, 1/8, 1/8] the best two hold 3/4; 0.7 of that is more than the first alone, which has 2/3."""
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
        assert survivors(logits, resolved(top_p=0.65)) == {0, 1}
        assert survivors(logits, resolved(top_k=2, top_p=0.65)) == {0}

    def test_mqueried_tokens_take_no_part(self) -> None:
        logits = torch.tensor([1.0, -math.inf, 1.0, -math.inf])
        assert survivors(logits, resolved(top_p=0.9)) == {0, 2}
        assert survivors(logits, resolved(min_p=0.01)) == {0, 2}


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": torch.zeros_like,
    "nearly flat": lambda x: x * 1e-4,
    "ordinary": lambda x: x * 3,
    "peaky": lambda x: x * 20,
    "one peak": lambda x: torch.where(torch.arange(len(x)) == len(x) // 2, 12.0, x * 0.01),
    "ties": lambda x: (x * 4).round() / 2,
    "masked": lambda x: torch.where(x > 0.5, x, -math.inf).index_fill(0, torch.tensor([0]), 0.0),
    "large": lambda x: x + 20_000,
    "ascending": lambda x: x.sort().values,
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.1},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 1.5},
    {"min_p": 0.05},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
]


def brute_force(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The noise of every token, in full; the lowest id wins a tie."""
    assert params.temperature is not None
    variates = noise.gumbel(noise.uniform(noise.stream_key(seed, position), torch.arange(len(logits))))
    scores = logits.double() + params.temperature * variates
    scores[logits < floor(logits, params)] = -math.inf
    return scores.tolist().index(float(scores.max()))


@pytest.fixture(autouse=True)
def _a_second_look_for_small_vocabularies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_FEW", draw._BEST)


class TestPick:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("vocab", [1, 32, 33, 500])
    def test_equals_brute_force(self, vocab: int, shape: str) -> None:
        logits = SHAPES[shape](torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)))
        for position, fields in enumerate(SETTINGS):
            params = resolved(**fields)
            assert pick(logits, params, 17, position) == brute_force(logits, params, 17, position)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_brute_force_in_a_large_vocabulary(self, shape: str) -> None:
        logits = SHAPES[shape](torch.randn(50_000, generator=torch.Generator().manual_seed(1)))
        for seed, fields in enumerate(SETTINGS[::2]):
            params = resolved(**fields)
            assert pick(logits, params, seed, 9) == brute_force(logits, params, seed, 9)

    def test_the_second_look_matters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without it, flat distributions would be drawn wrongly: the comparison with brute force sees that."""
        logits, params = torch.linspace(0, 0.01, 1000), resolved()
        drawn = [pick(logits, params, 3, position) for position in range(20)]
        assert drawn == [brute_force(logits, params, 3, position) for position in range(20)]
        monkeypatch.setattr(draw, "highest_uniform_without", lambda score: 1.0)
        assert drawn != [pick(logits, params, 3, position) for position in range(20)]

    @given(logits=LOGITS, seed=st.integers(0, 2**63 - 1), position=st.integers(0, 10**6))
    @settings(max_examples=100)
    def test_temperature_0_is_the_first_of_the_largest(self, logits: list[float], seed: int, position: int) -> None:
        assert pick(torch.tensor(logits), resolved(0.0), seed, position) == logits.index(max(logits))

    def test_equal_scores_go_to_the_lowest_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draw, "uniform", lambda key, ids: torch.full(ids.shape, 0.5, dtype=torch.float64))
        logits = torch.zeros(100)
        logits[[40, 7, 90]] = 1.0
        assert pick(logits, resolved(), 0, 0) == 7
        assert pick(torch.zeros(100), resolved(), 0, 0) == 0

    def test_is_pinned(self) -> None:
        """A seed repeats its text in every version."""
        logits = torch.tensor([(i * 37 % 101) / 16 for i in range(101)])
        for fields, text in PINNED.items():
            params = resolved(**dict(zip(fields[::2], fields[1::2])))
            assert [pick(logits, params, 42, place) for place in range(12)] == text

    @pytest.mark.parametrize("seed", [0, 2**63 - 1])
    def test_any_seed_and_place_will_do(self, seed: int) -> None:
        assert 0 <= pick(torch.zeros(50), resolved(), seed, 2**31) < 50


PINNED: dict[tuple[Any, ...], list[int]] = {
    (): [79, 60, 30, 48, 38, 65, 81, 79, 30, 35, 65, 60],
    ("temperature", 0.5): [79, 60, 30, 49, 38, 65, 60, 79, 30, 35, 8, 60],
    ("top_k", 10): [79, 60, 30, 49, 38, 68, 60, 79, 30, 38, 8, 60],
    ("top_p", 0.5): [79, 60, 30, 49, 38, 68, 60, 79, 30, 57, 8, 60],
}

DRAWS = 350
TARGET_LOGITS = torch.tensor([((i * 29) % 41) / 12 for i in range(40)])  # more tokens than get a first look
DISTRIBUTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0, "top_k": 12},
    {"top_p": 0.7},
    {"min_p": 0.2, "temperature": 1.3},
]


def fit_of_distribution(fields: dict[str, float], over: str) -> float:
    """How well draws over many positions or seeds fit the softmax of what the reference keeps."""
    params = resolved(**fields)
    places = [(7, i) if over == "positions" else (i, 7) for i in range(DRAWS)]
    drawn = Counter(pick(TARGET_LOGITS, params, seed, position) for seed, position in places)
    keeps = sorted(kept(TARGET_LOGITS.tolist(), params))
    probabilities = (TARGET_LOGITS[keeps].double() / fields.get("temperature", 1.0)).softmax(0)
    expected = {token: DRAWS * float(p) for token, p in zip(keeps, probabilities, strict=True)}
    rare = [token for token, mean in expected.items() if mean < 5]  # counted together, with the least of the others
    rare += sorted(expected.keys() - rare, key=expected.__getitem__)[: len(rare) > 0]
    for token in rare[:-1]:
        expected[rare[-1]] += expected.pop(token)
        drawn[rare[-1]] += drawn.pop(token, 0)
    return chi_square_p(drawn, expected)


class TestLaw:
    @pytest.mark.parametrize(
        ("fields", "over"), [*((distribution, "positions") for distribution in DISTRIBUTIONS), ({}, "seeds")], ids=str
    )
    def test_tokens_come_as_often_as_the_softmax_says(self, fields: dict[str, float], over: str) -> None:
        assert fit_of_distribution(fields, over) > 1e-3

    def broken(self, monkeypatch: pytest.MonkeyPatch, name: str, by: Callable[..., Any]) -> None:
        monkeypatch.setattr(draw, name, by)
        assert fit_of_distribution({"top_k": 12, "temperature": 0.5}, "positions") < 1e-6

    def test_noise_that_forgets_the_token_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "uniform", lambda key, ids: noise.uniform(key, torch.zeros_like(ids)))

    def test_noise_that_forgets_the_position_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "stream_key", lambda seed, position: noise.stream_key(seed, 0))

    def test_noise_shared_by_several_tokens_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "uniform", lambda key, ids: noise.uniform(key, ids % 5))

    def test_noise_that_is_too_loud_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "gumbel", lambda uniforms: 3 * noise.gumbel(uniforms))

    def test_a_floor_too_high_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "floor", lambda logits, params: float(logits.topk(8).values[-1]))

    def test_a_floor_too_low_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken(monkeypatch, "floor", lambda logits, params: float(logits.topk(13).values[-1]))

    def test_a_missing_second_look_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draw, "highest_uniform_without", lambda score: 1.0)
        assert fit_of_distribution({"temperature": 10.0}, "positions") < 1e-6


def test_the_first_look_is_shorter_than_the_tests_assume() -> None:
    """The cases above are meant to reach beyond it."""
    assert len(TARGET_LOGITS) > draw._BEST
    assert min(pipeline._LOOKS) < 3000
