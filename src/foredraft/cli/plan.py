"""`foredraft plan`: whether guessing pays, how much to guess, and when to turn it off, from figures or from a bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json
from foredraft.cli.plan_plot import draw
from foredraft.control.economics import Outlook, VerifyCurve
from foredraft.errors import InvalidParameter
from foredraft.models.catalog import DEFAULT_MODEL

SMALL_GAIN = 0.1  # below this the advice warns that the gain may not be worth it
BATCH_MAX = 256  # how far to look where nothing else is asked for
NUMERIC_COLUMNS = ("k", "tokens per run", "speed-up", "batch", "best k")
BAR_CELLS = 24
EIGHTHS = " ▏▎▍▌▋▊▉"


def plan(
    model: options.Model = DEFAULT_MODEL,  # every command takes it; figures that are given depend on none
    alpha: Annotated[float | None, typer.Option("--alpha", help="How likely a guess is accepted, from 0 to 1.")] = None,
    cost: Annotated[float | None, typer.Option("--cost", help="A drafted token's time, in plain steps.")] = None,
    k_max: Annotated[int, typer.Option("--k-max", min=1, max=1000, help="The longest draft to consider.")] = 16,
    verify_cost: Annotated[
        Path | None,
        typer.Option("--verify-cost", help='Seconds of a run by its rows: {"rows": [1, 2], "seconds": [0.01, 0.02]}.'),
    ] = None,
    batch_max: Annotated[
        int | None, typer.Option("--batch-max", min=1, max=4096, help=f"Look so far for a flip; else {BATCH_MAX}.")
    ] = None,
    results: Annotated[Path | None, typer.Option("--from", help="Advise from a results.json of bench instead.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw speed-up against k into FILE.png or .svg.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure acceptance and costs of --spec with --model on this machine.")
    ] = False,
    spec: options.Spec = "quantised",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Say whether guessing pays, which draft length is best, and at which batch size to turn it off."""
    if results is not None:
        if any(given is not None for given in (alpha, cost, verify_cost, batch_max, plot)):
            raise InvalidParameter("--from takes every figure from its file; give it without other figures or --plot.")
        answer = _advise_from_results(results)
    elif measure:
        if any(given is not None for given in (alpha, cost, verify_cost)):
            raise InvalidParameter("--measure finds --alpha, --cost and --verify-cost itself; give it without them.")
        answer = _advise(_measured(options.ModelOptions(model, spec, dtype, threads=threads), k_max, batch_max))
    elif alpha is None or cost is None:
        raise InvalidParameter("Give --alpha and --cost, or --measure, or --from with the results.json of a bench.")
    else:
        if batch_max is not None and verify_cost is None:
            raise InvalidParameter("--batch-max needs --verify-cost: only a measured cost tells how runs slow down.")
        curve = None if verify_cost is None else _read_curve(verify_cost)
        figures = Outlook.of(alpha, cost, k_max, curve, batch_max or BATCH_MAX)
        if plot is not None:
            draw(figures, plot)
        answer = _advise(figures)
    if as_json:
        print_json(answer.record)
    else:
        answer.print()


