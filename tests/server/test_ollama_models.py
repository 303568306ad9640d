"""What Ollama's clients ask before they send anything, in the order in which its own command asks it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from foredraft.models.fill_in import FillInTokens
from tests.server.running_server import NAME, RunningServer, load_tiny_model, running

GETS = ("/", "/health", "/ready", "/metrics", "/version", "/v1/stats", "/v1/models", f"/v1/models/{NAME}", "/props")
OLLAMA = ("/api/tags", "/api/ps", "/api/version")


def head(server: RunningServer, path: str) -> tuple[int, bytes, dict[str, str]]:
    return server.request("HEAD", path)


@pytest.mark.parametrize("path", [*GETS, *OLLAMA, "/docs", "/openapi.json", "/static/main.js"])
def test_head_is_get_without_a_body(server: RunningServer, path: str) -> None:
    status, data, headers = head(server, path)
    assert (status, data) == (200, b"")
    assert headers["content-type"] == server.request("GET", path)[2]["content-type"]


def test_head_of_what_is_no_get(server: RunningServer) -> None:
    assert head(server, "/v1/completions")[0] == 405
    assert head(server, "/nothing")[0] == 404


def test_list(server: RunningServer) -> None:
    assert head(server, "/")[0] == 200
    status, body = server.get("/api/tags")
    (model,) = body["models"]
    assert status == 200 and model["name"] == model["model"] == NAME
    assert re.fullmatch("[0-9a-f]{64}", model["digest"]) and model == server.get("/api/tags")[1]["models"][0]
    assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
    weights = sum(each.stat().st_size for each in Path(server.service.llm.model).glob("*.safetensors"))
    assert model["size"] == pytest.approx(weights, rel=0.1)


def test_digests_tell_models_apart(server: RunningServer, tiny_folder: Path) -> None:
    digest = server.get("/api/tags")[1]["models"][0]["digest"]
    with running(load_tiny_model(tiny_folder)) as same:
        assert same.get("/api/tags")[1]["models"][0]["digest"] == digest
    with running(load_tiny_model(tiny_folder, dtype="int8")) as other:
        assert other.get("/api/tags")[1]["models"][0]["digest"] != digest


def test_show(server: RunningServer) -> None:
    assert head(server, "/")[0] == 200
    status, told = server.post("/api/show", {"model": f"{NAME}:latest"})
    assert status == 200 and told["capabilities"] == ["completion", "tools"]
    family, info = told["details"]["family"], told["model_info"]
    assert info["general.architecture"] == family == "llama" and info["llama.context_length"] == 2048
    assert re.fullmatch(r"[0-9.]+[MB]", told["details"]["parameter_size"])
    assert told["details"]["quantization_level"] == "float32"
    assert "add_generation_prompt" in told["template"]
    assert all(isinstance(told[name], str) for name in ("template", "parameters", "modelfile"))
    assert server.post("/api/show", {"model": "another"})[0] == 404


def test_show_tells_what_the_model_can(tiny_folder: Path) -> None:
    llm = load_tiny_model(tiny_folder)
    vars(llm.tokenizer)["fill_in"] = FillInTokens("<s>", "<s>", "<s>")
    llm.tokenizer._config["chat_template"] = "{{ enable_thinking }}"
    with running(llm) as server:
        assert server.post("/api/show", {})[1]["capabilities"] == ["completion", "tools", "insert", "thinking"]


def test_ps(server: RunningServer) -> None:
    assert head(server, "/")[0] == 200
    (loaded,) = server.get("/api/ps")[1]["models"]
    (listed,) = server.get("/api/tags")[1]["models"]
    assert {name: loaded[name] for name in ("name", "size", "digest", "details")} == {
        name: listed[name] for name in ("name", "size", "digest", "details")
    }
    assert loaded["size_vram"] == 0 and loaded["context_length"] == 2048
    assert datetime.fromisoformat(loaded["expires_at"]) > datetime.now(UTC) + timedelta(days=365 * 50)


def test_run(server: RunningServer) -> None:
    assert head(server, "/")[0] == 200
    (model,) = server.get("/api/tags")[1]["models"]
    body: dict[str, Any] = {"model": model["name"], "stream": False}
    assert "completion" in server.post("/api/show", body)[1]["capabilities"]
    assert server.post("/api/generate", {**body, "prompt": ""})[1]["done_reason"] == "load"
    hello = {"messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 4, "temperature": 0}}
    assert server.post("/api/chat", {**body, **hello})[1]["message"]["content"]
    assert server.post("/api/generate", {**body, "keep_alive": 0})[1]["done_reason"] == "unload"


def test_the_version_is_one_that_clients_accept(server: RunningServer) -> None:
    version = server.get("/api/version")[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
