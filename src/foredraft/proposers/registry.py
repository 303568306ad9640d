"""The proposers by name, and the speculation string that chooses among them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.errors import InvalidSpec
from foredraft.heads.kinds import KINDS
from foredraft.proposers.base import Proposer
from foredraft.proposers.target import TargetModel

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_BUILT_IN = {
    "ngram": "foredraft.proposers.ngram:Ngram",
    "suffix": "foredraft.proposers.suffix:Suffix",
    "draft_model": "foredraft.proposers.draft_model:DraftModel",
    "quantised": "foredraft.proposers.quantised:Quantised",
    "early_exit": "foredraft.proposers.early_exit:EarlyExit",
    "lookahead": "foredraft.proposers.lookahead:Lookahead",
    "staged": "foredraft.proposers.staged:Staged",
    "grammar": "foredraft.proposers.grammar:Grammar",
    "prediction": "foredraft.proposers.prediction:Prediction",
}
# A draft model may be any model, so its proposer is none of the heads'; a distilled one is a head that it can load.
_BUILT_IN |= {kind: f"foredraft.heads.{kind}.propose:PROPOSER" for kind in KINDS if kind not in _BUILT_IN}

_REGISTERED: dict[str, type[Proposer]] = {}  # by register_proposer

# What `auto` chooses among, beside the model's head: every model has them, and a query costs next to nothing.
AUTO = ("prediction", "suffix", "grammar")

_P = TypeVar("_P", bound=Proposer)
_SYNTAX = "off, auto, NAME, NAME:option=value,…, NAME+NAME, or auto(NAME+NAME)"
MAX_SPEC_LENGTH = 4096  # characters: a spec may hold a path
MAX_PROPOSERS = 8  # that one spec joins
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class ProposerChoice:
    """One proposer and its options, as text."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        return f"{self.name}:{settings}" if settings else self.name


@dataclass(frozen=True)
class Spec:
    """A parsed speculation string. `adaptive` lets the controller decide; without choices nothing is drafted."""

    choices: tuple[ProposerChoice, ...] = ()
    adaptive: bool = False
    with_head: bool = False  # the model's best head is chosen too, if it has one


def proposer_names() -> tuple[str, ...]:
    """All proposers: those of this package, those that other packages offer as entry points, and those that this
    process has registered."""
    return (*_BUILT_IN, *(point.name for point in _offered()), *_REGISTERED)


