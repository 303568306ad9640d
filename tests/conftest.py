"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foredraft.errors import InvalidModel
from foredraft.models import catalog
from tests.backends import levels_of
from tests.grammars import Matchers


def _keep_to_own_processors() -> None:
    """Each of several processes that share the tests keeps to its own processors: kernels whose threads wait for each
    other crawl where another process takes one of them away. This comes before torch is imported, which has a thread
    for every processor that it finds."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        usable = sorted(os.sched_getaffinity(0))
        place, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, usable[place % len(usable) :: count])


_keep_to_own_processors()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", help="the level of native kernels that all tests run with, instead of the best one")


def pytest_configure(config: pytest.Config) -> None:
    if kernels := config.getoption("--kernels"):
        from foredraft.backends.native import library

        vars(library)["usable_levels"] = lambda: levels_of(kernels)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets models that a test loads run with one of tests.backends.KERNELS."""
    from foredraft.backends.native import library

    monkeypatch.setattr(library, "usable_levels", lambda: levels_of(request.param))
    return str(request.param)


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> Matchers:
    """Counts the parsers of grammars that a test compiles."""
    matchers = Matchers()
    monkeypatch.setattr("llguidance.LLMatcher", matchers)
    return matchers


@pytest.fixture
def builds(matchers: Matchers) -> list[str]:
    """The names of the threads that compile grammars, one for each of the two parsers of a grammar."""
    return matchers.threads


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched into the user's cache if need be; tests that use it are skipped without it."""
    try:
        return catalog.resolve(catalog.DEFAULT_MODEL)
    except InvalidModel as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def spec_bench() -> Path:
    """Spec-Bench questions for development. They are no part of this repository, but lie beside it where there are
    any."""
    file = Path(__file__).parents[2] / "shared" / "data" / "spec_bench_dev.jsonl"
    if not file.exists():
        pytest.skip("needs the development questions ../shared/data/spec_bench_dev.jsonl")
    return file
