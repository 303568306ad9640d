"""`foredraft demo`: the first run. Fetches the default model and decodes a few prompts plain and speculatively, live.

Nothing flatters speculation: a prompt is decoded speculatively before it is decoded plain, so that no proposer has seen
its answer; the prefix cache is off; and rates are over the whole request, its prompt included. What is done once, as
loading and measuring the machine, is done before the clock starts.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli import options
from foredraft.cli.output import colour_of, decisions, print_json, say
from foredraft.control.economics import quotient
from foredraft.control.reasons import DRAFTED, PROBE
from foredraft.heads.kinds import KINDS
from foredraft.outputs import CompletionOutput
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec
from foredraft.types import TARGET

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.panel import Panel
    from rich.text import Text

    from foredraft.llm import LLM

# By a short title. The first two ask for what can be copied from the prompt, the others are open chat, where only a
# trained head can draft.
PROMPTS = {
    "rename in code": '''\
```python
def f(width, height):
    """The area of a rectangle, which has a width and a height."""
    if width < 0 or height < 0:
        raise ValueError("The width and the height of a rectangle cannot be negative.")
    return width * height
```

Rename the function `f` to `rectangle_area`. Print the whole code.''',
    "correct a passage": """\
Repeat this text and correct the spelling of one word:

The lighthouse stands on a small island in the north. Every evening the keeper climbs the stairs and lights the lamp. \
The ships can see the ligth from far away, and the sailors know that they are close to home.""",
    "explain the sky": "Explain in three sentences why the sky is blue.",
    "cook a soup": "How do I make a simple tomato soup?",
}


@options.opens_model("spec", "dtype", "activations", "device", "threads", "head", "exact")
def demo(
    opening: options.Opening,
    max_tokens: options.MaxTokens = 96,
    as_json: options.Json = False,
) -> None:
    """Fetch the default model and decode a few prompts plain and speculatively, side by side."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    live = sys.stdout.isatty() and not as_json
    wanted = opening(prefix_caching=False)
    if not sys.stderr.isatty():
        say(f"Fetching and loading {wanted.model}; the first time takes a while.")
    comparisons = [
        Comparison(title, prompt, Decoding("off"), Decoding(wanted.spec)) for title, prompt in PROMPTS.items()
    ]
    with wanted.open() as llm:
        _warm_up(llm, wanted.spec)
        for comparison in comparisons:
            with _Picture(comparison).live() if live else nullcontext():
                # Speculatively first: proposers learn from every finished text, and would then know this one by heart.
                for decoding in (comparison.speculative, comparison.plain):
                    decoding.run(llm, comparison.prompt, params)
            if as_json:
                print_json(_record(comparison))
            elif not live:
                _print_texts(comparison)
    if as_json:
        print_json({"total": asdict(Summary.of(*comparisons))})
    else:
        _print_table(comparisons)
    failures = [failure for comparison in comparisons for failure in comparison.failures()]
    for failure in failures:
        say(failure)
    if failures:
        raise typer.Exit(1)


@dataclass
class Decoding:
    """One output so far, in pieces with the name of the proposer that drafted each."""

    spec: str
    pieces: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0  # from the start to the latest token
    output: CompletionOutput | None = None

    @property
    def finished(self) -> CompletionOutput:
        assert self.output is not None, "the stream has not ended yet"
        return self.output

    def run(self, llm: LLM, prompt: str, params: SamplingParams) -> None:
        started = time.perf_counter()
        for event in llm.stream([{"role": "user", "content": prompt}], params, spec=self.spec):
            self.seconds = time.perf_counter() - started
            self.pieces.append((event.text, event.origin))
            self.output = event.output or self.output


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded plain and speculatively."""

    title: str
    prompt: str
    plain: Decoding
    speculative: Decoding

    @property
    def same_text(self) -> bool:
        return self.plain.finished.token_ids == self.speculative.finished.token_ids

    def failures(self) -> list[str]:
        sides = {"plain": self.plain.finished, "speculative": self.speculative.finished}
        errors = [f"{self.title}, {side}: {output.error}" for side, output in sides.items() if output.error]
        return errors if self.same_text else [*errors, f"{self.title}: the texts differ."]


def _warm_up(llm: LLM, spec: str) -> None:
    """First runs are the slowest and must not count, and the first request that leaves the choice to the controller
    measures the machine. What proposers learn from this one word is no part of any answer."""
    from rich.console import Console

    params = SamplingParams(max_tokens=8, temperature=0.0)
    moving = Console(stderr=True).status("Measuring the cost of runs on this machine")
    with moving if sys.stderr.isatty() else nullcontext():
        for each in dict.fromkeys(("off", spec)):
            for _ in llm.stream("Hello", params, spec=each):
                pass


@dataclass(frozen=True)
class Summary:
    """What one prompt, or several taken as one, gained. Rates are over whole requests."""

    same_text: bool
    tokens_per_run: float
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float  # how many times as long the plain decoding took

    @classmethod
    def of(cls, *comparisons: Comparison) -> Summary:
        plain = [comparison.plain.finished.metrics for comparison in comparisons]
        speculative = [comparison.speculative.finished.metrics for comparison in comparisons]
        plain_s, speculative_s = (sum(each.total_time_s for each in side) for side in (plain, speculative))
        plain_tokens, tokens = (sum(each.emitted_tokens for each in side) for side in (plain, speculative))
        return cls(
            same_text=all(comparison.same_text for comparison in comparisons),
            tokens_per_run=quotient(tokens, sum(each.target_runs for each in speculative)),
            plain_tokens_per_s=quotient(plain_tokens, plain_s),
            speculative_tokens_per_s=quotient(tokens, speculative_s),
            speedup=quotient(plain_s, speculative_s),
        )

    def cells(self, title: str) -> tuple[str, ...]:
        same_text = "yes" if self.same_text else "NO"
        rates = f"{self.plain_tokens_per_s:.1f}", f"{self.speculative_tokens_per_s:.1f}"
        return title, same_text, f"{self.tokens_per_run:.2f}", *rates, f"{self.speedup:.2f}x"


def _record(comparison: Comparison) -> dict[str, Any]:
    return {
        "prompt": comparison.prompt,
        "same_text": comparison.same_text,
        "plain": asdict(comparison.plain.finished.metrics),
        "speculative": asdict(comparison.speculative.finished.metrics),
        "speedup": Summary.of(comparison).speedup,
    }


def _print_texts(comparison: Comparison) -> None:
    """The prompt's text, or both where they differ."""
    print(f"[{comparison.title}]\n{comparison.plain.finished.text.strip()}\n", flush=True)
    if not comparison.same_text:
        print(f"[{comparison.title}, speculative]\n{comparison.speculative.finished.text.strip()}\n", flush=True)


