"""The backends that this machine can run, for contract suites to be parametrised over."""

from __future__ import annotations

import pytest

from foredraft.backends.choose import native_is_built

needs_native = pytest.mark.skipif(not native_is_built(), reason="the native kernels are not built on this machine")
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
