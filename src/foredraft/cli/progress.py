"""Progress bars on stderr. They appear only on a terminal, leave nothing behind, and never touch stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.models import catalog

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STAGES = {"fetch": "Fetching the model", "load": "Loading the model"}


@contextmanager
def loading_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback `(stage, done, total)` that draws one bar per stage, or None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.filesize import decimal

    with _bars("{task.fields[amount]}") as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), amount="")
            amount = f"{decimal(done)} of {decimal(total)}" if stage == "fetch" else f"{done} of {total}"
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield show


def fetched(model: str) -> Path:
    """Where a model lies, fetched if need be; shows how that goes."""
    with loading_progress() as progress:
        return catalog.resolve(model, None if progress is None else lambda done, total: progress("fetch", done, total))


class CountingProgress:
    """One bar for many prompts; nothing at all without a terminal, or for a single one."""

    def __init__(self, what: str, total: int) -> None:
        self._bars = _bars("{task.completed} of {task.total}", disable=total < 2 or not sys.stderr.isatty())
        self._task = self._bars.add_task(what, total=total)

    def __enter__(self) -> CountingProgress:
        self.show()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def tick(self) -> None:
        self._bars.advance(self._task)

    def show(self) -> None:
        self._bars.start()

    def hide(self) -> None:
        """Make room, so that results can be printed where the bar was."""
        self._bars.stop()


def _bars(amount: str, disable: bool = False) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(amount),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # else rich would send results to stderr
        redirect_stderr=False,
        disable=disable,
    )
