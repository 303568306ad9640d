"""The kinds of trained heads: the only list of them. A new kind is a folder beside this file, and a line in the table.

All folders have the same files, as far as their kind has such a part. Names in brackets are what others look for there:

config.py   what a config.json of this kind may say, and which tensors the head has (RULES)
serve.py    the head as a backend runs it
propose.py  the proposer that drafts with it (PROPOSER)
module.py   the head as a torch module
train.py    what can be chosen when one is trained, and one at the start of its training (Options, build)
export.py   the head in the layout of another engine (layout)

A file here by one of these names holds what all kinds share of it. Serving never imports the last three.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidParameter

KINDS = {  # what config.json and specs call a kind: what `foredraft train` calls it
    "eagle": "eagle",
    "medusa": "medusa",
    "dflash": "dflash",
    "mtp": "mtp",
    "draft_model": "draft",
}
SHIPPED = Path(__file__).parent / "shipped"  # a folder per model of the catalogue, with a folder per kind


def shipped_kinds(model: str) -> tuple[str, ...]:
    """The kinds of head that come with Foredraft for a model of the catalogue, whether it is fetched or not."""
    return tuple(kind for kind in KINDS if (SHIPPED / model / kind).is_dir())


def trained_kind(name: str) -> str:
    """The kind that `foredraft train` calls so."""
    found = next((kind for kind, trained_as in KINDS.items() if trained_as == name), None)
    if found is None:
        raise InvalidParameter(f"{name!r} cannot be trained; use {', '.join(KINDS.values())}.")
    return found


def part(kind: str, name: str) -> Any:
    """A file of a kind's folder, imported when it is first needed."""
    return import_module(f"foredraft.heads.{kind}.{name}")
