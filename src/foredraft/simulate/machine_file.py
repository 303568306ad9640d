"""Machines in files: those that a simulation has written, and those of a benchmark's results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from foredraft.bench.cells import Cell
from foredraft.bench.measure import OFF
from foredraft.bench.results_file import read_object, read_results
from foredraft.control.costs import Calibration
from foredraft.control.economics import VerifyCurve, quotient
from foredraft.errors import InvalidParameter
from foredraft.proposers.registry import ProposerChoice, parse_spec, proposer_class
from foredraft.simulate.machine import NEVER, DraftFigures, DraftProfile, Machine

_CONTEXT = 256  # tokens before the rows of a benchmark's verify cost, see engine/calibration.py


def write_machine(machine: Machine, file: Path) -> None:
    """As JSON, so that a machine is measured once and simulated anywhere."""
    record = {"kind": "machine", **asdict(machine)}
    try:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be written: {error.strerror}.") from error


def read_machine(file: Path) -> Machine:
    """A machine that `write_machine` wrote, or the one of a `results.json` of `foredraft bench`."""
    content = read_object(file)
    if content.get("kind") != "machine":
        return _of_results(file)
    try:
        return _of_record(content)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidParameter(f"{file} is no machine ({type(error).__name__}: {error}); measure it again.") from error


def _of_record(content: dict[str, Any]) -> Machine:
    calibration = content["calibration"]
    curve = VerifyCurve(tuple(calibration["curve"]["rows"]), tuple(calibration["curve"]["seconds"]))
    proposers = {
        name: DraftFigures(
            name=figures["name"],
            free=bool(figures["free"]),
            by_kind={kind: _profile(record) for kind, record in figures["by_kind"].items()},
            seconds=float(figures["seconds"]),
        )
        for name, figures in content["proposers"].items()
    }
    measured = Calibration(curve, int(calibration["context"]), float(calibration["seconds_per_key"]))
    overheads = (float(content[name]) for name in ("step_s", "sequence_s", "token_s"))
    return Machine(str(content["name"]), measured, proposers, *overheads)


def _profile(record: dict[str, Any]) -> DraftProfile:
    lengths, survivals = (tuple(map(float, record[name])) for name in ("lengths", "survivals"))
    if len(lengths) != len(survivals):
        raise ValueError("lengths and survivals must have one number for each depth")
    return DraftProfile(float(record["coverage"]), lengths, survivals, float(record.get("branches", 0.0)))


def _of_results(file: Path) -> Machine:
    """With every fixed proposer that the benchmark measured. Cells of
    the smallest batch count: there the proposer had the machine to itself."""
    cells, curve = read_results(file)
    if curve is None:
        raise InvalidParameter(f"{file} holds no verify_cost; write it again with foredraft bench.")
    proposers: dict[str, DraftFigures] = {}
    for text in dict.fromkeys(cell.spec for cell in cells if cell.spec != OFF):
        spec = parse_spec(text)
        mine = [cell for cell in cells if cell.spec == text]
        smallest = min((cell.batch, cell.temperature) for cell in mine)
        mine = [cell for cell in mine if (cell.batch, cell.temperature) == smallest]
        if not spec.adaptive and len(spec.choices) == 1:
            proposers[str(spec.choices[0])] = _figures(spec.choices[0], mine)
    return Machine(file.name, Calibration(curve, _CONTEXT, 0.0), proposers)


def _figures(choice: ProposerChoice, cells: Sequence[Cell]) -> DraftFigures:
    by_kind = {cell.category: profile_of(cell) for cell in cells}
    free: bool = proposer_class(choice.name).free
    drafted, seconds = (sum(getattr(c, name) for c in cells) for name in ("drafted_per_run", "draft_time_per_run_s"))
    per_call = seconds / len(cells) / cells[0].batch  # every sequence of a batch waits for the drafts of all
    return DraftFigures(choice.name, free, by_kind, per_call if free else quotient(per_call * len(cells), drafted))


def profile_of(cell: Cell) -> DraftProfile:
    """From a cell of a benchmark, which knows how much was drafted but not how long each draft was: they all get
    the one length at which the acceptance by depth gives the cell's acceptance rate."""
    survivals = list(accumulate(cell.acceptance_per_depth or [cell.acceptance_rate], min))
    if not cell.drafted_per_run or not survivals[0]:
        return NEVER
    length = _length_of_rate(survivals, cell.acceptance_rate)
    whole = int(length)
    lengths = (1.0,) * whole + ((length - whole,) if length > whole else ())
    return DraftProfile(min(1.0, cell.drafted_per_run / length), lengths, tuple(survivals[: len(lengths)]))


def _length_of_rate(survivals: Sequence[float], rate: float) -> float:
    """The length of drafts whose share of accepted tokens is `rate`; a fraction is the share of drafts with one token
    more."""
    total = 0.0
    for depth, survival in enumerate(survivals, 1):
        if total + survival < rate * depth:
            # depth - 1 + x tokens of which total + x * survival are accepted
            return max(1.0, depth - 1 + (total - rate * (depth - 1)) / (rate - survival))
        total += survival
    return float(len(survivals))
