"""One tiny model for all tests of the server, and one server for those that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.server.limits import Limits
from tests.server.running_server import CANARY, RunningServer, load_tiny_model, running, save_tiny_model

QUICK = Limits(max_body_bytes=1 << 20, header_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=0.2, max_waiting=64)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-server"))


@pytest.fixture(scope="session")
def offline(tiny_folder: Path) -> LLM:
    """The same model without a server, to compare texts with."""
    return load_tiny_model(tiny_folder)


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    """For tests that change something of it."""
    return load_tiny_model(tiny_folder)


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    with running(load_tiny_model(tiny_folder), QUICK) as started:
        yield started


@pytest.fixture(scope="session")
def big_server(tiny_folder: Path) -> Iterator[RunningServer]:
    """With the limits that servers have by default."""
    with running(load_tiny_model(tiny_folder)) as started:
        yield started


@pytest.fixture(scope="session")
def canary(offline: LLM) -> str:
    params = SamplingParams(max_tokens=CANARY["max_tokens"], temperature=0, ignore_eos=True)  # type: ignore[arg-type]
    return offline.generate([str(CANARY["prompt"])], params)[0].text


@pytest.fixture
def unharmed(server: RunningServer, canary: str) -> Iterator[None]:
    """Whatever a test sends: afterwards the server is as before."""
    yield
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.canary() == canary
    server.until_idle()
