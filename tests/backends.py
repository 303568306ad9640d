"""The backends that this machine can run, for contract suites to be parametrised over."""

from __future__ import annotations

import pytest

from foredraft.kernels.build import usable_levels

# Stale libraries are there, so that tests fail instead of being skipped.
needs_native = pytest.mark.skipif(not usable_levels(), reason="the native kernels are not built on this machine")
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
