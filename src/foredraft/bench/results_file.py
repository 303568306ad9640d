"""Reads back what a benchmark has written: its cells, and the verify cost. Whatever is wrong is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.bench.cells import Cell
from foredraft.bench.measure import OFF
from foredraft.control.economics import VerifyCurve
from foredraft.errors import InvalidParameter


def read_results(file: Path) -> tuple[list[Cell], VerifyCurve | None]:
    """The cells of a `results.json`, at least one, and its verify cost where it has one. What is not promised of a cell
    may be missing."""
    content = read_object(file)
    cells = content.get("cells")
    if not isinstance(cells, list) or not cells:
        raise InvalidParameter(f"{file} holds no cells; give the results.json that foredraft bench writes.")
    curve = _curve(content["verify_cost"], file) if "verify_cost" in content else None
    return [_cell(record, f"Cell {place} of {file}") for place, record in enumerate(cells)], curve


def read_curve(file: Path) -> VerifyCurve:
    """The verify cost in a file of its own, or in the results of a benchmark."""
    content = read_object(file)
    return _curve(content.get("verify_cost", content), file)


def _cell(record: Any, where: str) -> Cell:
    match record:
        case {"spec": str(spec), "category": str(category), "batch": int(batch), "ratio_to_off": ratio} if batch >= 1:
            ratio = 1.0 if spec == OFF else _number(ratio, 1e-9)
            temperature, dtype = _number(record.get("temperature", 0.0)), record.get("dtype", "")
            if ratio is not None and temperature is not None and isinstance(dtype, str):
                return Cell(
                    spec=spec,
                    category=category,
                    batch=batch,
                    temperature=temperature,
                    dtype=dtype,
                    prompts=int(_number(record.get("prompts")) or 0),
                    tokens_per_s=_number(record.get("tokens_per_s")) or 0.0,
                    ratio_to_off=ratio,
                    tokens_per_run=_number(record.get("tokens_per_run")) or 0.0,
                    acceptance_rate=min(1.0, _number(record.get("acceptance_rate")) or 0.0),
                    same_text=record.get("same_text") is not False,
                    group_sizes=[int(size) for size in _numbers(record.get("group_sizes"))],
                    drafted_per_run=_number(record.get("drafted_per_run")) or 0.0,
                    draft_time_per_run_s=_number(record.get("draft_time_per_run_s")) or 0.0,
                    acceptance_per_depth=[min(1.0, share) for share in _numbers(record.get("acceptance_per_depth"))],
                )
    raise InvalidParameter(f"{where} must have spec, category, batch and a ratio_to_off above 0; bench again.")


def _curve(record: Any, file: Path) -> VerifyCurve:
    match record:
        case {"rows": list(rows), "seconds": list(seconds)}:
            times = [time for second in seconds if (time := _number(second, 1e-9)) is not None]
            if all(type(count) is int and count < 2**31 for count in rows) and len(times) == len(seconds):
                return VerifyCurve(tuple(rows), tuple(times))
    raise InvalidParameter(f'{file} must hold {{"rows": [1, …], "seconds": […]}}: row counts, and times above 0.')


def read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{file} is not JSON.") from error
    if not isinstance(content, dict):
        raise InvalidParameter(f"{file} must hold a JSON object.")
    return content


def _number(value: Any, least: float = 0.0) -> float | None:
    """A number that arithmetic can bear, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and least <= value <= 1e9 else None


def _numbers(values: Any) -> list[float]:
    """Those of a list that are numbers."""
    numbers = map(_number, values if isinstance(values, list) else [])
    return [number for number in numbers if number is not None]
