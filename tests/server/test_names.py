"""What a model is called: nobody is told where it lies on the server's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from foredraft.integrations.ray_serve.options import FleetOptions
from foredraft.reports.facts import file_name
from tests.server.running_server import CANARY, load_tiny_model, running

HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 2}},
}


def test_of_a_path_only_the_end_is_public(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert file_name(str(tmp_path / "model.gguf")) == "model.gguf"
    assert file_name(f"{tmp_path}/") == tmp_path.name
    assert file_name("smollm2-135m") == "smollm2-135m"
    assert file_name("org/model") == "org/model"
    assert FleetOptions(model=str(tmp_path)).names == (tmp_path.name,)


def test_requests_may_use_the_path_and_no_answer_shows_it(tiny_folder: Path) -> None:
    path = str(tiny_folder)
    with running(load_tiny_model(tiny_folder), names=[file_name(path)], given_name=path) as server:
        for name in (path, tiny_folder.name):
            status, body = server.post("/v1/completions", {**CANARY, "model": name})
            assert (status, body["model"]) == (200, tiny_folder.name)
        refused = server.request("POST", "/v1/completions", {**CANARY, "model": "other"})
        pages = [
            server.request("GET", page)
            for page in ("/v1/stats", "/v1/models", "/metrics", "/props", "/slots", "/api/tags")
        ]
        answers = [
            server.request("POST", route, {**body, "model": path, "stream": stream})
            for route, body in ROUTES.items()
            for stream in (False, True)
        ]
        for status, data, _ in answers:
            assert status == 200 and f'"model":"{tiny_folder.name}"'.encode() in data
        for status, data, _ in (refused, *pages, *answers):
            assert status in (200, 404) and str(tiny_folder.parent).encode() not in data
