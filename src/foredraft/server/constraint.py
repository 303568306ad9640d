"""From the fields that shape an answer to the one grammar that it must follow: `grammar`, what clients of vLLM send,
`response_format` and `tool_choice`."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from foredraft.server.bodies import Many, RequestModel
from foredraft.server.errors import bad_request, not_supported
from foredraft.server.tools import Function, ToolChoice

Grammar = dict[str, Any]
_ANY_OBJECT: Grammar = {"type": "object"}
_NO_PARAMETERS: Grammar = {"type": "object", "properties": {}, "additionalProperties": False}


class JsonSchema(RequestModel):
    name: str | None = None
    strict: bool | None = None
    schema_: Grammar | None = Field(None, alias="schema")


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Grammar | None = Field(default=None, alias="schema")  # of a json_object, as llama.cpp's server has it


class StructuredOutputs(RequestModel):
    """What vLLM calls structured outputs: one of these."""

    json_: str | Grammar | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class GrammarFields(RequestModel):
    """The fields that give a grammar as such; `guided_…` are vLLM's older names."""

    grammar: str | Grammar | None = Field(
        default=None, description="a JSON schema, or an object with regex, choice, lark or gbnf; a text is GBNF or Lark"
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Grammar | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None

    def grammars(self) -> dict[str, Grammar]:
        """Those that are given, by the field that gives them."""
        wanted = self.structured_outputs or StructuredOutputs()
        if wanted.structural_tag is not None:
            raise not_supported(
                "structured_outputs.structural_tag", "use tools with tool_choice, or a Lark grammar as `grammar`"
            )
        given = {
            "grammar": _written(self.grammar),
            "structured_outputs.json": _schema("structured_outputs.json", wanted.json_),
            "structured_outputs.regex": _kind("regex", wanted.regex),
            "structured_outputs.choice": _kind("choice", wanted.choice),
            "structured_outputs.grammar": _written(wanted.grammar),
            "structured_outputs.json_object": _ANY_OBJECT if wanted.json_object else None,
            "guided_json": _schema("guided_json", self.guided_json),
            "guided_regex": _kind("regex", self.guided_regex),
            "guided_choice": _kind("choice", self.guided_choice),
            "guided_grammar": _written(self.guided_grammar),
        }
        return {name: grammar for name, grammar in given.items() if grammar is not None}


def grammar_of(
    given: GrammarFields,
    wanted: ResponseFormat | None = None,
    choice: ToolChoice | None = None,
    closes_tools: bool = False,
) -> Grammar | None:
    """The one grammar of a request: given as such, as a response format, or through a tool that must be called. With
    `closes_tools` tools are strict unless they say otherwise."""
    others = {"response_format": _of_format(wanted), "tool_choice": _of_tools(choice or ToolChoice(), closes_tools)}
    grammars = given.grammars() | {name: grammar for name, grammar in others.items() if grammar is not None}
    if len(grammars) > 1:
        raise bad_request(f"Only one field can shape an answer, but these do: {', '.join(grammars)}.")
    return next(iter(grammars.values()), None)


def _kind(kind: str, value: str | list[str] | None) -> Grammar | None:
    return None if value is None else {kind: value}


def _written(given: str | Grammar | None) -> Grammar | None:
    """A grammar whose text is GBNF, as llama.cpp's server takes it, or Lark, which has no `::=`."""
    return {"gbnf" if "::=" in given else "lark": given} if isinstance(given, str) else given


def _schema(field: str, given: str | Grammar | None) -> Grammar | None:
    """A JSON schema, which clients send as an object or as its text. It is the form of an answer, so it is closed."""
    if given is None:
        return None
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise bad_request(f"{field} must be a JSON schema: an object, or the text of one.", field)
    return closed(schema, field)


def _of_format(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return closed(wanted.schema_, "response_format") if wanted.schema_ else _ANY_OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise bad_request(
            'response_format of the type json_schema needs {"json_schema": {"schema": ...}}.', "response_format"
        )
    schema = wanted.json_schema.schema_
    return closed(schema, "response_format") if wanted.json_schema.strict else schema


def _of_tools(choice: ToolChoice, closes: bool) -> Grammar | None:
    """Of a named tool its arguments; of any tool an object with its name and arguments."""
    if choice.named is not None:
        return _parameters(choice.named, closes)
    if choice.is_required:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": _parameters(tool, closes)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in choice.tools
        ]
        return {"anyOf": calls}
    return None


def _parameters(tool: Function, closes: bool) -> Grammar:
    schema = tool.parameters or _NO_PARAMETERS
    is_strict = closes if tool.strict is None else tool.strict
    return closed(schema, "tools") if is_strict else schema


def closed(schema: Grammar, field: str) -> Grammar:
    """The schema as OpenAI's strict mode wants it: objects have the properties that it names and no others, unless it
    says something else about them. A small model would invent further ones for ever."""
    try:
        closed: Grammar = _closed(schema)
    except RecursionError:
        raise bad_request(f"The schema in {field} is nested too deeply.", field) from None
    return closed


def _closed(part: Any) -> Any:
    """Of keywords that hold no schemas, as `enum` and `default`, nothing is touched. What is combined by `allOf` and
    the like is left as it is: a part that is closed would forbid what the other parts allow."""
    if not isinstance(part, dict):
        return part
    made = dict(part)
    for name in _HOLDS_SCHEMAS & part.keys():
        if isinstance(part[name], dict):
            made[name] = {key: _closed(value) for key, value in part[name].items()}
    for name in _LISTS_SCHEMAS & part.keys():
        if isinstance(part[name], list):
            made[name] = [_closed(value) for value in part[name]]
    if "items" in part:
        made["items"] = _closed(part["items"])
    if "properties" in part and not _SAYS_OTHERWISE & part.keys():
        made["additionalProperties"] = False
    return made


_HOLDS_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
_LISTS_SCHEMAS = frozenset({"anyOf", "oneOf", "prefixItems"})
_SAYS_OTHERWISE = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    | {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
)
