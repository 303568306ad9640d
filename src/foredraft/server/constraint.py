"""From `response_format` and `tool_choice` to the grammar that an answer must follow."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from foredraft.server.bodies import RequestModel
from foredraft.server.errors import bad_request
from foredraft.server.tools import ToolChoice

Grammar = dict[str, Any]
_ANY_OBJECT: Grammar = {"type": "object"}


class JsonSchema(RequestModel):
    name: str | None = None
    strict: bool | None = None
    schema_: Grammar | None = Field(None, alias="schema")


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def grammar_of(given: Grammar | None, wanted: ResponseFormat | None, choice: ToolChoice) -> Grammar | None:
    """The one grammar of a request: given as such, as a response format, or through a tool that must be called."""
    grammars = [each for each in (given, _of_format(wanted), _of_tools(choice)) if each is not None]
    if len(grammars) > 1:
        raise bad_request("Only one of grammar, response_format and a required tool_choice can shape an answer.")
    return grammars[0] if grammars else None


def _of_format(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise bad_request(
            'response_format of the type json_schema needs {"json_schema": {"schema": ...}}.', "response_format"
        )
    return wanted.json_schema.schema_


def _of_tools(choice: ToolChoice) -> Grammar | None:
    """Of a named tool its arguments; of any tool an object with its name and arguments."""
    if choice.named is not None:
        return choice.named.parameters or _ANY_OBJECT
    if choice.is_required:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or _ANY_OBJECT},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in choice.tools
        ]
        return {"anyOf": calls}
    return None
