"""The native backend at every level that this processor has, fresh numbers in every run, and fewer cases by default.

A grid of three or more parameters is covered pairwise: every two values of different parameters meet in some case. The
other cases are marked slow.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections import defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch

from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.library import open_library
from foredraft.kernels.build import Level, usable_levels

LEVELS = usable_levels()
THREADS = 2
FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids: dict[str, list[tuple[pytest.Item, set[object]]]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.path.parent == FOLDER:
            grids[item.nodeid.split("[")[0]].append((item, set(combinations(_values(item), 2))))
    for cases in grids.values():
        missing = set().union(*(pairs for _, pairs in cases))
        left = list(cases) if missing else []  # a case without pairs has one parameter, and stays
        while missing:
            best = max(left, key=lambda case: len(case[1] & missing))
            missing -= best[1]
            left.remove(best)
        for item, _ in left:
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Function) -> list[tuple[str, str]]:
    """The name and value of every parameter of a case. Names that are parametrised together are one parameter."""
    params = dict(item.callspec.params)
    together = [mark.args[0] for mark in item.iter_markers("parametrize") if isinstance(mark.args[0], tuple)]
    values = [(str(names), str([params.pop(name) for name in names])) for names in together]
    return sorted(values + [(name, str(value)) for name, value in params.items()])


@pytest.fixture(autouse=True)
def seed() -> None:
    """Fresh numbers in every run; a failure prints how to repeat it with FOREDRAFT_SEED."""
    value = int(os.environ.get("FOREDRAFT_SEED", random.randrange(2**31)))
    print(f"FOREDRAFT_SEED={value}")
    torch.manual_seed(value)


@cache
def library_of(path: Path) -> ctypes.CDLL:
    return open_library(path)


def backend_of(
    level: Level, dtype: str = "float32", threads: int = THREADS, activations: str = "int8"
) -> NativeBackend:
    try:
        return NativeBackend(dtype, threads, activations, library_of(level.library))
    except OSError as error:  # the processor has the level, but the system does not grant it
        pytest.skip(str(error))


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Level:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def backend(level: Level) -> NativeBackend:
    return backend_of(level)