def _print_table(comparisons: list[Comparison]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    headers = ("prompt", "same\ntext?", "tokens\nper run", "plain\ntok/s", "speculative\ntok/s", "speed-up")
    totals = Summary.of(*comparisons).cells("all")
    table = Table(box=SIMPLE_HEAD, show_footer=True)
    for header, total in zip(headers, totals, strict=True):
        table.add_column(header, total, justify="left" if header == "prompt" else "right")
    for comparison in comparisons:
        table.add_row(*Summary.of(comparison).cells(comparison.title))
    Console().print(table)
    for comparison in comparisons:
        metrics = comparison.speculative.finished.metrics
        if metrics.decisions:
            print(f"{comparison.title}, step by step: {decisions(metrics)}")
    if sentence := head_sentence([comparison.speculative for comparison in comparisons]):
        print(sentence)


def head_sentence(decodings: list[Decoding]) -> str:
    """What the model's trained head did, where the controller decided about one; empty where nobody asked it to."""
    metrics = [decoding.finished.metrics for decoding in decodings]
    decided = sum((Counter(each.decisions) for each in metrics), Counter[str]())
    for kind in KINDS:
        steps = sum(count for why, count in decided.items() if why.startswith(f"{kind}: "))
        if steps:
            share = (decided[f"{kind}: {DRAFTED}"] + decided[f"{kind}: {PROBE}"]) / steps
            own = sum(each.by_origin.get(kind, 0) for each in metrics)
            if not own:
                return (
                    f"The trained head ({kind}) was left out: on this machine its drafts take more time than they save."
                )
            did = f"The trained head ({kind}) drafted in {share:.0%} of the steps, and {own} of all tokens are its."
            return did if share > 0.95 else f"{did} In the other steps it would have taken more time than it saves."
    if any(parse_spec(decoding.spec).with_head for decoding in decodings):
        return "No trained head took part: this model has none, or none would pay on this machine."
    return ""


@dataclass
class _Picture:
    """Both texts of a prompt side by side, as far as they have come, over a legend of the proposers."""

    comparison: Comparison

    def live(self) -> AbstractContextManager[Any]:
        from rich.live import Live

        return Live(get_renderable=lambda: self, refresh_per_second=8)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(expand=True)
        for _ in range(2):
            grid.add_column(ratio=1)
        width, height = options.max_width // 2, max(3, console.height - 3)
        grid.add_row(
            _panel(console, "plain", self.comparison.plain, width, height),
            _panel(console, "speculative", self.comparison.speculative, width, height),
        )
        yield Text(self.comparison.title, style="bold")
        yield grid
        yield _legend(self.comparison.speculative)


def _panel(console: Console, title: str, decoding: Decoding, width: int, height: int) -> Panel:
    """As much of the end of a text as fits, in the colours of its proposers, and its rate."""
    from rich.panel import Panel
    from rich.text import Text

    text = Text.assemble(*((piece, _style(origin)) for piece, origin in decoding.pieces))
    lines = text.wrap(console, max(1, width - 4))
    rate = f"{len(decoding.pieces)} tokens, {quotient(len(decoding.pieces), decoding.seconds):.1f} tok/s"
    border = "bold" if decoding.output else "dim"
    tail = Text("\n").join(lines[-(height - 2) :])
    return Panel(tail, title=title, subtitle=rate, title_align="left", subtitle_align="left", border_style=border)


def _legend(decoding: Decoding) -> Text:
    """The proposers that a speculation string names, and those that have drafted, in their colours."""
    from rich.text import Text

    named = [choice.name for choice in parse_spec(decoding.spec).choices]
    names = dict.fromkeys([*named, *(origin for _, origin in decoding.pieces if origin != TARGET)])
    proposers = Text(", ").join(Text(name, style=_style(name)) for name in names)
    return Text.assemble("drafted by ", proposers) if names else Text("plain decoding: no drafts")


def _style(origin: str) -> str:
    colour = colour_of(origin)
    return "" if colour is None else f"color({colour})"
