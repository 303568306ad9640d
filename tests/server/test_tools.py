"""Tool calls: what a model writes is separated into content and calls, whole or in pieces."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from foredraft.answers import AnswerFormat, Part
from foredraft.outputs import CompletionOutput, SpecMetrics, TokenEvent
from foredraft.server.constraint import GrammarFields, ResponseFormat, grammar_of
from foredraft.server.errors import ApiError
from foredraft.server.openai_chat import ChatAnswer
from foredraft.server.sse import json_pieces
from foredraft.server.tools import Function, NamedTool, ToolChoice, ToolRequest, choose
from foredraft.tool_calls import with_tool_prompt
from tests.unit.unit_helpers import make_sequence

WEATHER = Function(name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
AUTO = ToolChoice((WEATHER,))
THINKS = AnswerFormat(thinks=True, begun="<think>")
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
REQUEST = ToolRequest.model_validate({"type": "function", "function": {"name": "weather"}})

# what the model writes: the content, and the names of the calls
TEXTS: dict[str, tuple[str, str, list[str]]] = {
    "Hermes": (f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
    "two calls": (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "\n", ["weather", "weather"]),
    "SmolLM2": (f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", ["weather", "weather"]),
    "SmolLM2, none": ("<tool_call>[]</tool_call>", "", []),
    "content around": (f"Well: <tool_call>{CALL}</tool_call> done", "Well:  done", ["weather"]),
    "no call": ("2 < 3 and <b>bold</b> <tool", "2 < 3 and <b>bold</b> <tool", []),
    "broken JSON": ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
    "no JSON object": ("<tool_call>5</tool_call>", "<tool_call>5</tool_call>", []),
    "cut off, but complete": (f"<tool_call>{CALL}", "", ["weather"]),
    "cut off": ('<tool_call>{"name": ', '<tool_call>{"name": ', []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_separated(name: str, size: int) -> None:
    text, content, names = TEXTS[name]
    reader = AUTO.reader(AnswerFormat())
    part = sum([reader.feed(text[start : start + size]) for start in range(0, len(text), size)], Part()) + reader.end()
    assert (part.reasoning, part.content) == ("", content)
    assert [call.name for call in part.calls] == names
    assert all(json.loads(call.arguments) == {"city": "Oslo"} for call in part.calls)
    assert len({call.id for call in part.calls}) == len(part.calls)


def test_without_tools_nothing_is_parsed_or_held_back() -> None:
    reader = ToolChoice().reader(AnswerFormat())
    assert reader.feed("<tool_call>") == Part(content="<tool_call>")
    assert not reader.end()


def test_a_named_tool_gets_the_answer_as_its_arguments() -> None:
    reader = ToolChoice((WEATHER,), named=WEATHER).reader(THINKS)
    assert not reader.feed('{"city": "Oslo"}')
    part = reader.end()
    (call,) = part.calls
    assert (part.content, call.name, call.arguments) == ("", "weather", '{"city": "Oslo"}')


def test_a_required_call_is_one_object() -> None:
    reader = ToolChoice((WEATHER,), is_required=True).reader(THINKS)
    reader.feed(CALL)
    assert [call.name for call in reader.end().calls] == ["weather"]


def test_choices() -> None:
    named = NamedTool.model_validate({"type": "function", "function": {"name": "weather"}})
    assert choose(None, None) == choose([REQUEST], "none") == ToolChoice()
    assert not choose([REQUEST], "auto").is_required and choose([REQUEST], "required").is_required
    assert choose([REQUEST], named).named == REQUEST.function
    assert grammar_of(GrammarFields(), None, choose([REQUEST], named)) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    for tools, wanted in ((None, "required"), ([REQUEST], "sometimes"), (None, named)):
        with pytest.raises(ApiError, match="tool_choice"):
            choose(tools, wanted)


def test_grammars() -> None:
    schema = {"type": "object"}
    wanted = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert grammar_of(GrammarFields(), wanted, AUTO) == schema
    assert grammar_of(GrammarFields(), ResponseFormat(type="json_object"), AUTO) == {"type": "object"}
    assert grammar_of(GrammarFields(), ResponseFormat(type="text"), AUTO) is None
    assert grammar_of(GrammarFields(grammar={"regex": "a+"}), None, AUTO) == {"regex": "a+"}
    assert grammar_of(GrammarFields(), None, ToolChoice((WEATHER,), named=WEATHER)) == WEATHER.parameters
    required = grammar_of(GrammarFields(), None, ToolChoice((WEATHER,), is_required=True))
    assert required is not None
    assert required["anyOf"][0]["properties"] == {"name": {"const": "weather"}, "arguments": WEATHER.parameters}
    with pytest.raises(ApiError, match="Only one"):
        grammar_of(GrammarFields(grammar={"regex": "a+"}), wanted, AUTO)


@pytest.mark.parametrize("has_system", [True, False])
def test_tools_in_a_system_prompt(has_system: bool) -> None:
    system = [{"role": "system", "content": "Be brief."}] if has_system else []
    messages = with_tool_prompt([*system, {"role": "user", "content": "x"}], [{"name": "weather"}])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert '[{"name": "weather"}]' in messages[0]["content"]
    assert messages[0]["content"].endswith("Be brief.") == has_system


def answered(text: str, size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A chat answer with this text: whole, and the chunks of its stream in pieces of some characters."""
    metrics = SpecMetrics.of(make_sequence([1]))
    output = CompletionOutput(0, text, [1], "stop", None, 5, None, None, metrics)
    generation: Any = SimpleNamespace(
        id="x",
        created=0,
        num_choices=1,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        outputs={0: output},
        is_complete=True,
        answer_format=AnswerFormat(),
    )
    make = lambda: ChatAnswer(generation, "m", None, AUTO, False)  # noqa: E731
    answer = make()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    stream = answer.begin()
    for piece in pieces[:-1]:
        stream += answer.delta({0: [TokenEvent("x", 0, 1, piece, "target")]})
    last = TokenEvent("x", 0, 1, pieces[-1], "target", finish_reason="stop", output=output)
    stream += answer.delta({0: [last]}) + answer.end()
    whole = json.loads(b"".join(json_pieces(make().body())))
    return whole, [json.loads(part) for part in stream.decode().split("data: ")[1:-1]]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_an_answer_and_in_its_stream(size: int) -> None:
    whole, chunks = answered(f"So: <tool_call>{CALL}</tool_call>", size)
    message = whole["choices"][0]["message"]
    assert message["content"] == "So: " and whole["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "So: "
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert call["index"] == 0 and call["function"] == message["tool_calls"][0]["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
