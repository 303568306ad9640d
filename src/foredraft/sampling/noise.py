"""Keyed noise: every (seed, position, token id) has its own Gumbel variate, the same on every device.

A counter-based generator (two rounds of a 64-bit finaliser) gives the uniform; the logarithms are computed here from
exactly rounded operations only (+, *, /, frexp), each a kernel of its own, because `torch.log` differs between devices.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from foredraft.prefix import extended_name, root_name

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LOG_TERMS = 12  # of the series 2·artanh(s) = 2(s + s³/3 + …) with |s| < 0.172: the rest is below 1e-19


# Streams of noise that must be independent of each other.
MATCH_STREAM, COIN_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = range(4)


@lru_cache(maxsize=4096)  # nodes of one depth share a key, and a drafting model uses it before the target does
def stream_key(seed: int, position: int, stream: int = MATCH_STREAM) -> int:
    """The 64-bit key of a position's noise in one of the streams."""
    return _mix(_mix(_mix(seed) ^ (position * _GOLDEN & _MASK)) + stream * _MIX_1 & _MASK)


def derived_seed(seed: int, sample: int) -> int:
    """The seed of the n-th sample of a request; the first one keeps the request's own."""
    return seed if sample == 0 else _mix(_mix(seed) + sample * _GOLDEN & _MASK) >> 1


def prompt_key(prompt: list[int], acceptance: str) -> int:
    """What sets the noise of a prompt apart from that of others under the same seed.

    Under `match` nothing does: one seed has one noise. Under the other rules a prompt may quote an earlier output of
    the same seed, which tells how coins fell. With noise of its own, its coins are independent of what it quotes.
    """
    return 0 if acceptance == "match" else int.from_bytes(extended_name(root_name(), prompt)[:8])


def uniform(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """Float64 uniforms strictly between 0 and 1, one per token id. Several keys are a tensor of their signed values."""
    z = token_ids * signed(_GOLDEN) + (key if isinstance(key, Tensor) else signed(key))
    z = (z ^ _shift_right(z, 30)) * signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return (_shift_right(z, 12).double() + 0.5) * 2.0**-52


def gumbel(uniforms: Tensor) -> Tensor:
    """-log(-log(u)), bit for bit the same on every device."""
    return -_log(-_log(uniforms))


def highest_uniform_without(score: float) -> float:
    """A uniform at or below this gives a Gumbel variate below `score`: a cheap bound for ruling candidates out."""
    return math.exp(-math.exp(-score)) * (1 - 1e-12)


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = torch.where(low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = series * square + 1 / (2 * term + 1)
    return exponent.double() * math.log(2) + series * (s * 2)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's is arithmetic, so the sign's copies are masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * _MIX_1 & _MASK
    z = (z ^ (z >> 27)) * _MIX_2 & _MASK
    return z ^ (z >> 31)


def signed(z: int) -> int:
    """64 bits as torch and numpy hold them."""
    return z - (1 << 64) if z >= 1 << 63 else z
