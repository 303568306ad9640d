"""What the cells of a benchmark say to a person: the best setting per kind of text and batch size, and where measured
ratios fall below 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.bench.cells import ALL, Cell
from foredraft.bench.measure import OFF
from foredraft.control.economics import VerifyCurve
from foredraft.errors import InvalidParameter
from foredraft.plan.inputs import PlanInputs, drafted_per_run, explained_ratio, inputs_of
from foredraft.plan.words import SMALL_GAIN, percent, requests
from foredraft.reports.answer import Table

_EXPLAINED = 0.05  # so far from what was measured, figures still explain it


class Kind(NamedTuple):
    """What was decoded, and how."""

    category: str
    temperature: float
    dtype: str

    @classmethod
    def of(cls, cell: Cell) -> Kind:
        return cls(cell.category, cell.temperature, cell.dtype)


@dataclass(frozen=True)
class Choice:
    """All settings for one kind of text at one batch size, of which one is to be chosen."""

    kind: Kind
    batch: int
    cells: list[Cell]

    @property
    def usable(self) -> list[Cell]:
        """What drafts; what changed a text is never chosen."""
        return [cell for cell in self.cells if cell.same_text and cell.spec != OFF]

    @property
    def fastest(self) -> Cell | None:
        return max(self.usable, key=lambda cell: cell.ratio_to_off, default=None)

    @property
    def best(self) -> Cell | None:
        """None for plain decoding."""
        return self.fastest if self.fastest and self.fastest.ratio_to_off > 1 else None

    @property
    def record(self) -> dict[str, Any]:
        spec, ratio = (self.best.spec, self.best.ratio_to_off) if self.best else (OFF, 1.0)
        return {**self.kind._asdict(), "batch": self.batch, "spec": spec, "ratio_to_off": ratio}


@dataclass(frozen=True)
class Comparison:
    """What was measured, in words, and what lengths and break-evens can be computed from: the figures of `spec`."""

    spec: str
    inputs: PlanInputs
    measured: str  # what those figures were measured at, and whether they explain it
    is_off_best: bool
    several_batches: bool
    premise: str
    table: Table
    sentences: list[str]
    record: dict[str, Any]


def compare(cells: Sequence[Cell], curve: VerifyCurve | None, file: Path) -> Comparison:
    """The best speculation string per kind of text and batch size. Looked at more closely is the first kind, all texts
    together where there is that, at its smallest batch: the fastest there whose lengths are its own, not auto's."""
    kinds = sorted(dict.fromkeys(map(Kind.of, cells)), key=lambda kind: kind.category != ALL)
    ordered = sorted(cells, key=lambda cell: (kinds.index(Kind.of(cell)), cell.batch))
    alike = groupby(ordered, key=lambda cell: (Kind.of(cell), cell.batch))
    choices = [Choice(kind, batch, list(found)) for (kind, batch), found in alike]
    first = next((choice for choice in choices if choice.fastest), None)
    if first is None:
        raise InvalidParameter(f"{file} has no setting beside off that kept its texts; bench with at least one --spec.")
    closely = max(first.usable, key=lambda cell: (not cell.spec.startswith("auto"), cell.ratio_to_off))
    plain = next((cell for cell in first.cells if cell.spec == OFF), None)
    inputs = inputs_of(closely, plain, curve)
    names = {kind: _name(kind, kinds) for kind in kinds}
    flips = [(kind, *flip) for kind in kinds if (flip := _flip([each for each in choices if each.kind == kind]))]
    sentences = [_advice(names[each.kind], each) for each in choices]
    for kind, pays, lost in flips:
        sentences.append(f"{names[kind]}: it pays at {requests(pays)}, no longer at {lost}: turn it off above {pays}.")
    if lossy := dict.fromkeys(cell.spec for cell in cells if not cell.same_text):
        sentences.append(f"Left out where their texts were not those of off: {', '.join(lossy)}.")
    records = [each.record for each in choices]
    rows = [
        (names[each.kind], str(each.batch), record["spec"], f"{record['ratio_to_off']:.2f}x")
        for each, record in zip(choices, records, strict=True)
    ]
    return Comparison(
        spec=closely.spec,
        inputs=inputs,
        measured=_measured(closely, inputs),
        is_off_best=first.best is None,
        several_batches=len({each.batch for each in choices if each.kind == first.kind}) > 1,
        premise=f"Measured in {file}, in units of plain decoding.",
        table=Table(("text", "batch", "best", "speed-up"), rows),
        sentences=sentences,
        record={
            "best_spec": first.record["spec"],
            "choices": records,
            "flips": [{**kind._asdict(), "pays_at": pays, "flip_batch": lost} for kind, pays, lost in flips],
        },
    )


def _name(kind: Kind, kinds: Sequence[Kind]) -> str:
    """The category, with the temperature and the dtype where the file has several."""
    temperature = f", temperature {kind.temperature}" if len({each.temperature for each in kinds}) > 1 else ""
    dtype = f", {kind.dtype}" if len({each.dtype for each in kinds}) > 1 else ""
    return kind.category + temperature + dtype


def _measured(cell: Cell, found: PlanInputs) -> str:
    drafted, explained = drafted_per_run(cell), explained_ratio(found, cell)
    mean = f" with {drafted:.1f} draft tokens per run" if drafted else ""
    told = f"{cell.spec} was measured at {cell.ratio_to_off:.2f}{mean}."
    if abs(explained / cell.ratio_to_off - 1) <= _EXPLAINED:
        return f"{told} By its acceptance and its cost:"
    return f"{told} Its figures explain only {explained:.2f}, so rely on no length before you bench it:"


def _advice(name: str, choice: Choice) -> str:
    where = f"{name}, {requests(choice.batch)}"
    best, lost = choice.best, choice.fastest
    if best is None:
        return f"{where}: leave it off" + (f"; {lost.spec} has {lost.ratio_to_off:.2f} of its speed." if lost else ".")
    gain = best.ratio_to_off - 1
    if gain < SMALL_GAIN:
        return f"{where}: {best.spec} gains only {percent(gain)}, so leave it off unless a longer bench agrees."
    return f"{where}: use {best.spec}, {best.ratio_to_off:.2f} times as fast as off."


def _flip(choices: Sequence[Choice]) -> tuple[int, int] | None:
    """The largest batch at which speculation paid and the next that was measured; None if it never or always paid."""
    paying = [place for place, choice in enumerate(choices) if choice.best]
    if not paying or paying[-1] + 1 == len(choices):
        return None
    return choices[paying[-1]].batch, choices[paying[-1] + 1].batch
