"""The native backend at every level that this processor has, and fresh numbers in every run."""

from __future__ import annotations

import os
import random

import pytest
import torch

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.library import open_library
from foredraft.kernels.build import Level, usable_levels

LEVELS = usable_levels()
THREADS = 2


@pytest.fixture(autouse=True)
def seed() -> None:
    """Fresh numbers in every run; a failure prints how to repeat it with FOREDRAFT_SEED."""
    value = int(os.environ.get("FOREDRAFT_SEED", random.randrange(2**31)))
    print(f"FOREDRAFT_SEED={value}")
    torch.manual_seed(value)


def backend_of(level: Level) -> NativeBackend:
    try:
        return NativeBackend("float32", THREADS, library=open_library(level.library))
    except OSError as error:  # the processor has the level, but the system does not grant it
        pytest.skip(str(error))


@pytest.fixture(params=[level.name for level in LEVELS])
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return backend_of(next(level for level in LEVELS if level.name == request.param))
