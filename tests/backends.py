"""The backends that this machine can run, for contract suites to be parametrised over."""

from __future__ import annotations

import pytest

from foredraft.kernels.build import Level, usable_levels

# Stale libraries are there, so that tests fail instead of being skipped.
needs_native = pytest.mark.skipif(not usable_levels(), reason="the native kernels are not built on this machine")
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]

# For the fixture `kernels`: what computes on a CPU, torch or one level of the native kernels. Those below the best one
# are slow cases: tests/native compares them all, and `make test-levels` runs whole engines with them.
NAMES = ["torch", *(level.name for level in usable_levels())]
KERNELS = [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[2:])]


def levels_of(kernels: str) -> list[Level]:
    """The levels that are left where a test has chosen its kernels."""
    found = [level for level in usable_levels() if level.name == kernels]
    if not found and kernels != "torch":
        raise pytest.UsageError(f"This machine has no kernels {kernels!r}; it has {', '.join(NAMES)}.")
    return found
