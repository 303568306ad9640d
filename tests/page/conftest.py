"""A real browser on a real server with the default model. Every test fails on console errors and foreign requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.server.service import DEFAULT_SPECS
from tests.page.open_page import OpenPage
from tests.server.running_server import RunningServer, load_tiny_model, running, save_tiny_model

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DTYPE = "float32"  # reading the weights takes most of a run on any CPU, so that drafts of a head pay in the pictures
_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright, which is missing")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("the page is tested in Chromium, and there is none; on Debian: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM("smollm2-135m", dtype=DTYPE, spec="auto", max_num_seqs=4, kv_cache_tokens=8192)


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[RunningServer]:
    with running(llm, names=["smollm2-135m"], allowed_specs=(*DEFAULT_SPECS, "eagle:nodes=12")) as started:
        yield started


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """For tests that write the answers themselves, or to which it does not matter what a model says."""
    with running(load_tiny_model(save_tiny_model(tmp_path_factory.mktemp("tiny")))) as started:
        yield started


@pytest.fixture
def scripted_page(browser: Any, tiny_server: RunningServer) -> Iterator[OpenPage]:
    with OpenPage.opened(browser, tiny_server.url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def cold(request: pytest.FixtureRequest) -> None:
    """No test drafts from the answers of another. The engine thread sleeps while the server is idle."""
    if "server" in request.fixturenames:
        request.getfixturevalue("server").until_idle()
        request.getfixturevalue("llm").engine.speculation.clear()


@pytest.fixture
def page(browser: Any, server: RunningServer) -> Iterator[OpenPage]:
    with OpenPage.opened(browser, server.url) as opened:
        yield opened
