"""Keys: who is let in where, and that no path leads around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running_server import RunningServer, load_tiny_model, running

CHAT = "/v1/chat/completions"
KEY = "sesam-öffne-dich"


@pytest.fixture(scope="module")
def locked(tiny_folder: Path) -> Iterator[RunningServer]:
    with running(load_tiny_model(tiny_folder), api_keys=[KEY, "second"]) as server:
        yield server


def test_every_route_but_health_and_the_page_wants_a_key(locked: RunningServer) -> None:
    _, schema = locked.get("/openapi.json", **{"x-api-key": "second"})
    answers = {
        path: locked.request(method.upper(), path, b"{}")[0]
        for path, methods in {"/": {"get": {}}, "/openapi.json": {"get": {}}, **schema["paths"]}.items()
        for method in methods
    }
    unlocked = {path for path, status in answers.items() if status != 401}
    assert unlocked == {"/", "/health", "/ready"}
    assert {"/metrics", "/openapi.json", "/v1/models", CHAT, "/v1/messages"} <= answers.keys()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer second"}, 200),
        ({"authorization": "bearer  second "}, 200),
        ({"x-api-key": "second"}, 200),
        ({"x-api-key": KEY.encode().decode("latin-1")}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic second"}, 401),
        ({"authorization": "second"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "secon"}, 401),
        ({}, 401),
    ],
)
def test_keys(locked: RunningServer, headers: dict[str, str], status: int) -> None:
    assert locked.get("/v1/models", **headers)[0] == status


@pytest.mark.parametrize("path", ["/health/../metrics", "/static/../metrics", "//metrics", "/%2e/metrics", "/metrics/"])
def test_paths_that_only_look_open(locked: RunningServer, path: str) -> None:
    assert locked.request("GET", path)[0] in (401, 404)


def test_no_other_site_may_read(locked: RunningServer) -> None:
    origin = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    _, _, headers = locked.request("OPTIONS", CHAT, headers={**origin, "x-api-key": "second"})
    assert not any(name.startswith("access-control") for name in headers)
