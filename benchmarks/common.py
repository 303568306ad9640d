"""What several benchmarks share: prompts and lines of progress."""

from __future__ import annotations

import random
import sys

PREFILL_TOKENS = 512


class Prompts:
    """Distinct prompts, the same in every run: tokens drawn at random, since plain decoding takes as long for any."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prompt(self, name: str, tokens: int) -> list[int]:
        draw = random.Random(name)
        return [draw.randrange(self.vocab_size // 10, self.vocab_size * 9 // 10) for _ in range(tokens)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
