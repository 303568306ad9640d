"""Request fields that clients of vLLM send, with the meaning that they have there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "hello", "max_tokens": 60, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 60, **fields}


class TestGrammars:
    @pytest.fixture(autouse=True)
    def _needs_llguidance(self) -> None:
        pytest.importorskip("llguidance")

    @pytest.mark.parametrize(
        "fields",
        [
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        ],
    )
    def test_schemas(self, server: RunningServer, fields: dict[str, Any]) -> None:
        for path, request in ((COMPLETE, complete(**fields)), (CHAT, chat(**fields))):
            status, body = server.post(path, request)
            assert status == 200, body
            choice = body["choices"][0]
            text = choice["text"] if path == COMPLETE else choice["message"]["content"]
            assert json.loads(text) in ({"yes": True}, {"yes": False})

    @pytest.mark.parametrize("wrap", [lambda kind: f"guided_{kind}", lambda kind: None])
    def test_regular_expressions_and_choices(self, server: RunningServer, wrap: Any) -> None:
        for kind, value in (("regex", "(red|blue){2}"), ("choice", ["redred", "blueblue"])):
            fields = {wrap(kind): value} if wrap(kind) else {"structured_outputs": {kind: value}}
            status, body = server.post(COMPLETE, complete(**fields))
            assert status == 200, body
            text = body["choices"][0]["text"]
            assert text in {"redred", "redblue", "bluered", "blueblue"}
            assert kind == "regex" or text in {"redred", "blueblue"}

    def test_any_object(self, server: RunningServer) -> None:
        status, body = server.post(COMPLETE, complete(structured_outputs={"json_object": True}))
        assert status == 200 and body["choices"][0]["text"].startswith("{"), body

    @pytest.mark.parametrize(
        "fields",
        [
            {"guided_regex": "a", "guided_choice": ["a"]},
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            {"grammar": {"regex": "a"}, "guided_json": SCHEMA},
        ],
    )
    def test_two_are_too_many(self, server: RunningServer, fields: dict[str, Any]) -> None:
        status, body = server.post(COMPLETE, complete(**fields))
        assert status == 400 and body["error"]["message"].startswith("Only one field can shape an answer"), body

    @pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 5000])
    def test_a_text_that_is_no_schema(self, server: RunningServer, text: str) -> None:
        status, body = server.post(COMPLETE, complete(guided_json=text))
        assert (status, body["error"]["param"]) == (400, "guided_json")
