"""Tools: rendered for the model by its chat template, and calls parsed back out of what it writes.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one element per call. SmolLM2 writes a
list of such objects in one element. A model whose template has no place for tools gets SmolLM2's system prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from foredraft.server.bodies import RequestModel
from foredraft.server.errors import bad_request

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SMOLLM2 = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please
make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}}
]</tool_call>"""


class Function(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolRequest(RequestModel):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may call, and whether it must."""

    tools: tuple[Function, ...] = ()
    named: Function | None = None
    is_required: bool = False


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


def choose(tools: list[ToolRequest] | None, wanted: str | NamedTool | None) -> ToolChoice:
    """Raises ApiError when a choice is made among tools that there are not."""
    given = tuple(each.function for each in tools or ())
    if wanted == "none" or (not given and wanted in (None, "auto")):
        return ToolChoice()
    if not given:
        raise bad_request("tool_choice needs tools.", "tool_choice")
    if isinstance(wanted, NamedTool):
        name = wanted.function.name
        named = next((tool for tool in given if tool.name == name), None)
        if named is None:
            raise bad_request(f"tool_choice names {name[:100]!r}, which is not among the tools.", "tool_choice")
        return ToolChoice(given, named)
    if wanted not in (None, "auto", "required"):
        raise bad_request("tool_choice must be none, auto, required or the name of a function.", "tool_choice")
    return ToolChoice(given, is_required=wanted == "required")


def with_tool_prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system prompt, for templates that have no place for them."""
    prompt = _SMOLLM2.format(tools=json.dumps(tools))
    if messages and messages[0].get("role") == "system":
        system = {**messages[0], "content": f"{prompt}\n\n{messages[0].get('content') or ''}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def parse_calls(text: str) -> list[ToolCall] | None:
    """The calls in the JSON of one element; None if it holds none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return [ToolCall(call["name"], _arguments(call.get("arguments", call.get("parameters", {})))) for call in calls]


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class CallParser:
    """Separates the content of an answer from tool calls while both come in pieces. What may be the beginning of a tag
    is held back until it is clear."""

    def __init__(self, choice: ToolChoice) -> None:
        self._choice = choice
        self._held = ""
        self._inside = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls that are complete now."""
        if not self._choice.tools:
            return text, []
        self._held += text
        if self._choice.named or self._choice.is_required:
            return "", []  # the grammar makes the whole answer one call
        content, calls = "", []
        while True:
            tag = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self._inside:
                parsed = parse_calls(before)
                calls += parsed or []
                content += "" if parsed is not None else f"{OPEN}{before}{CLOSE}"
            else:
                content += before
            self._held, self._inside = after, not self._inside
        if not self._inside:
            kept = _possible_tag(self._held)
            content += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
        return content, calls

    def end(self) -> tuple[str, list[ToolCall]]:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        if self._choice.named:
            return "", [ToolCall(self._choice.named.name, held)]
        if self._inside or self._choice.is_required:
            calls = parse_calls(held)
            if calls:
                return "", calls
            return (OPEN if self._inside else "") + held, []
        return held, []


def _possible_tag(text: str) -> int:
    """How many characters at the end may be the beginning of a tag."""
    longest = min(len(text), len(OPEN) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(OPEN[:size])), 0)
