"""Schemas of the kinds that people send, small enough that even a random model ends its answer soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,8}$"}
SHORT: Schema = {"type": "string", "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def record(**properties: Any) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, Schema] = {
    # objects, flat and nested
    "person": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "flags": record(active={"type": "boolean"}, verified={"type": "boolean"}, deleted={"type": "boolean"}),
    "nested": record(user=record(id=DIGIT, address=record(city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"}))),
    "deep": record(a=record(b=record(c=record(d=record(e=DIGIT))))),
    "wide": record(**{f"field_{index}": DIGIT for index in range(8)}),
    "empty": {"type": "object", "additionalProperties": False},
    "optional": {
        "type": "object",
        "properties": {"first": DIGIT, "second": WORD, "third": {"type": "boolean"}},
        "required": ["second"],
        "additionalProperties": False,
    },
    "all optional": {"type": "object", "properties": {"x": DIGIT, "y": DIGIT}, "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": DIGIT, "properties": {}, "maxProperties": 2},
    "quoted names": record(**{'say "hi"': DIGIT, "back\\slash": DIGIT, "grün": DIGIT}),
    # enums and constants
    "enum": {"enum": ["red", "green", "blue"]},
    "enum with common beginnings": record(state={"enum": ["running", "run", "ran", "rain"]}),
    "enum of kinds": {"enum": [1, "one", True, None, [1], {"one": 1}]},
    "constant": record(version={"const": "2.0"}, kind={"const": "event"}, at=DIGIT),
    "integers": record(code={"enum": [200, 201, 204, 400, 404, 500]}),
    # arrays with bounds
    "pair": several(DIGIT, 2, 2),
    "few": several({"enum": ["a", "b"]}, 1, 3),
    "matrix": several(several(DIGIT, 2, 2), 2, 2),
    "none or one": several(WORD, 0, 1),
    "records": several(record(id=DIGIT, ok={"type": "boolean"}), 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, DIGIT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    # unions
    "number or word": {"anyOf": [DIGIT, WORD]},
    "nullable": record(
        nickname={"anyOf": [SHORT, {"type": "null"}]}, parent={"type": ["integer", "null"], "minimum": 0, "maximum": 99}
    ),
    "shapes": {
        "oneOf": [
            record(shape={"const": "circle"}, radius=DIGIT),
            record(shape={"const": "box"}, width=DIGIT, height=DIGIT),
        ]
    },
    "list of unions": several({"anyOf": [{"type": "boolean"}, record(n=DIGIT)]}, 1, 2),
    # numbers
    "percentage": {"type": "integer", "minimum": 0, "maximum": 100},
    "negative": {"type": "integer", "minimum": -50, "maximum": -5},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 8},
    "fraction": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "even": {"type": "integer", "minimum": 0, "maximum": 40, "multipleOf": 2},
    # strings, patterns and formats
    "phone": {"type": "string", "pattern": "^\\+[0-9]{2} [0-9]{3}-[0-9]{4}$"},
    "version": {"type": "string", "pattern": "^v[0-9]{1,2}\\.[0-9]{1,2}(-(alpha|beta))?$"},
    "hex": record(colour={"type": "string", "pattern": "^#[0-9a-f]{6}$"}),
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "bounded": {"type": "string", "minLength": 3, "maxLength": 5},
    # references
    "definitions": {
        "$defs": {"point": record(x=DIGIT, y=DIGIT)},
        **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "combined": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    # what applications send
    "call of a tool": record(
        name={"const": "get_weather"},
        arguments=record(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines=several(record(item=WORD, count=DIGIT), 1, 2),
        paid={"type": "boolean"},
    ),
}
assert len(SCHEMAS) >= 40


class Matchers:
    """Stands for llguidance.LLMatcher, and knows by the names of threads who has compiled a parser. A grammar that is
    added to an engine gets two."""

    def __init__(self) -> None:
        self._original = pytest.importorskip("llguidance").LLMatcher
        self.threads: list[str] = []
        self.may_begin = threading.Event()
        self.may_begin.set()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.may_begin.wait(30)
        return self._original(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
