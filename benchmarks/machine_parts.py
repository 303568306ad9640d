"""The parts of what machine.py measures of one model: each gives the figures of one section of its file.

Numbers of prompts follow from the time that a part may take and from how fast the model is on this machine; every
section says how many there were. Measured are the same texts with every setting, in turn, and texts are compared.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import acceptance
import plain
from published import Figures, say

from foredraft import LLM, SamplingParams
from foredraft.bench.cells import ALL, Cell, cells_of, flip
from foredraft.bench.measure import OFF, Plan, measure, verify_curve
from foredraft.config import EngineConfig
from foredraft.control.economics import VerifyCurve
from foredraft.heads.catalog import find_heads
from foredraft.models.catalog import open_checkpoint
from foredraft.plan.inputs import flip_of
from foredraft.plan.results import compare
from foredraft.reports.prompts import Question

AUTO = "auto"
FIXED, FIXED_WITH_HEAD = ("suffix",), ("suffix", "eagle:nodes=16", "suffix+eagle:nodes=16")
HEAD_SPECS = ("eagle:tree=chain,k=5", "eagle:nodes=16")
TEMPERATURES = (0.0, 0.8)
ROUNDS = 3  # of plain decoding and of the price of exactness
AT_ONCE = 32  # sequences, where the price of exactness is that of throughput
REPEATS = 3  # of a prompt, where enough prompts fit into the time; else 1
ENOUGH_PROMPTS = 12
BATCH_MAX = 256  # so far a flip is looked for
PACE_TOKENS, PACE_PROMPT = 16, 256


@dataclass(frozen=True)
class Subject:
    """One model on this machine, and what of it is measured."""

    settings: plain.Settings
    head: str | None
    fixed: tuple[str, ...]  # settings that `auto` is compared with; empty: FIXED or FIXED_WITH_HEAD
    suites: dict[str, list[Question]]  # by name, kinds taking turns
    at_once: list[Question]  # distinct prompts that decode at once
    batches: tuple[int, ...]
    max_tokens: int
    llama_bench: Path | None
    seconds: float  # for all parts

    @cached_property
    def llm(self) -> LLM:
        settings = self.settings
        llm = LLM(
            str(settings.model),
            spec=OFF,
            head=self.head,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            max_num_seqs=max(EngineConfig.max_num_seqs, *self.batches),
            prefix_caching=False,
        )
        gc.freeze()  # a full collection would go through all of torch in the middle of a timed run
        return llm

    @cached_property
    def has_head(self) -> bool:
        return "eagle" in find_heads(self.head, open_checkpoint(self.settings.model))

    @cached_property
    def curve(self) -> VerifyCurve:
        return verify_curve(self.llm)

    @property
    def fixed_specs(self) -> tuple[str, ...]:
        return self.fixed or (FIXED_WITH_HEAD if self.has_head else FIXED)

    @cached_property
    def _pace(self) -> tuple[float, float]:
        """Seconds of a prompt's token, and of a token that is written."""

        def seconds(prompt: int, tokens: int) -> float:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            started = time.perf_counter()
            self.llm.generate([[7] * prompt], params)
            return time.perf_counter() - started

        seconds(8, 2)
        return seconds(PACE_PROMPT, 1) / PACE_PROMPT, seconds(1, PACE_TOKENS) / PACE_TOKENS

    def fitting(self, questions: list[Question], seconds: float, times: int, batch: int = 1) -> list[Question]:
        """As many of the first questions as plain decoding, of so many at once, could write so often in so long; at
        least one."""
        of_prompt, of_token = self._pace
        of_token *= self.curve.relative(batch) / batch
        for count, question in enumerate(questions):
            seconds -= times * (len(question.encoded(self.llm)) * of_prompt + self.max_tokens * of_token)
            if seconds < 0:
                return questions[: max(1, count)]
        return questions


def plain_part(subject: Subject, seconds: float) -> Figures:
    theirs = plain.find_llama_bench(subject.settings, subject.llama_bench)
    return plain.measure(subject.settings, theirs, ROUNDS).figures()


def exactness_part(subject: Subject, seconds: float) -> Figures:
    return plain.price_of_exactness(replace(subject.settings, sequences=AT_ONCE), ROUNDS)


