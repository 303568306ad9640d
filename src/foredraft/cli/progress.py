"""Progress bars on stderr. They appear only on a terminal and only for what takes long, leave nothing behind, and never
touch stdout."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from foredraft.models import catalog

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

PATIENCE_S = 1.0  # what is done sooner needs no bar: it would only flash
PROMPT = "Reading the prompt"
MEASURING = "Measuring this machine"
STAGES = {
    "start": "Starting",
    "fetch": "Fetching the model",
    "load": "Loading the model",
    "check": "Checking that kernels are exact",
    "measure": MEASURING,
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
    """One bar for work in many parts; nothing at all without a terminal, or for a single part. A total of None is told
    later, with `to`."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._bars: Progress | None = None
        if not sys.stderr.isatty() or (total is not None and total < 2):
            return
        self._bars = _bars("{task.completed} of {task.total}" if total else "{task.fields[amount]}")
        self._task = self._bars.add_task(what, total=total, amount="")
        self._shown = _Later(self._bars)

    def __enter__(self) -> CountingProgress:
        if self._bars is not None:
            self._shown.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def tick(self) -> None:
        if self._bars is not None:
            self._bars.advance(self._task)

    def to(self, done: int, total: int) -> None:
        """So much is done of what turned out to be so much."""
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=total, amount=f"{done} of {total}", refresh=False)

    def hide(self) -> None:
        """End the bar, for good."""
        if self._bars is not None:
            self._shown.stop()
            self._bars = None

    def print(self, text: str, file: TextIO | None = None) -> None:
        """Print a line, above the bar where both are on a terminal: the bar itself stays."""
        file = sys.stdout if file is None else file
        if self._bars is not None and file.isatty():
            self._bars.console.out(text, highlight=False)
        else:
            print(text, file=file, flush=True)


def until_first(what: str, stream: Callable[[Callable[[int, int], None]], Iterator[T]]) -> Generator[T, None, None]:
    """What a stream gives, with a bar until the first of it comes. `stream` is called with `progress(done, total)`."""
    with CountingProgress(what) as progress:
        for each in stream(progress.to):
            progress.hide()
            yield each


class _Later:
    """Bars that are drawn once their work has taken PATIENCE_S, whatever its thread does meanwhile."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._timer = threading.Timer(PATIENCE_S, bars.start)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bars.stop()


def _bars(amount: str) -> Progress:
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
    )
