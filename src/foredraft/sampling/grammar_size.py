"""What is counted in a grammar before it is compiled.

The parser's own limits do not bound these: an intersection of n patterns may have 2**n states, all made in one step of
the compiler; every pattern of a property is compared with all others; `multipleOf` has a state for every remainder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from foredraft.errors import InvalidParameter

MOST_INTERSECTED = 12  # patterns that one text may have to match at once
MOST_PROPERTY_PATTERNS = 64
MOST_REMAINDERS = 20_000  # of all divisors

_NESTED_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar; its JSON follows


def check_size(grammar: Mapping[str, Any]) -> None:
    """Raises InvalidParameter for a grammar whose compilation might take minutes."""
    if {"regex", "choice", "gbnf"} & grammar.keys():
        return
    if "lark" not in grammar:
        _check_schemas([grammar])
        return
    text: str = grammar["lark"]
    if text.count("&") >= MOST_INTERSECTED:
        raise InvalidParameter(
            f"grammar cannot be used: it has {text.count('&')} times &, for patterns that must match at once; at most "
            f"{MOST_INTERSECTED - 1} are allowed. Write fewer patterns."
        )
    _check_schemas([_schema_at(text, found.end()) for found in _NESTED_SCHEMA.finditer(text)])


def _check_schemas(schemas: list[Any]) -> None:
    patterns: set[str] = set()
    divisors: set[int] = set()
    num_joined, num_property_patterns = 1, 0  # schemas that one value may have to fit at once
    parts = schemas
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, Mapping):
            parts += part.values()
            if isinstance(pattern := part.get("pattern"), str):
                patterns.add(pattern)
            if isinstance(divisor := part.get("multipleOf"), int | float):
                divisors.add(_digits(divisor))
            if isinstance(every := part.get("allOf"), list):
                num_joined += len(every)
            if len(part) > 1:  # keywords beside these hold together with them
                num_joined += len({"$ref", "anyOf", "oneOf"} & part.keys())
            if isinstance(named := part.get("patternProperties"), Mapping):
                num_property_patterns += len(named)
    if min(len(patterns), num_joined) > MOST_INTERSECTED:
        raise InvalidParameter(
            f"grammar cannot be used: it has {len(patterns)} times pattern and joins {num_joined} schemas with allOf, "
            f"anyOf, oneOf or $ref; one of these numbers must be at most {MOST_INTERSECTED}."
        )
    if num_property_patterns > MOST_PROPERTY_PATTERNS:
        raise InvalidParameter(
            f"grammar cannot be used: patternProperties has {num_property_patterns} patterns; at most "
            f"{MOST_PROPERTY_PATTERNS} are allowed. Name the properties instead."
        )
    if max(sum(divisors), math.lcm(*divisors) if num_joined > 1 else 0) > MOST_REMAINDERS:
        raise InvalidParameter(
            f"grammar cannot be used: its values of multipleOf are too large; all together, and their least common "
            f"multiple where schemas are joined, may be at most {MOST_REMAINDERS}. Check large ones in your program."
        )


def _digits(number: float) -> int:
    """The digits of a number without the zeros around them: so many remainders are states of the compiled grammar."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) or 1


def _schema_at(text: str, start: int) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None  # the compiler says what is wrong
