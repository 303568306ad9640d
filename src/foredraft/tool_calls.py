"""Tool calls: how models are told of tools where their templates are not, and how the JSON of calls is read.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one element per call. SmolLM2 writes a
list of such objects in one element. `answers.py` finds them. A model whose template has no place for tools gets
SmolLM2's system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from foredraft.errors import InvalidPrompt

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


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    @property
    def object(self) -> dict[str, Any]:
        """The arguments as they were meant; an answer that was cut may have none that can be read."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {}


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI's clients describe them; raises InvalidPrompt for what is none."""
    if isinstance(tools, list | tuple) and all(map(_is_tool, tools)):
        return list(tools)
    raise InvalidPrompt(
        'tools must be a list of functions like {"type": "function", "function": {"name": "…", "description": "…", '
        '"parameters": {…}}}.'
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system prompt, for templates that have no place for them."""
    prompt = _SMOLLM2.format(tools=json.dumps(list(tools)))
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
