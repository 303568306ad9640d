"""What a grammar is to the rest of the engine: masks along the paths of a draft. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Protocol


class Constraint(Protocol):
    """What a request's grammar, or its `min_tokens`, allows its output to be. A path is the tokens behind
    those that were accepted."""

    @property
    def num_accepted(self) -> int:
        """Output tokens."""

    @property
    def error(self) -> str | None:
        """Why nothing more can be allowed."""

    def mask(self, path: Items[int]) -> Any:
        """Which tokens may follow a path: a bool tensor [vocab], with one at least unless there is an error."""

    def accept(self, tokens: Items[int]) -> None:
        """Tokens were committed."""

    def num_valid(self, path: Items[int]) -> int:
        """How many leading tokens of a path are allowed."""

    def forced(self, path: Items[int]) -> list[int]:
        """The tokens that must follow a path; often none."""

    def is_complete(self, path: Items[int]) -> bool:
        """Whether nothing more may be written after a path."""
