"""Proposers that a program registers while it runs."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest

import foredraft
from foredraft.errors import InvalidSpec
from foredraft.proposers import registry
from foredraft.proposers.base import Proposer


@dataclass(frozen=True)
class Options:
    k: int = 3


@pytest.fixture(autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


def proposer(**attributes: Any) -> type[Proposer]:
    return type("Mine", (Proposer,), {"name": "mine", "Options": Options, **attributes})


def test_specs_may_name_it() -> None:
    with pytest.raises(InvalidSpec, match="'mine'"):
        registry.parse_spec("mine")
    mine = proposer()
    assert foredraft.register_proposer(mine) is mine, "it is a decorator too"
    assert "mine" in registry.proposer_names()
    assert str(registry.parse_spec("ngram+mine:k=5").choices[1]) == "mine:k=5"
    assert registry.proposer_class("mine") is mine
    with pytest.raises(InvalidSpec, match="mine has no option 'm'; it has k"):
        registry.parse_spec("mine:m=1")


def test_the_last_one_counts() -> None:
    foredraft.register_proposer(proposer())
    second = foredraft.register_proposer(proposer())
    assert registry.proposer_class("mine") is second and registry.proposer_names().count("mine") == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (3, "3 is no proposer; give a class that inherits"),
        (int, "is no proposer"),
        (proposer(name="ngram"), "There is a proposer 'ngram' already; give Mine another `name`."),
        (proposer(name="auto"), "Mine has the name 'auto'; set its `name` to"),
        (proposer(name="Mine!"), "Mine has the name 'Mine!'"),
        (proposer(Options=None), "Mine needs `Options`, a dataclass"),
        (proposer(Options=make_dataclass("Bare", [("k", int)])), "Mine needs `Options`, a dataclass"),
        (proposer(Options=make_dataclass("Flags", [("on", bool, True)])), "numbers or texts as defaults"),
    ],
)
def test_what_is_refused(wrong: Any, sentence: str) -> None:
    with pytest.raises(InvalidSpec, match=sentence):
        foredraft.register_proposer(wrong)
    assert not registry._REGISTERED
