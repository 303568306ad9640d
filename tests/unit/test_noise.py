"""Keyed noise: pinned bits, accuracy of the logarithms, and statistics that a weak generator would fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.sampling.noise import derived_seed, gumbel, highest_uniform_without, stream_key, uniform
from tests.unit.unit_helpers import chi_square_p

MASK = (1 << 64) - 1
SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**20)
TOKENS = st.integers(0, 2**20)

# (seed, position, token id): the uniform and the Gumbel variate, bit for bit. If these change, so do everybody's texts.
GOLDEN = {
    (0, 0, 0): ("0x1.0652699c95a0dp-1", "0x1.9bff7a0bc8458p-2"),
    (0, 0, 1): ("0x1.0983a45556404p-3", "-0x1.6dc5326677b11p-1"),
    (1, 0, 0): ("0x1.d0219d08cfabbp-1", "0x1.291c9cc61ec25p+1"),
    (0, 1, 0): ("0x1.fa4b8c0724bcbp-1", "0x1.1f73251e219adp+2"),
    (42, 17, 50256): ("0x1.6e0e663b05975p-1", "0x1.178eb369484b8p+0"),
    (2**63 - 1, 131071, 151935): ("0x1.f76f585b0e90cp-3", "-0x1.5adc0c198dec1p-2"),
    (1234567890123, 4096, 262143): ("0x1.fcdea910caa68p-4", "-0x1.7857b4893be0fp-1"),
}


def uniforms(seed: int, position: int, tokens: int) -> torch.Tensor:
    return uniform(stream_key(seed, position), torch.arange(tokens))


class TestPinned:
    @pytest.mark.parametrize("place", GOLDEN, ids=str)
    def test_noise(self, place: tuple[int, int, int]) -> None:
        seed, position, token = place
        drawn = uniform(stream_key(seed, position), torch.tensor([token]))
        assert (float(drawn).hex(), float(gumbel(drawn)).hex()) == GOLDEN[place]

    def test_seeds_of_samples(self) -> None:
        assert [derived_seed(42, sample) for sample in (0, 1, 2, 255)] == [
            42,
            8815207628119023658,
            4485782713077629401,
            5683713170181850182,
        ]

    def test_streams(self) -> None:
        assert stream_key(42, 17) == stream_key(42, 17, 0) == 0xDD96E72CABA673ED
        assert stream_key(42, 17, 1) == 0xB72B62392359EDDA


def finaliser(z: int) -> int:
    """The finaliser of SplitMix64, in Python integers."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@given(key=st.integers(0, MASK), tokens=st.lists(TOKENS, min_size=1, max_size=20))
def test_the_tensor_arithmetic_is_that_of_unsigned_integers(key: int, tokens: list[int]) -> None:
    bits = [finaliser((key + token * 0x9E3779B97F4A7C15) & MASK) >> 12 for token in tokens]
    assert uniform(key, torch.tensor(tokens)).tolist() == [(2 * bit + 1) / 2**53 for bit in bits]


class TestUniform:
    @given(seed=SEEDS, position=POSITIONS)
    @settings(max_examples=50)
    def test_lies_strictly_between_0_and_1(self, seed: int, position: int) -> None:
        drawn = uniforms(seed, position, 2000)
        assert drawn.dtype == torch.float64
        assert bool(((drawn > 0) & (drawn < 1)).all())

    @given(seed=SEEDS, position=POSITIONS, ids=st.lists(TOKENS, min_size=1, max_size=50))
    @settings(max_examples=50)
    def test_a_token_has_its_own_whoever_is_queried_along(self, seed: int, position: int, ids: list[int]) -> None:
        key = stream_key(seed, position)
        together = uniform(key, torch.tensor(ids)).tolist()
        assert together == [float(uniform(key, torch.tensor([token]))) for token in ids]

    @pytest.mark.parametrize(
        "key_of",
        [
            pytest.param(lambda i: stream_key(7, i), id="positions"),
            pytest.param(lambda i: stream_key(i, 3), id="seeds"),
            pytest.param(lambda i: stream_key(derived_seed(7, i), 3), id="samples"),
            pytest.param(lambda i: stream_key(7, 3, i), id="streams"),
        ],
    )
    def test_neighbours_are_independent_along(self, key_of: Callable[[int], int]) -> None:
        """The same token at neighbouring places: pairs fall evenly into 16 x 16 cells."""
        drawn = torch.cat([uniform(key_of(i), torch.tensor([5])) for i in range(3000)])
        assert pair_p(drawn[:-1], drawn[1:]) > 1e-3

    @pytest.mark.parametrize("distance", [1, 2, 3, 100])
    def test_tokens_are_independent(self, distance: int) -> None:
        drawn = uniforms(7, 3, 20_000)
        assert pair_p(drawn[:-distance], drawn[distance:]) > 1e-3

    def test_neighbouring_places_are_independent_over_all_tokens(self) -> None:
        base = uniforms(7, 3, 20_000)
        for key in (stream_key(7, 4), stream_key(8, 3), stream_key(7, 3, 1), stream_key(derived_seed(7, 1), 3)):
            assert pair_p(base, uniform(key, torch.arange(20_000))) > 1e-3

    def test_the_check_can_fail(self) -> None:
        """Equal, mirrored, and slightly mixed noise is told from independent noise."""
        base, other = uniforms(7, 3, 20_000), uniforms(7, 4, 20_000)
        mixed = torch.where(torch.arange(20_000) % 8 == 0, base, other)
        assert max(pair_p(base, base), pair_p(base, 1 - base), pair_p(base, mixed)) < 1e-12

    @pytest.mark.parametrize("what", ["seed", "position", "token"])
    def test_one_changed_bit_changes_every_bit_half_of_the_time(self, what: str) -> None:
        """Avalanche: 4096 trials, so that six standard deviations are 0.047."""
        places, ids = [i * 2654435761 % (1 << 20) for i in range(64)], torch.arange(64) * 997
        for flip in (1 << bit for bit in range(0, 63 if what == "seed" else 18, 5)):
            if what == "token":
                changes = [bits(place, ids) ^ bits(place, ids ^ flip) for place in places]
            elif what == "seed":
                changes = [bits(stream_key(place, 5), ids) ^ bits(stream_key(place ^ flip, 5), ids) for place in places]
            else:
                changes = [bits(stream_key(5, place), ids) ^ bits(stream_key(5, place ^ flip), ids) for place in places]
            flipped = ((torch.cat(changes)[:, None] >> torch.arange(52)) & 1).double().mean(0)
            assert float((flipped - 0.5).abs().max()) < 6 * 0.5 / math.sqrt(64 * 64)


