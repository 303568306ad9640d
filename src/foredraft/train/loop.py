"""The training loop: several students side by side on the same batches, because the target's features cost most."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, inf, isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foredraft.errors import InvalidModel
from foredraft.train.batches import Batch, Batches
from foredraft.train.evaluate import Evaluation, evaluate
from foredraft.train.optimizer import Optimizer, learning_rate
from foredraft.train.state import Counters, load_state, save_state, seeded, state_file
from foredraft.train.student import Facts, Student
from foredraft.train.target_batch import Teacher

REPORT_SECONDS = 5.0
_SAVE_SECONDS = 150.0
_EVALUATIONS = 10  # over a run, the last one apart
HELD_OUT = 64  # sequences of an evaluation on the way
_HELD_OUT_LAST = 512
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Goal:
    """Where training ends: after so many steps or seconds, earlier runs included, whichever comes first."""

    steps: int | None
    seconds: float | None
    rate: float = 1.0  # learning rates in units of the usual ones

    def progress(self, counters: Counters) -> float:
        """The share of training that is done."""
        steps, seconds = self.steps or inf, self.seconds or inf
        return min(1.0, max(counters.steps / steps, counters.seconds / seconds))


@dataclass(frozen=True)
class Report:
    """One line of progress; evaluations are there when they were made."""

    step: int
    tokens: int
    seconds: float
    seconds_left: float
    progress: float
    loss: dict[str, float]
    tokens_per_run: dict[str, float] = field(default_factory=dict)
    acceptance: dict[str, tuple[float, ...]] = field(default_factory=dict)


class Training:
    """Students, their optimisers and counters; `folder` holds the state."""

    def __init__(
        self, students: Sequence[Student], teacher: Teacher, batches: Batches, folder: Path, seed: int
    ) -> None:
        self.students, self._teacher, self._batches = students, teacher, batches
        self._folder, self._seed = folder, seed
        self._optimizers = [Optimizer(each.module.named_parameters(), each.trunk()) for each in students]
        self._generators = [torch.Generator(teacher.target.device) for _ in students]
        self._losses: list[Tensor] = [torch.zeros((), device=teacher.target.device) for _ in students]
        self.counters = Counters()

    def resume(self) -> bool:
        """Takes up the saved state, if there is one for every student."""
        if not all(state_file(self._folder, each).exists() for each in self.students):
            return False
        found = [load_state(self._folder, *pair) for pair in zip(self.students, self._optimizers)]
        if any(counters.steps != found[0].steps for counters in found):
            raise InvalidModel(f"{self._folder} holds drafters that have come differently far; train them one by one.")
        self.counters = found[0]
        return True

    def save(self) -> None:
        for student, optimizer in zip(self.students, self._optimizers):
            save_state(self._folder, student, optimizer, self.counters)

    def run(self, goal: Goal, report: Callable[[Report], None], saved: Callable[[], None]) -> None:
        """Trains up to the goal. The state is saved now and then, at the end, and when training is interrupted; `saved`
        is called after the first of these."""
        counters = self.counters
        before, started = counters.seconds, time.monotonic()
        next_report, next_save = 0.0, _SAVE_SECONDS
        next_evaluation = (floor(goal.progress(counters) * _EVALUATIONS) + 1) / _EVALUATIONS
        first_step, log = counters.steps, self._folder / "log.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        batches = self._batches.from_step(counters.steps)
        try:
            while goal.progress(counters) < 1:
                batch = next(batches)
                with sdpa_kernel(_ATTENTION):
                    self._step(batch, goal.rate * learning_rate(counters.steps, goal.progress(counters)))
                counters.steps += 1
                counters.tokens += int(batch.lengths.sum())
                elapsed = time.monotonic() - started
                counters.seconds = before + elapsed
                progress = goal.progress(counters)
                due = progress >= next_evaluation and progress < 1
                if due or elapsed >= next_report:
                    line = self._report(goal, elapsed / (counters.steps - first_step), evaluated=due)
                    report(line)
                    with log.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(line)) + "\n")
                    next_report = elapsed + REPORT_SECONDS
                    next_evaluation += due / _EVALUATIONS
                if elapsed >= next_save:
                    self.save()
                    saved()
                    next_save = time.monotonic() - started + _SAVE_SECONDS
        except InvalidModel:  # a loss that is not finite: keep the state from before it
            raise
        except BaseException:
            self.save()
            raise
        self.save()

    def evaluate(self, most: int = _HELD_OUT_LAST) -> dict[str, Evaluation]:
        """Every student on text that is not trained on."""
        with sdpa_kernel(_ATTENTION):
            seen = [self._teacher.show(batch) for batch in self._batches.held_out(most)]
            return {each.name: evaluate(each, seen) for each in self.students}

    def write(self, folders: Sequence[Path], provenance: Facts, most: int = _HELD_OUT_LAST) -> dict[str, Evaluation]:
        """Evaluates every student and writes it to its folder."""
        found = self.evaluate(most)
        for student, folder in zip(self.students, folders):
            evaluation = found[student.name]
            facts = {
                **provenance,
                "steps": self.counters.steps,
                "tokens": self.counters.tokens,
                "seconds": round(self.counters.seconds, 1),
                "seed": self._seed,
                "held_out_runs": evaluation.runs,
            }
            if evaluation.runs:
                facts["held_out_tokens_per_run"] = round(evaluation.tokens_per_run, 4)
                facts["held_out_chain"] = student.depth
            student.save(folder, evaluation.acceptance, facts)
        return found

    def _step(self, batch: Batch, factor: float) -> None:
        seen = self._teacher.show(batch)
        for place, (student, optimizer) in enumerate(zip(self.students, self._optimizers)):
            generator = seeded(self._generators[place], self._seed, self.counters.steps, place)
            loss = student.loss(seen, generator)
            loss.backward()
            optimizer.step(factor)
            self._losses[place] = loss.detach()

    def _report(self, goal: Goal, seconds_per_step: float, evaluated: bool) -> Report:
        counters = self.counters
        losses = {each.name: float(loss) for each, loss in zip(self.students, self._losses)}
        for name, loss in losses.items():
            if not isfinite(loss):
                raise InvalidModel(f"The loss of {name} is {loss} at step {counters.steps}; the saved state is older.")
        found = {name: each for name, each in self.evaluate(HELD_OUT).items() if each.runs} if evaluated else {}
        left = ((goal.steps or inf) - counters.steps) * seconds_per_step
        left = min(left, (goal.seconds or inf) - counters.seconds)
        return Report(
            counters.steps,
            counters.tokens,
            round(counters.seconds, 2),
            round(max(0.0, left), 1),
            round(goal.progress(counters), 4),
            {name: round(loss, 4) for name, loss in losses.items()},
            {name: round(each.tokens_per_run, 3) for name, each in found.items()},
            {name: tuple(round(rate, 3) for rate in each.acceptance) for name, each in found.items()},
        )
