"""What speculation did, step by step: the field `speculation_trace` of a stream's chunks, for requests that want it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foredraft.models.tokenizer import Tokenizer
from foredraft.types import Draft, TokenEvent


class Trace:
    """Steps as JSON. The texts of a step's tokens add up to what the answer shows; those of a draft are its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def steps(self, events: Iterable[TokenEvent]) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for event in events:
            if event.draft is not None:
                steps.append(
                    {
                        "tokens": [],
                        "draft": self._draft(event.draft),
                        "accepted": list(event.accepted),
                        "reasons": list(event.reasons),
                    }
                )
            if event.token_id is not None:
                token = {"id": event.token_id, "text": event.text, "origin": event.origin}
                steps[-1]["tokens"].append(token)
        return steps

    def _draft(self, draft: Draft) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.own_text(token) for token in draft.tokens],
            "parents": list(draft.parents),
            "scores": [round(score, 4) for score in draft.scores],
            "origins": list(draft.origin),
        }
