"""Progress bars on stderr. They appear only on a terminal and only for what takes long, leave nothing behind, and never
touch stdout."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.models import catalog

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0  # what is done sooner needs no bar: it would only flash
STAGES = {
    "start": "Starting",
    "fetch": "Fetching the model",
    "load": "Loading the model",
    "check": "Checking that kernels are exact",
    "measure": "Measuring this machine",
}


@contextmanager
def loading_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback `(stage, done, total)` that draws a bar, or None where nobody would see it. 0 is an unknown total."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.filesize import decimal

    bars = _bars("{task.fields[amount]}")
    task = bars.add_task(STAGES["start"], total=None, amount="")

    def show(stage: str, done: int, total: int) -> None:
        amount = f"{decimal(done)} of {decimal(total)}" if stage == "fetch" else f"{done} of {total}"
        bars.update(
            task, description=STAGES.get(stage, stage), completed=done, amount=amount if total else "", refresh=False
        )
        bars.tasks[0].total = total or None  # `update` takes None as "as it is"

    shown = _Later(bars)
    shown.start()
    try:
        yield show
    finally:
        shown.stop()


def fetched(model: str) -> Path:
    """Where a model lies, fetched if need be; shows how that goes."""
    with loading_progress() as progress:
        return catalog.resolve(model, None if progress is None else lambda done, total: progress("fetch", done, total))


class CountingProgress:
    """One bar for many prompts; nothing at all without a terminal, or for a single one."""

    def __init__(self, what: str, total: int) -> None:
        self._bars = _bars("{task.completed} of {task.total}", disable=total < 2 or not sys.stderr.isatty())
        self._task = self._bars.add_task(what, total=total)
        self._shown = _Later(self._bars)

    def __enter__(self) -> CountingProgress:
        self.show()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def tick(self) -> None:
        self._bars.advance(self._task)

    def show(self) -> None:
        self._shown.start()

    def hide(self) -> None:
        """Make room, so that results can be printed where the bar was."""
        self._shown.stop()


class _Later:
    """Bars that are drawn once their work has taken PATIENCE_S, whatever its thread does meanwhile."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._due_s = time.monotonic() + PATIENCE_S
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        if self._bars.disable:
            return
        self._timer = threading.Timer(max(0.0, self._due_s - time.monotonic()), self._bars.start)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
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
