"""The kinds of trained heads: the only list of them. A new kind is a folder beside this file, and a line in the table.

All folders have the same files, as far as their kind has such a part. What the rest of the program takes from each:

config.py   RULES: what a config.json of this kind may say, and the tensors that belong to it
serve.py    the head as a backend runs it
propose.py  PROPOSER: the proposer that drafts with it
module.py   MODULE: the head as a torch module, for training
train.py    Options: what can be chosen when one is trained; build(): one at the start of its training
export.py   layout(): the head in the layout of another engine

A file here by one of these names holds what all kinds share of it. Serving never imports training.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

KINDS = {  # what config.json and specs call a kind: what `foredraft train` calls it
    "eagle": "eagle",
    "medusa": "medusa",
    "dflash": "dflash",
    "draft_model": "draft",
}


def part(kind: str, name: str) -> Any:
    """A file of a kind's folder, imported when it is first needed."""
    return import_module(f"foredraft.heads.{kind}.{name}")
