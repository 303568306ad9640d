"""Tools as requests describe them, and which of them the model may call or must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from foredraft.answers import AnswerFormat, AnswerReader, CallReader
from foredraft.server.bodies import RequestModel
from foredraft.server.errors import bad_request


class Function(RequestModel):
    name: str = Field(min_length=1)
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

    def reader(self, answer_format: AnswerFormat) -> AnswerReader:
        """Of an answer. One that must be a call is shaped by a grammar, whatever the model's format."""
        if self.named is not None or self.is_required:
            return CallReader(self.named.name if self.named else None)
        return answer_format.reader([tool.name for tool in self.tools])


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
