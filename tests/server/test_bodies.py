"""Bodies are read up to the first thing that is wrong with them, and never more of them than the limits allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

import pydantic

from foredraft.server import (
    anthropic_messages,
    llama_server,
    ollama,
    openai_chat,
    openai_completions,
    openai_responses,
    tokenising,
)
from foredraft.server.bodies import RequestModel, read
from foredraft.server.errors import ApiError
from foredraft.server.limits import Limits
from tests.server.running_server import RunningServer, load_tiny_model, running

PLAIN = (openai_chat, openai_completions, openai_responses, anthropic_messages, ollama, tokenising)
ROUTERS = [*(each.router for each in PLAIN), llama_server.posts]
MODELS = [get_type_hints(route.endpoint)["body"] for router in ROUTERS for route in router.routes]
JSON = "application/json"


def lists_in(schema: Any) -> list[dict[str, Any]]:
    """All schemas of lists in the core schema of a model."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    own = [schema] if isinstance(schema, dict) and schema.get("type") == "list" else []
    return own + [found for each in inner for found in lists_in(each)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_list_of_a_request_ends_at_its_first_fault(model: type[RequestModel]) -> None:
    lists = lists_in(model.__pydantic_core_schema__)
    assert lists and all(each.get("fail_fast") for each in lists)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (openai_completions.CompletionRequest, {"prompt": [0.5] * 5000}),
        (openai_completions.CompletionRequest, {"prompt": [[0.5]] * 5000}),
        (openai_completions.CompletionRequest, {"prompt": "x", "stop": [5] * 5000}),
        (openai_completions.CompletionRequest, {"prompt": "x", "logit_bias": {"x": "y"}, "n": "z"}),
        (openai_chat.ChatRequest, {"messages": [{}] * 5000}),
        (openai_chat.ChatRequest, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
        (tokenising.DetokenizeRequest, {"tokens": ["x"] * 5000}),
    ],
)
def test_errors_are_few(model: type[RequestModel], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() < 10
    with pytest.raises(ApiError) as told:
        read(json.dumps(body).encode(), JSON, model)
    assert told.value.status == 400 and len(told.value.message) < 300


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"prompt":', "The body is not valid JSON, at character 10."),
        (b'{"prompt": "\xff"}', "The body is not valid JSON: send UTF-8."),
        (b'{"prompt": ' + b"[" * 50_000, "The body is nested too deeply."),
        (b'{"seed": ' + b"9" * 5000 + b"}", "The body has a number of too many digits."),
        (b"[]", "The body must be a JSON object."),
    ],
)
def test_what_is_wrong_with_the_json_is_told(body: bytes, sentence: str) -> None:
    with pytest.raises(ApiError) as told:
        read(body, JSON, openai_completions.CompletionRequest)
    assert (told.value.status, told.value.message) == (400, sentence)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "json"])
def test_only_json_is_read(content_type: str) -> None:
    named = repr(content_type) if content_type else "no content type"
    with pytest.raises(ApiError, match=rf"^The request has .*{named}; send .* content type application/json\.$"):
        read(b'{"prompt": "x"}', content_type, openai_completions.CompletionRequest)


@pytest.mark.parametrize("content_type", [JSON, "Application/JSON; charset=utf-8", "application/problem+json"])
def test_what_is_json(content_type: str) -> None:
    assert read(b'{"prompt": "x"}', content_type, openai_completions.CompletionRequest).prompt == "x"


class TestValues:
    """JSON with too many values is refused before it is parsed."""

    def refused(self, server: RunningServer, body: bytes, monkeypatch: pytest.MonkeyPatch) -> bool:
        parsed: list[object] = []
        loads = json.loads
        with monkeypatch.context() as patched:
            patched.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
            status, data, _ = server.request("POST", "/v1/completions", body)
        is_refused = b"too finely divided" in data
        assert status == 400 and is_refused != bool(parsed)
        return is_refused

    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt":[' + b"1," * 600_000 + b"1]}",
            b'{"prompt":[' + b"[]," * 70_000 + b"[]]}",
            b'{"messages":[' + b"{}," * 70_000 + b"{}]}",
            b"{" + b'"x":1,' * 70_000 + b'"prompt":"x"}',
            b'{"stop":[' + b'"a",' * 600_000 + b'"a"]}',
            b'{"stop":[' + b'",",' * 600_000 + b'"a"]}',
            b'{"stop":[' + b'",\\\\",' * 530_000 + b'"a"]}',
        ],
        ids=["values", "lists", "objects", "keys", "texts", "commas", "commas and backslashes"],
    )
    def test_too_many(self, big_server: RunningServer, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.refused(big_server, body, monkeypatch)

    @pytest.mark.parametrize(
        "text", ['[{,:"' * 200_000, '\\"[[[[,' * 150_000, "[]," * 600_000], ids=["quotes", "backslashes", "commas"]
    )
    def test_what_a_text_holds_is_no_value(
        self, big_server: RunningServer, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body = json.dumps({"prompt": text, "n": "x"}).encode()  # parsed, and then refused
        assert len(body) < Limits().max_body_bytes
        assert not self.refused(big_server, body, monkeypatch)


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[RunningServer]:
    with running(load_tiny_model(tiny_folder), Limits(max_tokenised=1000)) as started:
        yield started


class TestTokenising:
    """What is too long is refused before it is tokenised."""

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "x" * 1001}),
            ("/tokenize", {"messages": [{"role": "user", "content": "x" * 501}] * 2}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 1001}]}),
            ("/detokenize", {"tokens": [5] * 1001}),
        ],
    )
    def test_limit(
        self, small: RunningServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("encode", "encode_chat", "decode"):
            monkeypatch.setattr(small.service.llm.tokenizer, name, lambda *_, **__: pytest.fail("it was tokenised"))
        status, data = small.post(path, body)
        assert status == 400 and "at most 1000 are allowed" in data["error"]["message"]

    def test_at_the_limit(self, small: RunningServer) -> None:
        assert small.post("/tokenize", {"prompt": "x" * 1000})[0] == 200
        assert small.post("/detokenize", {"tokens": [5] * 1000})[0] == 200

    def test_prompts_that_cannot_fit(self, small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("foredraft.models.tokenizer._ids", lambda *_: pytest.fail("it was tokenised"))
        long = "x" * 500_000
        messages = [{"role": "user", "content": long}]
        for path, body in (("/v1/completions", {"prompt": long}), ("/v1/chat/completions", {"messages": messages})):
            status, data = small.post(path, body)
            assert status == 400 and data["error"]["code"] == "context_length_exceeded"
