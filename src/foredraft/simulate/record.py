"""When every request of a simulation got its first and its last token."""

from __future__ import annotations

from array import array
from math import nan


class Record:
    """Times in seconds, by the request's index; NaN for what never happened."""

    def __init__(self, count: int) -> None:
        self.first_s = array("d", [nan]) * count
        self.done_s = array("d", [nan]) * count