def bits(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The 52 random bits of each uniform."""
    return (uniform(key, token_ids) * 2.0**52 - 0.5).long()


def pair_p(left: torch.Tensor, right: torch.Tensor) -> float:
    """How likely pairs as uneven as these are, if both sides are uniform and independent."""
    pairs = Counter(((left * 16).long() * 16 + (right * 16).long()).tolist())
    return chi_square_p(pairs, dict.fromkeys(range(256), len(left) / 256))


class TestGumbel:
    def exact(self, u: float) -> float:
        with localcontext() as context:
            context.prec = 60
            return float(-(-Decimal(u).ln()).ln())

    @given(bits=st.one_of(st.integers(0, 2**52 - 1), st.integers(0, 1000), st.integers(2**52 - 1000, 2**52 - 1)))
    @settings(max_examples=200)
    def test_is_accurate_to_1e_14(self, bits: int) -> None:
        """Relative to the size of the variate, or to 1 where it passes through zero."""
        u = (bits + 0.5) * 2.0**-52
        exact = self.exact(u)
        assert abs(float(gumbel(torch.tensor([u], dtype=torch.float64))) - exact) <= 1e-14 * max(1.0, abs(exact))

    def test_agrees_with_the_math_library(self) -> None:
        drawn = uniforms(3, 3, 5000)
        library = [-math.log(-math.log(u)) for u in drawn.tolist()]
        errors = [abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in zip(gumbel(drawn).tolist(), library)]
        assert max(errors) <= 1e-14

    def test_never_falls_where_the_uniform_rises(self) -> None:
        """Monotone over neighbours, also where the series changes its branch."""
        for centre in (1e-9, 0.25, 0.5, math.sqrt(0.5), math.exp(-1), math.exp(-math.sqrt(0.5)), 1 - 1e-9):
            bits = int(centre * 2**52) + torch.arange(-500, 500)
            values = gumbel((bits.double() + 0.5) * 2.0**-52)
            assert bool((values[1:] >= values[:-1] - 1e-15 * values[1:].abs().clamp(min=1)).all())

    def test_is_finite_at_both_ends(self) -> None:
        ends = gumbel(torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64))
        assert ends.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)], rel=1e-14)

    def test_bits_do_not_depend_on_neighbours_or_layout(self) -> None:
        """Vectorised and leftover lanes give the same bits."""
        drawn = uniforms(11, 2, 1037)
        whole = gumbel(drawn)
        assert torch.equal(whole, torch.cat([gumbel(piece) for piece in drawn.split(7)]))
        assert torch.equal(whole[::3], gumbel(drawn[::3]))


class TestSeeds:
    @given(seed=SEEDS)
    @settings(max_examples=50)
    def test_of_samples_are_distinct_and_valid(self, seed: int) -> None:
        seeds = [derived_seed(seed, sample) for sample in range(256)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 256
        assert all(0 <= derived < 2**63 for derived in seeds)

    def test_keys_of_many_places_are_distinct(self) -> None:
        keys = {stream_key(seed, place, stream) for seed in range(64) for place in range(256) for stream in range(3)}
        assert len(keys) == 64 * 256 * 3
        assert all(0 <= key <= MASK for key in keys)


class TestBound:
    """`highest_uniform_without` may let a loser through, but never rule a winner out."""

    @given(score=st.floats(-3.6, 40.0))
    @settings(max_examples=300)
    def test_at_or_below_it_no_variate_reaches_the_score(self, score: float) -> None:
        bound = highest_uniform_without(score)
        assert 0 <= bound < 1
        nearby = torch.tensor([bound, math.nextafter(bound, 0.0), bound * (1 - 1e-9)], dtype=torch.float64)
        assert bool((gumbel(nearby[nearby > 0]) < score).all())

    @given(seed=SEEDS, score=st.floats(-3.0, 12.0))
    @settings(max_examples=100)
    def test_rules_out_only_losers(self, seed: int, score: float) -> None:
        drawn = uniforms(seed, 0, 2000)
        assert bool((gumbel(drawn[drawn <= highest_uniform_without(score)]) < score).all())

    @pytest.mark.parametrize("score", [-3.0, -1.0, 0.0, 1.0, 5.0, 15.0])
    def test_is_tight(self, score: float) -> None:
        """Just above it the score is reached, so it does rule out nearly all that it can."""
        above = torch.tensor([highest_uniform_without(score) * (1 + 2e-12)], dtype=torch.float64)
        assert float(gumbel(above)) >= score

    @pytest.mark.parametrize("score", [50.0, 1e6, 1e300, math.inf])
    def test_no_score_is_too_high(self, score: float) -> None:
        assert highest_uniform_without(score) == 1 - 1e-12