def register_proposer(proposer: type[_P]) -> type[_P]:
    """Let specs name a proposer from now on, by its `name`: `register_proposer(Echo)`, or as a decorator of the class.
    One that was registered under the same name is replaced, so that a cell of a notebook may run again; models that
    are loaded keep what they have built of it. Raises InvalidSpec for what is no proposer, or a name that is taken."""
    name = getattr(proposer, "name", None)
    if not (isinstance(proposer, type) and issubclass(proposer, Proposer)):
        raise InvalidSpec(
            f"{proposer!r} is no proposer; give a class that inherits from foredraft.proposers.base.Proposer."
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("off", "auto"):
        raise InvalidSpec(
            f"{proposer.__name__} has the name {name!r}; set its `name` to lower-case letters, digits and underscores."
        )
    options = getattr(proposer, "Options", None)
    if not is_dataclass(options) or any(type(each.default) not in (int, float, str) for each in fields(options)):
        raise InvalidSpec(
            f"{proposer.__name__} needs `Options`, a dataclass whose fields have numbers or texts as defaults."
        )
    if name in _BUILT_IN or name in _offered().names:
        raise InvalidSpec(f"There is a proposer {name!r} already; give {proposer.__name__} another `name`.")
    _REGISTERED[name] = proposer
    return proposer


@cache
def _offered() -> EntryPoints:
    """Looking through all installed packages takes 10 ms, which a request need not pay, and so does the import."""
    from importlib.metadata import entry_points

    return entry_points(group="foredraft.proposers")


def build_proposer(choice: ProposerChoice, target: TargetModel) -> Proposer:
    """The proposer that a choice asks for. Its class has its options as a dataclass `Options`, and is made from those
    and the target."""
    proposer: Proposer = proposer_class(choice.name)(read_options(choice), target)
    return proposer


def proposer_class(name: str) -> type[Any]:
    """The class of a proposer that there is."""
    found: type[Any]
    if name in _BUILT_IN:
        module, _, class_name = _BUILT_IN[name].partition(":")
        found = getattr(import_module(module), class_name)
        return found
    if name in _REGISTERED:
        return _REGISTERED[name]
    first, *others = _offered().select(name=name)
    if others:
        raise InvalidSpec(f"The proposer {name!r} is offered by {first.value} and {others[0].value}; uninstall one.")
    try:
        found = first.load()
    except (ImportError, AttributeError) as error:
        raise InvalidSpec(f"The proposer {name!r} of {first.value} cannot be loaded: {error}.") from error
    return found


def read_options(choice: ProposerChoice) -> Any:
    """The options of a choice in the types of their defaults, as its proposer takes them."""
    options_class = proposer_class(choice.name).Options
    kinds: dict[str, type[Any]] = {option.name: type(option.default) for option in fields(options_class)}
    values: dict[str, Any] = {}
    for name, text in choice.options.items():
        if name not in kinds:
            raise InvalidSpec(f"{choice.name} has no option {name!r}; it has {', '.join(kinds)}.")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise InvalidSpec(f"{choice.name}: {name}={text!r} must be of type {kinds[name].__name__}.") from None
    return options_class(**values)


def parse_spec(text: object) -> Spec:
    """Parse a speculation string against the proposers that there are, and check the options that it gives them."""
    if not isinstance(text, str):
        raise InvalidSpec(f"spec={text!r} must be a string such as {_SYNTAX}.")
    if len(text) > MAX_SPEC_LENGTH:
        raise InvalidSpec(f"spec has {len(text)} characters; it may have at most {MAX_SPEC_LENGTH}.")
    if text == "off":
        return Spec()
    if text == "auto":
        return Spec(tuple(map(ProposerChoice, AUTO)), adaptive=True, with_head=True)
    inner = re.fullmatch(r"auto\((.*)\)", text)
    names = (inner.group(1) if inner else text).split("+")
    if len(names) > MAX_PROPOSERS:
        raise InvalidSpec(f"spec joins {len(names)} proposers; it may join at most {MAX_PROPOSERS}.")
    choices = tuple(_choice(part, text) for part in names)
    for choice in choices:  # after all names are known to be right: many proposers import torch
        read_options(choice)
    for choice in choices if inner else ():
        if needs_whole_draft(choice):
            raise InvalidSpec(f"spec={text!r}: {choice.name} needs its whole draft verified, so auto cannot choose it.")
    return Spec(choices, adaptive=inner is not None)


def needs_whole_draft(choice: ProposerChoice) -> bool:
    """Whether a proposer learns from its whole draft, so that nothing may be cut from it."""
    return bool(proposer_class(choice.name).wants_target_argmax)


def _choice(part: str, text: str) -> ProposerChoice:
    name, _, settings = part.partition(":")
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"spec={text!r} cannot be read; it must be {_SYNTAX}.")
    if name not in proposer_names():
        raise InvalidSpec(
            f"spec={text!r} names the proposer {name!r}; there are {', '.join(sorted(proposer_names()))}."
        )
    options: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        option, equals, value = setting.partition("=")
        if not equals or not _NAME.fullmatch(option) or not value:
            raise InvalidSpec(f"spec={text!r} has the option {setting!r}; options are written name=value.")
        if option in options:
            raise InvalidSpec(f"spec={text!r} gives the option {option!r} twice.")
        options[option] = value
    return ProposerChoice(name, options)
