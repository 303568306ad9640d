"""What an audit finds: one check per claim, each with the figures that it rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tick = Callable[[], None]  # called after each piece of work, for a progress bar


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and what was seen."""

    name: str
    passed: bool
    detail: str
