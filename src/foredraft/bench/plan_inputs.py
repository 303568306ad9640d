"""What `foredraft plan --measure` starts from: acceptance and costs of a proposer, on this machine, for this model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.bench.suite import built_in
from foredraft.bench.verify_cost import verify_curve
from foredraft.control.economics import VerifyCurve
from foredraft.errors import InvalidSpec
from foredraft.params import SamplingParams
from foredraft.proposers.registry import parse_spec

if TYPE_CHECKING:
    from foredraft.llm import LLM

MAX_TOKENS = 48


@dataclass(frozen=True)
class PlanInputs:
    """How likely a guess is right once all before it were; a guess's time in plain steps; a run's time by its rows."""

    alpha: float
    cost: float
    curve: VerifyCurve


def measured_inputs(llm: LLM, spec: str) -> PlanInputs:
    """Guess for one built-in prompt of each kind, greedily and alone, and time the target by its rows."""
    if parse_spec(spec).adaptive or spec == "off":
        raise InvalidSpec(f"spec={spec!r} cannot be planned for; name a proposer, for instance quantised or ngram:k=6.")
    curve = verify_curve(llm)
    first_of_kind = {question.category: question for question in reversed(built_in())}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    room = llm.max_model_len - MAX_TOKENS
    prompts = [question.encoded(llm)[:room] for question in first_of_kind.values()]
    metrics = [llm.generate([prompt], params, spec=spec)[0].metrics for prompt in prompts]
    reached = accepted = 0.0
    for each in metrics:
        survivals = each.acceptance_per_depth
        accepted += sum(survivals) * each.target_runs
        reached += sum([1.0, *survivals[:-1]][: len(survivals)]) * each.target_runs
    guesses = sum(each.drafted_tokens for each in metrics)
    if not guesses:
        raise InvalidSpec(f"spec={spec!r} guessed nothing for the built-in prompts; there is nothing to plan with.")
    draft_s = sum(each.draft_time_s for each in metrics)
    return PlanInputs(min(1.0, accepted / reached), draft_s / guesses / curve.seconds_at(1), curve)
