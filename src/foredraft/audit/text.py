"""The first claim: speculation changes neither a token nor a bit of its log probability, greedy or seeded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest
from typing import TYPE_CHECKING

from foredraft.audit.report import Check, Tick
from foredraft.control.reasons import CONTROLLER_FAILED, FAILED
from foredraft.errors import ForedraftError
from foredraft.outputs import CompletionOutput
from foredraft.params import SamplingParams
from foredraft.proposers.registry import proposer_class, proposer_names
from foredraft.reports.prompts import Question

if TYPE_CHECKING:
    from foredraft.llm import LLM

MODES = {"greedy": 0.0, "seeded": 0.8}  # by their temperature
FIRST_SEED = 2024  # of the first prompt; every prompt has its own
BATCH = 8  # prompts that run at once
FAILURES = (FAILED, CONTROLLER_FAILED)

Token = tuple[int, str]  # a token's id, and its log probabilities to the last bit


def unusable_proposers(llm: LLM) -> dict[str, str]:
    """The proposers that do not work with this model as they are, and why: some need an option, as the name of a
    model."""
    complaints = {name: _complaint(llm, name) for name in proposer_names()}
    return {name: complaint for name, complaint in complaints.items() if complaint is not None}


def with_pairs(names: Sequence[str]) -> list[str]:
    """The speculation strings of every proposer, of the controller, and of every pair of proposers."""
    return [*names, "auto", *("+".join(pair) for pair in combinations(names, 2))]


def num_prompts(spec: str, available: int) -> int:
    """Proposers run on all prompts; merged ones, of which there are many, on a fifth of them and at least eight."""
    return available if "+" not in spec else min(available, max(BATCH, available // 5))


def text_checks(
    llm: LLM, questions: Sequence[Question], specs: Sequence[str], max_tokens: int, tick: Tick
) -> Iterator[Check]:
    """One check per mode and spec, against plain decoding. Ticks once per run over all questions."""
    prompts = [question.encoded(llm) for question in questions]
    for mode, temperature in MODES.items():
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=FIRST_SEED + index, logprobs=1)
            for index in range(len(prompts))
        ]
        plain = _answers(llm, prompts, params, "off")
        tick()
        for spec in specs:
            count = num_prompts(spec, len(prompts))
            drafted = _answers(llm, prompts[:count], params[:count], spec)
            tick()
            problem = first_difference(plain[:count], drafted) or _failure(drafted)
            detail = _figures(drafted) if problem is None else f"{problem}; {_figures(drafted)}"
            yield Check(f"same text: {spec}, {mode}", problem is None, detail)


def first_difference(plain: Sequence[CompletionOutput], drafted: Sequence[CompletionOutput]) -> str | None:
    """Where two series of answers part, or None where they are the same. A failed answer is no proof of anything."""
    for index, (expected, found) in enumerate(zip(plain, drafted, strict=True)):
        error = expected.error or found.error
        if error is not None:
            return f"prompt {index} failed: {error}"
        for place, (wanted, got) in enumerate(zip_longest(_tokens(expected), _tokens(found))):
            if wanted != got:
                return f"prompt {index} differs at token {place}: {_contrast(wanted, got)}"
        if expected.finish_reason != found.finish_reason:
            return f"prompt {index} ends with {found.finish_reason} instead of {expected.finish_reason}"
    return None


def _complaint(llm: LLM, name: str) -> str | None:
    if needed := proposer_class(name).needs:
        return f"it drafts only for requests that have a {needed}."
    try:
        llm.generate([llm.encode("Hello")], SamplingParams(max_tokens=1, temperature=0.0), spec=name)
    except ForedraftError as error:
        return str(error)
    return None


def _answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], spec: str) -> list[CompletionOutput]:
    llm.engine.speculation.clear()  # or tokens per run would be those of a replay
    outputs: list[CompletionOutput] = []
    for start in range(0, len(prompts), BATCH):
        stop = start + BATCH
        outputs += [output.outputs[0] for output in llm.generate(prompts[start:stop], params[start:stop], spec=spec)]
    return outputs


def _tokens(output: CompletionOutput) -> Iterator[Token]:
    """Floats as Python writes them: two are the same text only if they are the same bits."""
    logprobs = (f"{each.logprob!r} {dict(sorted(each.top.items()))}" for each in output.logprobs or ())
    return zip(output.token_ids, logprobs, strict=True)


def _contrast(wanted: Token | None, got: Token | None) -> str:
    if wanted is None or got is None:
        return "one text ends there"
    if wanted[0] != got[0]:
        return f"{got[0]} instead of {wanted[0]}"
    return f"log probability {got[1]} instead of {wanted[1]}"


def _failure(answers: Sequence[CompletionOutput]) -> str | None:
    """A request that went on without its proposer or the controller proves nothing about it."""
    reasons = [next((why for why in answer.metrics.decisions if why in FAILURES), None) for answer in answers]
    failed = [why for why in reasons if why is not None]
    return f"{failed[0]} in {len(failed)} of {len(answers)} texts" if failed else None


def _figures(answers: Sequence[CompletionOutput]) -> str:
    tokens = sum(len(answer.token_ids) for answer in answers)
    runs = sum(answer.metrics.target_runs for answer in answers)
    drafted = "" if any(answer.metrics.drafted_tokens for answer in answers) else ", nothing was drafted"
    return f"{len(answers)} prompts, {tokens} tokens, {tokens / max(1, runs):.2f} tokens per run{drafted}"
