"""What several benchmarks share: prompts, lines of progress, and the tables in README.md."""

from __future__ import annotations

import random
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
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


def rewrite_readme(section: str, text: str) -> None:
    """Put the text between the marks of a section, <!-- section:begin --> and <!-- section:end -->."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    before, rest = README.read_text(encoding="utf-8").split(begin)
    README.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")
