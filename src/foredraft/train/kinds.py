"""From `dflash:layers=3` to a student: which kinds can be trained, and how their options are written."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import InvalidParameter
from foredraft.heads.base import HeadConfig
from foredraft.heads.kinds import part, trained_kind
from foredraft.models.fields import shown
from foredraft.models.tokenizer import Tokenizer
from foredraft.train.features import FrozenTarget
from foredraft.train.student import Start, Student


@dataclass(frozen=True)
class KindChoice:
    """A kind of student with its options, as the command line names it."""

    text: str
    name: str
    options: Any  # of the kind's train.py

    @property
    def folder(self) -> str:
        """A name that a file may have."""
        return re.sub(r"[^\w]+", "-", self.text)


def parse_kind(text: str) -> KindChoice:
    """`eagle`, or `dflash:layers=3,correction=markov`."""
    name, _, listed = text.partition(":")
    options = part(trained_kind(name), "train").Options
    known = {each.name: each.metadata for each in fields(options)}
    values: dict[str, int | str] = {}
    for item in filter(None, listed.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise InvalidParameter(f"{name} has no option {key!r}; it has {', '.join(known)}.")
        if choices := known[key].get("choices"):
            if value not in choices:
                raise InvalidParameter(f"{name}: {key}={value!r} is not known; use {', '.join(choices)}.")
            values[key] = value
            continue
        most: int = known[key]["most"]
        if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= most:
            raise InvalidParameter(f"{name}: {key}={shown(value)} must be a whole number from 1 to {most}.")
        values[key] = int(value)
    return KindChoice(text, name, options(**values))


def build_student(
    kind: KindChoice,
    target: FrozenTarget,
    token_ids: Tensor,
    frequencies: Tensor,
    tokenizer: Tokenizer,
    name: str,
    digest: str,
    seed: int,
) -> Student:
    """A student at the start of its training. `token_ids` [draft_vocab] come in the text with these `frequencies`;
    `name` and `digest` are the target's."""
    torch.manual_seed(seed)
    shape = HeadConfig.of_sizes(
        target.config,
        target.config,
        num_layers=1,
        kind="eagle",
        target_name=name,
        target_digest=digest,
        taps=(target.config.num_layers,),
        draft_vocab_size=len(token_ids),
        block=1,
    )
    start = Start(kind.folder, shape, target, token_ids, frequencies, tokenizer)
    student: Student = part(trained_kind(kind.name), "train").build(kind.options, start)
    return student