def auto_part(subject: Subject, seconds: float) -> Figures:
    """`off`, `auto` and the fixed settings by suite and kind. A suite of several kinds has twice the time of others."""
    specs = (AUTO, *subject.fixed_specs)
    suites: Figures = {}
    kinds_of = {name: len({each.category for each in questions}) for name, questions in subject.suites.items()}
    of_one_kind = seconds / sum(min(kinds, 2) for kinds in kinds_of.values())
    for name, questions in subject.suites.items():
        kinds = kinds_of[name]
        share, times = of_one_kind * min(kinds, 2), 1 + len(specs)
        chosen, repeats = subject.fitting(questions, share, times * REPEATS), REPEATS
        if len(chosen) < min(len(questions), max(ENOUGH_PROMPTS, 2 * kinds)):
            chosen, repeats = subject.fitting(questions, share, times), 1
        say(f"  {name}: {len(chosen)} prompts, {repeats} times each")
        cells = _cells(subject, chosen, Plan(specs, max_tokens=subject.max_tokens, repeats=repeats))
        suites[name] = {
            "prompts": len(chosen),
            "repeats": repeats,
            "same_text": all(cell.same_text for cell in cells),
            "kinds": {
                category: {"prompts": some[0].prompts, "specs": {cell.spec: _published(cell) for cell in some}}
                for category, some in _by_category(cells).items()
            },
        }
    return {"max_tokens": subject.max_tokens, "suites": suites}


def acceptance_part(subject: Subject, seconds: float) -> Figures:
    """What the model's EAGLE head reaches as a chain and as a tree, by suite and temperature."""
    runs = len(TEMPERATURES) * (1 + len(HEAD_SPECS))
    suites: Figures = {}
    for name, questions in subject.suites.items():
        chosen = subject.fitting(questions, seconds / len(subject.suites), runs)
        found: Figures = {"prompts": len(chosen), "temperatures": {}}
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(max_tokens=subject.max_tokens, temperature=temperature, seed=seed)
                for seed in range(len(chosen))
            ]
            reached = acceptance.reached(subject.llm, chosen, params, HEAD_SPECS, (acceptance.MATCH,))
            found["temperatures"][str(temperature)] = {
                spec: {
                    "tokens_per_run": round(figures["tokens_per_run"], 3),
                    "same_text": figures["same_text"] == len(chosen),
                }
                for spec, _, figures in reached
            }
        suites[name] = found
    return {"max_tokens": subject.max_tokens, "suites": suites}


def batch_part(subject: Subject, seconds: float) -> Figures:
    """`auto` with several requests at once, beside the fixed setting that is best for one, and where that one stops to
    pay: as measured, and as it follows from the figures of one request and the cost of rows."""
    specs: tuple[str, ...] = (AUTO, *subject.fixed_specs)
    cells: list[Cell] = []
    for batch in subject.batches:
        fit = len(subject.fitting(subject.at_once, seconds / len(subject.batches), 1 + len(specs), batch))
        chosen = subject.at_once[: max(batch, fit // batch * batch)]
        say(f"  {batch} at once: {len(chosen)} prompts")
        found = _cells(subject, chosen, Plan(specs, (batch,), max_tokens=subject.max_tokens, repeats=1))
        cells += [cell for cell in found if cell.category == ALL]
        if batch == subject.batches[0]:
            compared = compare(cells, subject.curve, Path(subject.settings.model.name))
            specs = (AUTO, compared.spec)
    ratios = [cell.ratio_to_off for cell in cells if cell.spec == compared.spec]
    alone = next(cell for cell in cells if cell.spec == compared.spec)
    measured = flip(subject.batches, ratios)
    return {
        "max_tokens": subject.max_tokens,
        "same_text": all(cell.same_text for cell in cells),
        "fixed": compared.spec,
        "batches": {
            str(batch): {
                "prompts": max(cell.prompts for cell in cells if cell.batch == batch),
                "specs": {cell.spec: _published(cell) for cell in cells if cell.batch == batch},
            }
            for batch in subject.batches
        },
        "flip": {
            "measured": measured and round(measured, 1),
            "planned": flip_of(compared.inputs, alone, BATCH_MAX),
            "up_to": BATCH_MAX,
        },
    }


def _cells(subject: Subject, questions: list[Question], plan: Plan) -> list[Cell]:
    return cells_of(measure(subject.llm, questions, plan, lambda: None), subject.curve, subject.llm.dtype)


def _by_category(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.category, []).append(cell)
    return found


def _published(cell: Cell) -> dict[str, Any]:
    return {
        "tokens_per_s": round(cell.tokens_per_s, 1),
        "ratio_to_off": round(cell.ratio_to_off, 3),
        "tokens_per_run": round(cell.tokens_per_run, 2),
    }


@dataclass(frozen=True)
class Part:
    """How a section of the file is measured, and its share of the time."""

    measure: Callable[[Subject, float], Figures]
    share: float


PARTS = {
    "plain": Part(plain_part, 0.1),
    "exactness": Part(exactness_part, 0.1),
    "auto": Part(auto_part, 0.4),
    "batch": Part(batch_part, 0.2),
    "acceptance": Part(acceptance_part, 0.2),
}


def parts_of(subject: Subject) -> list[str]:
    """The parts that this model has figures for."""
    return [name for name in PARTS if name != "acceptance" or subject.has_head]