@dataclass(frozen=True)
class Table:
    """Cells as text. The rows in `chosen` are what is recommended."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answer:
    """What the command says: the object of `--json`, and tables and sentences for a person."""

    record: dict[str, Any]
    premise: str
    tables: list[Table]
    sentences: list[str]

    def print(self) -> None:
        live = sys.stdout.isatty()
        print(self.premise)
        for table in self.tables:
            (_print_rich if live else _print_plain)(table)
        if not live:
            print()
        for sentence in self.sentences:
            print(sentence)


def _measured(opened: options.ModelOptions, k_max: int, batch_max: int | None) -> Outlook:
    from foredraft.bench.plan_inputs import measured_inputs

    with opened.open() as llm:
        found = measured_inputs(llm, opened.spec)
    return Outlook.of(found.alpha, found.cost, k_max, found.curve, batch_max or BATCH_MAX)


def _advise(figures: Outlook) -> Answer:
    fastest = max(length.speedup for length in figures.table)
    rows = [
        (str(each.k), f"{each.expected_tokens:.2f}", f"{each.speedup:.2f}x", _bar(each.speedup, fastest))
        for each in figures.table
    ]
    tables = [Table(("k", "tokens per run", "speed-up", ""), rows, frozenset({figures.best.k}))]
    edge = figures.flip_batch or 0
    shown = [each for each in figures.batches if each.batch & (each.batch - 1) == 0 or each.batch in (edge - 1, edge)]
    if shown:
        batch_rows = [(str(each.batch), str(each.best_k), f"{each.speedup:.2f}x") for each in shown]
        tables.append(Table(("batch", "best k", "speed-up"), batch_rows))
    sentences = [*_length_advice(figures), *_batch_advice(figures)]
    record = {
        "best_k": figures.best.k,
        "speedup": figures.best.speedup,
        "expected_tokens": figures.best.expected_tokens,
        "break_even_alpha": figures.break_even_alpha,
        "break_even_cost": figures.break_even_cost,
        "flip_batch": figures.flip_batch,
        "table": [asdict(each) for each in figures.table],
        "batches": [asdict(each) for each in shown],
        "recommendation": " ".join(sentences),
    }
    verify = "one plain step at any size" if figures.curve is None else "what was measured"
    premise = (
        f"Acceptance {figures.alpha:g}; a drafted token costs {figures.cost:g} plain steps, a verify run {verify}."
    )
    return Answer(record, premise, tables, sentences)


def _length_advice(figures: Outlook) -> list[str]:
    best, least, most = figures.best, figures.break_even_alpha, figures.break_even_cost
    longest = figures.table[-1].k
    if best.k == 0:
        sentences = [f"Leave it off: no draft of up to {_tokens(longest)} is faster than plain decoding."]
        if least is None:
            sentences.append("At this cost it would not pay even if every guess were accepted.")
        else:
            sentences.append(f"At this cost it pays once more than {_percent(least)} of the guesses are accepted.")
        if most is not None:
            sentences.append(f"At this acceptance it pays once a drafted token costs less than {most:.3g} plain steps.")
        return sentences
    assert least is not None and most is not None, "a draft that pays has both"
    if best.speedup - 1 < SMALL_GAIN:
        sentences = [
            f"Guess {_tokens(best.k)} per run: it gains only {_percent(best.speedup - 1)}, so leave it off unless "
            f"these figures are certain: it loses when fewer than {_percent(least)} of the guesses are accepted."
        ]
    else:
        sentences = [
            f"Guess {_tokens(best.k)} per run: {best.speedup:.2f} times as fast as plain decoding.",
            f"At this cost it pays while more than {_percent(least)} of the guesses are accepted.",
            f"At this acceptance it pays while a drafted token costs less than {most:.3g} plain steps.",
        ]
    if best.k == longest:
        sentences.append("Longer drafts may gain more: try a larger --k-max.")
    return sentences


def _batch_advice(figures: Outlook) -> list[str]:
    if figures.curve is None:
        return []
    flip = figures.flip_batch
    again = next((each.batch for each in figures.batches if flip and each.batch > flip and each.best_k), None)
    if flip is None:
        sentences = [f"It still pays at {_requests(len(figures.batches))}, the largest batch considered."]
    elif flip > 1:
        sentences = [f"Turn it off above {_requests(flip - 1)}."]
    else:
        sentences = []
    if again is not None:
        sentences.append(f"At {_requests(again)} it pays again.")
    measured = figures.curve.rows[-1]
    if 2 * (again or flip or len(figures.batches)) > measured:  # the shortest draft makes two rows of each request
        sentences.append(f"Runs of more than {measured} rows were not measured; their cost is extrapolated.")
    return sentences


class Kind(NamedTuple):
    """What was decoded, and how."""

    category: str
    temperature: float | None
    dtype: str | None


@dataclass(frozen=True)
class Cell:
    """One figure of a bench: the rate of a speculation string in units of off."""

    kind: Kind
    batch: int
    spec: str
    ratio: float
    tokens_per_run: float | None
    same_text: bool


@dataclass(frozen=True)
class Choice:
    """What was best for one kind of text at one batch size; `fastest` is the best that is not off, where there is
    one."""

    kind: Kind
    batch: int
    best: Cell
    fastest: Cell | None

    @property
    def is_off(self) -> bool:
        return self.best.spec == "off"


def _advise_from_results(file: Path) -> Answer:
    """The best speculation string per kind of text and batch size, and where measured ratios fall to 1."""
    cells = _read_cells(file)
    if all(cell.spec == "off" for cell in cells):
        raise InvalidParameter(f"{file} compares nothing with off; bench with at least one --spec.")
    kinds = sorted(dict.fromkeys(cell.kind for cell in cells), key=lambda kind: kind.category != "all")
    names = {kind: _name(kind, kinds) for kind in kinds}
    choices = [choice for kind in kinds for choice in _choices(kind, cells)]
    flips = [(kind, *flip) for kind in kinds if (flip := _flip([each for each in choices if each.kind == kind]))]
    sentences = [_choice_advice(names[each.kind], each) for each in choices]
    for kind, pays, lost in flips:
        sentences.append(f"{names[kind]}: it pays at {_requests(pays)}, no longer at {lost}: turn it off above {pays}.")
    if lossy := dict.fromkeys(cell.spec for cell in cells if not cell.same_text):
        sentences.append(f"Left out where their texts were not those of off: {', '.join(lossy)}.")
    best = choices[0].best
    record = {
        "best_k": 0 if choices[0].is_off else None,  # a bench compares speculation strings, not lengths
        "best_spec": best.spec,
        "speedup": best.ratio,
        "expected_tokens": best.tokens_per_run,
        "break_even_alpha": None,
        "flip_batch": next((lost for kind, _, lost in flips if kind == best.kind), None),
        "table": [],
        "choices": [
            {**each.kind._asdict(), "batch": each.batch, "spec": each.best.spec, "ratio_to_off": each.best.ratio}
            for each in choices
        ],
        "flips": [{**kind._asdict(), "pays_at": pays, "flip_batch": lost} for kind, pays, lost in flips],
        "recommendation": " ".join(sentences),
    }
    rows = [(names[each.kind], str(each.batch), each.best.spec, f"{each.best.ratio:.2f}x") for each in choices]
    table = Table(("text", "batch", "best", "speed-up"), rows)
    return Answer(record, f"Measured in {file}, in units of plain decoding.", [table], sentences)


def _name(kind: Kind, kinds: Sequence[Kind]) -> str:
    """The category, with the temperature and the dtype where the file has several."""
    temperature = f", temperature {kind.temperature}" if len({each.temperature for each in kinds}) > 1 else ""
    dtype = f", {kind.dtype}" if len({each.dtype for each in kinds}) > 1 else ""
    return kind.category + temperature + dtype


def _choices(kind: Kind, cells: Sequence[Cell]) -> list[Choice]:
    """The best at each batch size, in growing order; what changed a text is never chosen."""
    choices = []
    for batch in sorted({cell.batch for cell in cells if cell.kind == kind}):
        usable = [cell for cell in cells if (cell.kind, cell.batch) == (kind, batch) and cell.same_text]
        off = next((cell for cell in usable if cell.spec == "off"), Cell(kind, batch, "off", 1.0, 1.0, True))
        fastest = max((cell for cell in usable if cell.spec != "off"), key=lambda cell: cell.ratio, default=None)
        choices.append(Choice(kind, batch, fastest if fastest and fastest.ratio > 1 else off, fastest))
    return choices


def _choice_advice(name: str, choice: Choice) -> str:
    where = f"{name}, {_requests(choice.batch)}"
    gain = choice.best.ratio - 1
    if choice.is_off:
        lost = choice.fastest
        return f"{where}: leave it off" + (f"; {lost.spec} has {lost.ratio:.2f} of its speed." if lost else ".")
    if gain < SMALL_GAIN:
        return f"{where}: {choice.best.spec} gains only {_percent(gain)}, so leave it off unless a longer bench agrees."
    return f"{where}: use {choice.best.spec}, {choice.best.ratio:.2f} times as fast as off."


def _flip(choices: Sequence[Choice]) -> tuple[int, int] | None:
    """The largest batch at which guessing paid and the next that was measured; None if it never or always paid."""
    paying = [place for place, choice in enumerate(choices) if not choice.is_off]
    if not paying or paying[-1] + 1 == len(choices):
        return None
    return choices[paying[-1]].batch, choices[paying[-1] + 1].batch


def _read_cells(file: Path) -> list[Cell]:
    cells = _read_object(file).get("cells")
    if not isinstance(cells, list) or not cells:
        raise InvalidParameter(f"{file} holds no cells; give the results.json that foredraft bench writes.")
    return [_cell(record, f"Cell {place} of {file}") for place, record in enumerate(cells)]


def _cell(record: Any, where: str) -> Cell:
    match record:
        case {"spec": str(spec), "category": str(category), "batch": int(batch), "ratio_to_off": ratio} if batch >= 1:
            speed = _positive(1.0 if spec == "off" else ratio)
            temperature, dtype = record.get("temperature"), record.get("dtype")
            if speed is not None and isinstance(temperature, int | float | None) and isinstance(dtype, str | None):
                tokens, same = _positive(record.get("tokens_per_run")), record.get("same_text") is not False
                return Cell(Kind(category, temperature, dtype), batch, spec, speed, tokens, same)
    raise InvalidParameter(f"{where} must have spec, category, batch and a ratio_to_off above 0; bench again.")


def _read_curve(file: Path) -> VerifyCurve:
    """The verify cost in a file of its own, or in the results of a bench."""
    record = _read_object(file)
    match record.get("verify_cost", record):
        case {"rows": list(rows), "seconds": list(seconds)}:
            times = [time for time in map(_positive, seconds) if time is not None]
            if all(type(count) is int and count < 2**31 for count in rows) and len(times) == len(seconds):
                return VerifyCurve(tuple(rows), tuple(times))
    raise InvalidParameter(f'{file} must hold {{"rows": [1, …], "seconds": […]}}: row counts, and times above 0.')


def _read_object(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{file} is not JSON.") from error
    if not isinstance(record, dict):
        raise InvalidParameter(f"{file} must hold a JSON object.")
    return record


def _positive(value: Any) -> float | None:
    """A number that arithmetic can bear, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 1e-9 <= value <= 1e9 else None


def _print_rich(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for header in table.headers:
        shown.add_column(header, justify="right" if header in NUMERIC_COLUMNS else "left")
    for place, row in enumerate(table.rows):
        shown.add_row(*map(Text, row), style="bold green" if place in table.chosen else None)
    Console().print(shown)


def _print_plain(table: Table) -> None:
    widths = [max(map(len, column)) for column in zip(table.headers, *table.rows)]
    print()
    for row in (table.headers, *table.rows):
        cells = zip(row, table.headers, widths)
        print("  ".join(c.rjust(w) if h in NUMERIC_COLUMNS else c.ljust(w) for c, h, w in cells).rstrip())


def _bar(value: float, largest: float) -> str:
    eighths = round(8 * BAR_CELLS * value / largest)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def _tokens(count: int) -> str:
    return f"{count} token" + ("s" if count != 1 else "")


def _requests(count: int) -> str:
    return f"{count} concurrent request" + ("s" if count != 1 else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
