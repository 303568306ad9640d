"""Grammars that are large: they work, or the client hears what is too large, before the answer begins or within it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.server import ollama
from foredraft.server.constraint import GrammarFields, ResponseFormat, closed, grammar_of
from foredraft.server.errors import ApiError
from foredraft.server.tools import Function, ToolChoice
from tests.server.running_server import NAME, RunningServer

pytest.importorskip("llguidance")

COMPLETE, MESSAGES = "/v1/completions", "/v1/messages"
OPTIONAL = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1800)}}
# More alternatives than the parser follows at once, behind 40 free letters.
LATE = {"lark": "start: HEAD tail\nHEAD: /[a-z]{40}/\ntail: " + " ".join(f'("a{index}")?' for index in range(1000))}


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "hello", "max_tokens": 60, **fields}


def check_refusal(error: dict[str, Any]) -> None:
    assert (error["type"], error["param"]) == ("invalid_request_error", "grammar")
    assert error["message"].startswith("grammar cannot be used: too much may follow at one place; use fewer optional")


@pytest.mark.parametrize("count", [600, 4000])
def test_a_choice_of_many_words_is_answered(server: RunningServer, count: int) -> None:
    words = [f"c{index:04}" for index in range(count)]
    status, body = server.post(COMPLETE, complete(grammar={"choice": words}, n=2))
    assert status == 200, body
    assert {choice["text"] for choice in body["choices"]} <= set(words)


def test_what_exceeds_a_limit_at_its_beginning_is_refused(server: RunningServer) -> None:
    status, body = server.post(COMPLETE, complete(grammar=OPTIONAL, n=8, stream=True))  # the stream has not begun
    assert status == 400, body
    check_refusal(body["error"])
    tool = {"type": "function", "function": {"name": "f", "parameters": OPTIONAL}}
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    status, body = server.post("/v1/chat/completions", chat)
    assert status == 400, body
    check_refusal(body["error"])


def test_what_exceeds_a_limit_later_ends_the_answer_with_the_same_sentence(server: RunningServer) -> None:
    status, body = server.post(COMPLETE, complete(grammar=LATE))
    assert status == 400, body
    check_refusal(body["error"])
    status, data, _ = server.request("POST", COMPLETE, complete(grammar=LATE, stream=True))
    assert status == 200
    *_, failed, end = [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part]
    check_refusal(json.loads(failed)["error"])
    assert end == "[DONE]"
    server.until_idle()


CLOSED = {"additionalProperties": False}
STRICT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object and one in it": (
        {"properties": {"a": {"properties": {"b": {}}}}},
        {"properties": {"a": {"properties": {"b": {}}, **CLOSED}}, **CLOSED},
    ),
    "definitions, lists and alternatives": (
        {"$defs": {"x": {"properties": {}}}, "items": {"properties": {}}, "anyOf": [{"properties": {}}]},
        {
            "$defs": {"x": {"properties": {}, **CLOSED}},
            "items": {"properties": {}, **CLOSED},
            "anyOf": [{"properties": {}, **CLOSED}],
        },
    ),
    "said otherwise": (*[{"properties": {}, "additionalProperties": {"type": "string"}}] * 2,),
    "any object": (*[{"type": "object"}] * 2,),
    "combined": (*[{"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}] * 2,),
    "values that look like schemas": (*[{"enum": [{"properties": {}}], "default": {"properties": {}}}] * 2,),
    "properties of that name": (
        {"properties": {"properties": {"type": "string"}}},
        {"properties": {"properties": {"type": "string"}}, **CLOSED},
    ),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_schemas_close_objects(name: str) -> None:
    schema, expected = STRICT[name]
    before = json.dumps(schema)
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert grammar_of(GrammarFields(), ResponseFormat.model_validate(strict)) == expected
    lax = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert grammar_of(GrammarFields(), ResponseFormat.model_validate(lax)) == schema
    tool = Function(name="f", parameters=schema, strict=True)
    assert grammar_of(GrammarFields(), None, ToolChoice((tool,), named=tool)) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", STRICT)
def test_schemas_that_are_the_form_of_an_answer_close_objects(name: str) -> None:
    schema, expected = STRICT[name]
    text = json.dumps(schema)
    for field in ({"guided_json": schema}, {"guided_json": text}, {"structured_outputs": {"json": schema}}):
        assert grammar_of(GrammarFields.model_validate(field)) == expected
    llama = {"type": "json_object", "schema": schema}
    assert grammar_of(GrammarFields(), ResponseFormat.model_validate(llama)) == expected
    body = ollama.ChatRequest.model_validate({"messages": [], "format": schema})
    assert grammar_of(body, body.response_format) == expected
    assert grammar_of(GrammarFields(grammar=schema)) == schema
    for strict, wanted in ((None, expected), (True, expected), (False, schema)):
        tool = Function(name="f", parameters=schema, strict=strict)
        assert grammar_of(GrammarFields(), None, ToolChoice((tool,), named=tool), closes_tools=True) == wanted
    assert json.dumps(schema) == text


def test_forced_calls_of_messages_have_the_named_properties_only(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    status, answer = server.post(MESSAGES, body)
    assert status == 200, answer
    assert [set(block["input"]) for block in answer["content"]] == [{"a"}]


def test_structural_tags_are_refused(server: RunningServer) -> None:
    status, body = server.post(COMPLETE, complete(structured_outputs={"structural_tag": "{}"}))
    assert (status, body["error"]["param"]) == (400, "structured_outputs.structural_tag")
    assert "structural_tag is not supported here; use tools" in body["error"]["message"]


def test_a_strict_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ApiError, match="nested too deeply"):
        closed(schema, "tools")
