"""What a run of the target costs by its number of rows, measured on this machine, and the speed-up that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.control.economics import VerifyCurve

if TYPE_CHECKING:
    from foredraft.llm import LLM


@dataclass(frozen=True)
class Decoded:
    """Runs of sequences that decode in a batch of about this size, with what each run drafted on average."""

    runs: float
    batch: float
    drafted_per_run: float = 0.0
    draft_time_per_run_s: float = 0.0

    def seconds(self, cost: VerifyCurve) -> float:
        """A sequence's share of a run is one part in `batch`; drafting takes its time once for all of them."""
        rows = self.batch * (1 + self.drafted_per_run)
        return self.runs * (self.draft_time_per_run_s + cost.seconds_at(rows)) / self.batch


def predicted_ratio(cost: VerifyCurve, plain_s: float, plain: Decoded, drafted: Decoded) -> float:
    """The speed-up that follows from how many runs it took and what runs of so many rows cost.

    Plain decoding took `plain_s` in all; what of that its runs do not explain (prompts above all) is not sped up.
    """
    decoding = plain.seconds(cost)
    others = max(0.0, plain_s - decoding)
    return (others + decoding) / (others + drafted.seconds(cost))


def verify_curve(llm: LLM) -> VerifyCurve:
    """Time the target by its rows. Nothing else may run."""
    from foredraft.engine.calibration import calibrate

    return calibrate(llm.engine.runner, llm.engine.scheduler.pool, llm.max_model_len).curve
