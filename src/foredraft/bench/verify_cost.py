"""What a run of the target costs by its number of rows, measured on this machine, and the speed-up that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.control.economics import VerifyCurve

if TYPE_CHECKING:
    from foredraft.llm import LLM


def predicted_ratio(
    cost: VerifyCurve, batch: float, tokens_per_run: float, drafted_per_run: float, draft_time_per_run: float
) -> float:
    """The speed-up that a batch should have, from what its runs took and gained:

        tokens_per_run * T(batch) / (draft_time_per_run + T(batch * (1 + drafted_per_run)))

    `T` is the measured cost of so many rows; tokens and drafted tokens are per sequence. Prompts are left out, so a
    request whose prompt takes much of its time gains less than this.
    """
    guessed = draft_time_per_run + cost.seconds_at(batch * (1 + drafted_per_run))
    return tokens_per_run * cost.seconds_at(batch) / guessed


def verify_curve(llm: LLM) -> VerifyCurve:
    """Time the target by its rows. Nothing else may run."""
    from foredraft.engine.calibration import calibrate

    return calibrate(llm.engine.runner, llm.engine.scheduler.pool, llm.max_model_len).curve
