"""`foredraft demo`: the first run. Fetches the default model, decodes a few prompts at once, live, and prints a table.

A lane is one way to decode all prompts, and the display has one column per lane: another way beside it is another lane.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli import options
from foredraft.cli.output import answer_record, print_json, say, tokens_per_second
from foredraft.models.catalog import DEFAULT_MODEL
from foredraft.params import SamplingParams
from foredraft.types import CompletionOutput

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from foredraft.llm import LLM

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that reverses a linked list.",
    "List five animals that live in the Arctic.",
    "Write a short poem about the sea at night.",
    "How do I make a simple tomato soup?",
)


def demo(
    model: options.Model = DEFAULT_MODEL,
    spec: options.Spec = "auto",
    max_tokens: options.MaxTokens = 96,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = True,
    as_json: options.Json = False,
) -> None:
    """Fetch the default model and decode a few prompts at once, live."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    live = sys.stdout.isatty() and not as_json
    if not sys.stderr.isatty():
        say(f"Fetching and loading {model}; the first time takes a while.")
    with options.ModelOptions(model, spec, dtype, device, threads, exact).open() as llm:
        title = f"{model} ({llm.dtype}, {llm.backend_name})"
        lanes = [Lane(title, spec, [Answer(prompt) for prompt in PROMPTS])]
        with _live_display(lanes) if live else nullcontext():
            for lane in lanes:
                for index in lane.decode(llm, params):
                    if not live and not as_json:
                        _print_answer(index, lane.answers[index])
    for lane in lanes:
        if as_json:
            _print_json(lane)
        else:
            _print_table(lane)
    if any(answer.finished.error for lane in lanes for answer in lane.answers):
        raise typer.Exit(1)


@dataclass
class Answer:
    """One prompt of a lane, and its text as far as it has come."""

    prompt: str
    text: str = ""
    tokens: int = 0
    output: CompletionOutput | None = None

    @property
    def finished(self) -> CompletionOutput:
        assert self.output is not None, "asked for before its stream had ended"
        return self.output


@dataclass
class Lane:
    """One way to decode all prompts: the speculation string is what makes it differ from another lane."""

    title: str
    spec: str
    answers: list[Answer]
    started: float = 0.0
    seconds: float = 0.0  # from the start to the latest token

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def decode(self, llm: LLM, params: SamplingParams) -> Iterator[int]:
        """Decodes all prompts at once, keeping the answers up to date; yields the index of each that is finished."""
        conversations = [[{"role": "user", "content": answer.prompt}] for answer in self.answers]
        self.started = time.perf_counter()
        for event in llm.stream_many(conversations, params, spec=self.spec):
            self.seconds = time.perf_counter() - self.started
            answer = self.answers[int(event.request_id)]
            answer.text += event.text
            answer.tokens += event.token_id is not None
            if event.output is not None:
                answer.output = event.output
                yield int(event.request_id)


def _live_display(lanes: list[Lane]) -> AbstractContextManager[Any]:
    from rich.live import Live

    return Live(get_renderable=lambda: _Screen(lanes), refresh_per_second=8)


@dataclass
class _Screen:
    """The live picture: a row of panels per prompt, a column per lane, and the rate of each lane below."""

    lanes: list[Lane]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        rows = len(self.lanes[0].answers)
        width = options.max_width // len(self.lanes)
        height = max(3, (console.height - 2) // rows)
        grid = Table.grid(expand=True)
        for _ in self.lanes:
            grid.add_column(ratio=1)
        for row in range(rows):
            grid.add_row(*(_panel(console, lane.answers[row], width, height) for lane in self.lanes))
        grid.add_row(*(Text(f" {lane.tokens_per_s:.1f} tokens/s  {lane.title}", style="bold") for lane in self.lanes))
        yield grid


def _panel(console: Console, answer: Answer, width: int, height: int) -> Any:
    """The prompt as the title, and as much of the end of its text as fits."""
    from rich.panel import Panel
    from rich.text import Text

    lines = Text(answer.text.strip()).wrap(console, max(1, width - 4))
    border = "green" if answer.output else "dim"
    tail = Text("\n").join(lines[-(height - 2) :])
    return Panel(tail, title=Text(answer.prompt), title_align="left", border_style=border, height=height)


def _print_answer(index: int, answer: Answer) -> None:
    print(f"[{index + 1}] {answer.prompt}\n{answer.text.strip()}\n", flush=True)


def _print_table(lane: Lane) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table: Table = Table(box=SIMPLE_HEAD, show_footer=True)
    table.add_column("prompt", f"all at once, {lane.seconds:.1f} s")
    table.add_column("tokens", str(lane.tokens), justify="right")
    table.add_column("tok/s", f"{lane.tokens_per_s:.1f}", justify="right")
    table.add_column("first token", justify="right")
    for answer in lane.answers:
        metrics = answer.finished.metrics
        first = f"{metrics.time_to_first_token_s * 1000:.0f} ms"
        table.add_row(answer.prompt, str(metrics.emitted_tokens), f"{tokens_per_second(metrics):.1f}", first)
    Console().print(table)


def _print_json(lane: Lane) -> None:
    for index, answer in enumerate(lane.answers):
        print_json({"spec": lane.spec, "prompt": answer.prompt, **answer_record(index, [answer.finished])})
    total = {"tokens": lane.tokens, "seconds": lane.seconds, "tokens_per_s": lane.tokens_per_s}
    print_json({"spec": lane.spec, "total": total})
