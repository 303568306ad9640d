"""The backends that this machine can run, for contract suites to be parametrised over."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.kernels.build import Level, usable_levels

# Stale libraries are there, so that tests fail instead of being skipped.
needs_native = pytest.mark.skipif(not usable_levels(), reason="the native kernels are not built on this machine")
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]

# For the fixture `kernels`: what computes on a CPU, torch or one level of the native kernels. Those below the best one
# are slow cases: tests/native compares them all, and `make test-levels` runs whole engines with them.
NAMES = ["torch", *(level.name for level in usable_levels())]
KERNELS = [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[2:])]


def greedy_and_at(temperature: float, places: list[Any]) -> list[Any]:
    """Pairs of what computes and a temperature. Greedy decoding is the same path without noise, and torch takes long:
    together they are a slow case."""
    pairs = []
    for place in places:
        name, marks = (place, ()) if isinstance(place, str) else (place.values[0], place.marks)
        pairs.append(pytest.param(name, temperature, marks=marks))
        pairs.append(pytest.param(name, 0.0, marks=(*marks, pytest.mark.slow) if name == "torch" else marks))
    return pairs


def levels_of(kernels: str) -> list[Level]:
    """The levels that are left where a test has chosen its kernels."""
    found = [level for level in usable_levels() if level.name == kernels]
    if not found and kernels != "torch":
        raise pytest.UsageError(f"This machine has no kernels {kernels!r}; it has {', '.join(NAMES)}.")
    return found
