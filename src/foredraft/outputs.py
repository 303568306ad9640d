"""What a request gives back: its texts, what speculation gained for them, and the events of a stream. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from foredraft.answers import AnswerFormat, Part
from foredraft.tool_calls import ToolCall
from foredraft.types import TARGET, Draft, FinishReason, Sequence, TokenLogprob


@dataclass(frozen=True)
class SpecMetrics:
    """What speculation gained for one request, and what it cost."""

    target_runs: int
    drafted_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    tokens_per_run: float
    acceptance_rate: float
    acceptance_per_depth: list[float]
    by_origin: dict[str, int]
    draft_time_s: float
    verify_time_s: float
    total_time_s: float
    time_to_first_token_s: float
    inter_token_latency_s: float
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    preemptions: int = 0  # how often the request was set aside and computed again, for want of KV cache
    decisions: dict[str, int] = field(default_factory=dict)  # reason -> steps: the controller's, and failures
    drafts: int = 0  # runs that had draft tokens to verify
    drafted_per_depth: list[int] = field(default_factory=list)  # drafts that reached a depth, from 1 on
    accepted_per_depth: list[int] = field(default_factory=list)
    drafted_by_origin: dict[str, int] = field(default_factory=dict)
    queue_time_s: float = 0.0  # from arrival to the first run
    saved_time_s: float = 0.0  # against plain decoding, as measured costs estimate it

    @classmethod
    def of(cls, sequence: Sequence) -> SpecMetrics:
        """What is counted under the same name is taken as it is; the rest follows from it."""
        counters, emitted = sequence.counters, sequence.num_output_tokens
        counted: dict[str, Any] = {
            each.name: getattr(counters, each.name) for each in fields(cls) if hasattr(counters, each.name)
        }
        counted.update({name: dict(value) for name, value in counted.items() if isinstance(value, Counter)})
        accepted = sum(counters.accepted_by_origin.values())
        per_depth = zip(counters.accepted_per_depth, counters.drafted_per_depth, strict=True)
        return cls(
            **counted,
            accepted_tokens=accepted,
            emitted_tokens=emitted,
            tokens_per_run=emitted / counters.target_runs if counters.target_runs else 0.0,
            acceptance_rate=accepted / counters.drafted_tokens if counters.drafted_tokens else 0.0,
            acceptance_per_depth=[kept / drafted for kept, drafted in per_depth],
            by_origin={TARGET: emitted - accepted, **counters.accepted_by_origin},
            drafts=counters.drafted_per_depth[0] if counters.drafted_per_depth else 0,
            total_time_s=max(0.0, counters.last_token_time - counters.arrival_time),
            time_to_first_token_s=max(0.0, counters.first_token_time - counters.arrival_time),
            inter_token_latency_s=(counters.last_token_time - counters.first_token_time) / max(1, emitted - 1),
            queue_time_s=max(0.0, counters.first_run_time - counters.arrival_time),
            saved_time_s=counters.saved_s,
        )


_SHOWN_CHARACTERS = 60  # of a text, in a repr


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    metrics: SpecMetrics
    error: str | None = None
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)  # how the text is to be read

    def __repr__(self) -> str:
        return f"<CompletionOutput {self._shown()}>"

    def _shown(self) -> str:
        """What a person wants to see of it first, in a line."""
        text = self.text if len(self.text) <= _SHOWN_CHARACTERS else self.text[:_SHOWN_CHARACTERS] + "…"
        error = "" if self.error is None else f", error={self.error!r}"
        return (
            f"text={text!r}, finish_reason={self.finish_reason!r}, seed={self.seed}, {len(self.token_ids)} tokens, "
            f"{self.metrics.tokens_per_run:.2f} per run{error}"
        )

    @cached_property
    def _read(self) -> Part:
        return self.answer_format.reader().whole(self.text)

    @property
    def reasoning(self) -> str:
        """What the model has thought before it answered; "" if it has not."""
        return self._read.reasoning

    @property
    def content(self) -> str:
        """The text without thoughts and calls."""
        return self._read.content

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that the text holds."""
        return self._read.calls


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `text`, `token_ids` and the like are those of its first sample."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    def __repr__(self) -> str:
        others = f", {len(self.outputs) - 1} more outputs" if len(self.outputs) > 1 else ""
        return f"<RequestOutput {self.outputs[0]._shown()}{others}>"

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def seed(self) -> int:
        return self.outputs[0].seed

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].prompt_logprobs

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def content(self) -> str:
        return self.outputs[0].content

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def metrics(self) -> SpecMetrics:
        return self.outputs[0].metrics

    @property
    def error(self) -> str | None:
        return self.outputs[0].error


class TokenEvent(NamedTuple):
    """One token of a stream, with the text that can now be shown: it lags while a character or stop string is open."""

    request_id: str
    index: int  # type: ignore[assignment]  # of the sample; it hides tuple.index
    token_id: int | None  # None when a stream ends without a token (abort, error)
    text: str
    origin: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    output: CompletionOutput | None = None  # with the last event of a sample
    # Of a step, the event of the first token has these three.
    draft: Draft | None = None  # what was verified, without q
    accepted: tuple[int, ...] = ()  # nodes of the draft, from the root down
    reasons: tuple[str, ...] = ()  # why it was drafted or not: the controller's decisions, and failures
