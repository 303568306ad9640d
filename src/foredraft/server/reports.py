"""What an answer tells beside its text: usage, log probabilities, and what speculation did for it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from foredraft.control.economics import quotient
from foredraft.models.tokenizer import Tokenizer
from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.proposers.prediction import Prediction
from foredraft.server.generation import Generation
from foredraft.types import TARGET, TokenLogprob

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def usage(generation: Generation) -> dict[str, Any]:
    completion = sum(len(output.token_ids) for output in generation.outputs.values())
    each = [output.metrics for output in generation.outputs.values()]
    predicted = sum(m.drafted_by_origin.get(Prediction.name, 0) for m in each)
    accepted = sum(m.by_origin.get(Prediction.name, 0) for m in each)
    return {
        "prompt_tokens": generation.num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": generation.num_prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        },
    }


def totals(generation: Generation) -> dict[str, Any]:
    """The response fields `usage` and `metrics`."""
    return {"usage": usage(generation), "metrics": metrics(generation)}


def metrics(generation: Generation) -> dict[str, Any]:
    """The response field `metrics`: times of the first answer, and what speculation did for all of them."""
    outputs = [output for _, output in sorted(generation.outputs.items())]
    if not outputs:
        return {}
    first = outputs[0].metrics
    return {
        "queue_time_s": first.queue_time_s,
        "time_to_first_token_s": first.time_to_first_token_s,
        "inter_token_latency_s": first.inter_token_latency_s,
        "total_time_s": first.total_time_s,
        "speculative_decoding": speculative_decoding(outputs),
    }


def speculative_decoding(outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    each = [output.metrics for output in outputs]
    names = ("target_runs", "drafts", "drafted_tokens", "accepted_tokens", "emitted_tokens")
    totals = {name: sum(getattr(m, name) for m in each) for name in names}
    drafted_by, accepted_by, decisions = Counter[str](), Counter[str](), Counter[str]()
    for m in each:
        drafted_by.update(m.drafted_by_origin)
        accepted_by.update({origin: count for origin, count in m.by_origin.items() if origin != TARGET})
        decisions.update(m.decisions)
    return {
        **totals,
        "acceptance_rate": quotient(totals["accepted_tokens"], totals["drafted_tokens"]),
        "mean_acceptance_length": quotient(totals["emitted_tokens"], totals["target_runs"]),
        "drafted_per_position": _sums(m.drafted_per_depth for m in each),
        "accepted_per_position": _sums(m.accepted_per_depth for m in each),
        "by_proposer": {
            name: {"drafted": count, "accepted": accepted_by[name]} for name, count in sorted(drafted_by.items())
        },
        "decisions": dict(decisions),
        "time_saved_s": sum(m.saved_time_s for m in each),
    }


def speculation_trace(events: Iterable[TokenEvent], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The field of a stream's chunks for requests that want it: steps as JSON. The texts of a step's tokens add up to
    what the answer shows; those of a draft are its tokens."""
    steps: list[dict[str, Any]] = []
    for event in events:
        if (draft := event.draft) is not None:
            written = {
                "tokens": [tokenizer.own_text(token) for token in draft.tokens],
                "parents": list(draft.parents),
                "scores": [round(score, 4) for score in draft.scores],
                "origins": list(draft.origin),
            }
            accepted, reasons = list(event.accepted), list(event.reasons)
            steps.append({"tokens": [], "draft": written, "accepted": accepted, "reasons": reasons})
        if event.token_id is not None:
            token = {"id": event.token_id, "text": event.text, "origin": event.origin}
            steps[-1]["tokens"].append(token)
    return steps


def prompt_logprobs(generation: Generation, output: CompletionOutput) -> list[Any] | None:
    """vLLM's shape: one object per prompt token, by token id. The first token has no log probability."""
    if output.prompt_logprobs is None:
        return None
    own_text = generation.tokenizer.own_text
    entries: list[Any] = [None]
    for each in output.prompt_logprobs:
        best = sorted(each.top.items(), key=lambda item: (-item[1], item[0]))
        ranked = {each.token_id: (each.logprob, each.rank)}
        ranked |= {token: (value, rank) for rank, (token, value) in enumerate(best, 1) if token != each.token_id}
        entries.append(
            {
                str(token): {"logprob": max(value, _LEAST_LOGPROB), "rank": rank, "decoded_token": own_text(token)}
                for token, (value, rank) in ranked.items()
            }
        )
    return entries


def _sums(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


class Offsets:
    """Where the tokens of an answer begin in its text. A character that spans tokens is where its first one begins."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def add(self, token: bytes) -> int:
        begin = self._end
        self._end += len(self._decoder.decode(token))
        return begin


class Logprobs:
    """Log probabilities in OpenAI's two shapes."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._own_text, self._bytes_of = tokenizer, tokenizer.own_text, tokenizer.bytes_of
        self._top = top

    def chat(self, logprobs: Iterable[TokenLogprob | None]) -> dict[str, Any]:
        content = []
        for each in filter(None, logprobs):
            top = [self._entry(token, value) for token, value in self._alternatives(each)]
            content.append({**self._entry(each.token_id, each.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, logprobs: Iterable[TokenLogprob | None], offsets: Offsets) -> dict[str, Any]:
        """`offsets` are those of the answer that these are the next tokens of."""
        found = list(filter(None, logprobs))
        texts = [self._own_text(each.token_id) for each in found]
        begin = [offsets.add(self._shown(each.token_id)) for each in found]
        tops = [{self._own_text(token): value for token, value in self._alternatives(each)} for each in found]
        values = [max(each.logprob, _LEAST_LOGPROB) for each in found]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": begin}

    def _shown(self, token_id: int) -> bytes:
        """What of the token stands in an answer's text, from which most special tokens are left out."""
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.decode([token_id]).encode()
        return self._bytes_of(token_id)

    def _alternatives(self, each: TokenLogprob) -> list[tuple[int, float]]:
        ranked = sorted(each.top.items(), key=lambda item: (-item[1], item[0]))[: self._top]
        return [(token, max(value, _LEAST_LOGPROB)) for token, value in ranked]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        own_bytes = list(self._bytes_of(token_id))
        return {"token": self._own_text(token_id), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": own_bytes}
