"""The prompts of a benchmark: six kinds that come with it, or a file in Spec-Bench's format.

The built-in prompts, in `suite.jsonl`, were written for this project. All are distinct, because a proposer that
remembers finished texts profits from a prompt that it meets again, and they are short enough for a small model. Those
of the kind `code-editing` are code and a small change to it, after which all of it is to be printed again.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.reports.prompts import Question, read_suite, spread

BUILT_IN_NAME = "builtin"


def built_in() -> list[Question]:
    """All prompts that come with the benchmark, kind by kind."""
    return read_suite(Path(__file__).with_name("suite.jsonl"))


def load_suite(name: str, limit: int | None = None) -> list[Question]:
    """The questions of `builtin` or of a file, one of each kind after the other; at most `limit`, evenly over the
    kinds."""
    questions = built_in() if name == BUILT_IN_NAME else read_suite(Path(name))
    return spread(questions, len(questions) if limit is None else limit)
