"""The child's side of peers.py: holds one engine, reads requests and writes answers, each one line of JSON.

A request is {"prompt": token ids, "max_tokens": n, "stop": token ids, "mode": "plain" or the name of a speculation};
an answer is {"token_ids", "first_tokens", "prefill_s", "decode_s"}, or {"error": why}. The first line tells the
engine's version and settings. Only the standard library is used here, because every engine has its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Writing:
    """When which tokens came. Those that one run of the model gives together arrive together."""

    started: float
    arrivals: list[tuple[float, list[int]]] = field(default_factory=list)


class Engine(Protocol):
    about: dict[str, str]  # "version", and "settings" where there is something to say about them

    def write(self, prompt: list[int], max_tokens: int, stop: list[int], mode: str) -> Writing:
        """Greedy, with nothing remembered from earlier prompts."""


def drafts(mode: str) -> int:
    """How many tokens a mode such as "lookup-5" drafts at once; 0 for plain decoding."""
    return 0 if mode == "plain" else int(mode.removeprefix("lookup-"))


def serve(load: Callable[[str, int], Engine]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
        for answer in _answers(lambda: load(options.model, options.threads)):
            print(json.dumps(answer), file=answers, flush=True)


def _answers(load: Callable[[], Engine]) -> Iterable[dict[str, Any]]:
    try:
        engine = load()
    except Exception as error:
        yield _failure(error)
        return
    yield engine.about
    for line in sys.stdin:
        request = json.loads(line)
        try:
            writing = engine.write(**request)
            yield _measured(writing, request["max_tokens"], request["stop"])
        except Exception as error:
            yield _failure(error)


def _measured(writing: Writing, max_tokens: int, stop: list[int]) -> dict[str, Any]:
    """Only tokens up to the end of the answer count, and only time until the last of them came."""
    tokens: list[int] = []
    first_tokens = 0
    first = last = writing.started
    for time, arrived in writing.arrivals:
        kept = arrived[: max_tokens - len(tokens)]
        kept = kept[: next((place + 1 for place, token in enumerate(kept) if token in stop), len(kept))]
        if not kept:
            break
        tokens += kept
        last = time
        if not first_tokens:
            first, first_tokens = time, len(kept)
        if len(tokens) == max_tokens or tokens[-1] in stop:
            break
    return {
        "token_ids": tokens,
        "first_tokens": first_tokens,
        "prefill_s": first - writing.started,
        "decode_s": last - first,
    }


def _failure(error: Exception) -> dict[str, str]:
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {"error": f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"}
