"""The proposers by name, and the speculation string that chooses among them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from foredraft.errors import InvalidSpec

PROPOSERS: tuple[str, ...] = ()  # none needs to be known yet: this release decodes plainly, as `k = 0` of the one step

_GRAMMAR = "off, auto, NAME, NAME:option=value,…, NAME+NAME, or auto(NAME+NAME)"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class ProposerChoice:
    """One proposer and its options, as text."""

    name: str
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """A parsed speculation string. `adaptive` lets the controller decide; without choices nothing is guessed."""

    choices: tuple[ProposerChoice, ...] = ()
    adaptive: bool = False


def parse_spec(text: object, known: Collection[str] = PROPOSERS) -> Spec:
    """Parse a speculation string against the proposers that this model has."""
    if not isinstance(text, str):
        raise InvalidSpec(f"spec={text!r} must be a string such as {_GRAMMAR}.")
    if text == "off":
        return Spec()
    if text == "auto":
        return Spec(tuple(ProposerChoice(name) for name in known), adaptive=True)
    inner = re.fullmatch(r"auto\((.*)\)", text)
    names = (inner.group(1) if inner else text).split("+")
    return Spec(tuple(_choice(part, text, known) for part in names), adaptive=inner is not None)


def _choice(part: str, text: str, known: Collection[str]) -> ProposerChoice:
    name, _, settings = part.partition(":")
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"spec={text!r} cannot be read; it must be {_GRAMMAR}.")
    if name not in known:
        available = f"this model has {', '.join(sorted(known))}" if known else "this release has none: use off or auto"
        raise InvalidSpec(f"spec={text!r} names the proposer {name!r}; {available}.")
    options: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        option, equals, value = setting.partition("=")
        if not equals or not _NAME.fullmatch(option) or not value:
            raise InvalidSpec(f"spec={text!r} has the option {setting!r}; options are written name=value.")
        options[option] = value
    return ProposerChoice(name, options)
