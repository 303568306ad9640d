"""The cost of a query of `ngram` and `suffix` per sequence and step, by the length of the sequence: it must not grow.

`copying` texts add eight tokens a step that were there before; `new` texts add one that was drawn at random. Token ids
follow a heavy-tailed distribution, as words do, so that short n-grams recur often.

    python benchmarks/proposers.py [--lengths 500,1000,4000,16000] [--steps 200]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from foredraft.params import SamplingParams
from foredraft.proposers.ngram import Ngram, NgramOptions
from foredraft.proposers.suffix import Suffix
from foredraft.proposers.suffix_options import SuffixOptions
from foredraft.types import Sequence

VOCAB = 49152


def words(chance: random.Random) -> int:
    return min(int(chance.paretovariate(0.6)), VOCAB - 1)


def additions(kind: str, text: list[int], chance: random.Random) -> Iterator[list[int]]:
    place = len(text) // 3
    while True:
        yield [text[(place + offset) % len(text)] for offset in range(8)] if kind == "copying" else [words(chance)]
        place += 8


def measure(kind: str, length: int, steps: int) -> dict[str, float]:
    """Median milliseconds of one call."""
    chance = random.Random(1)
    text = [words(chance) for _ in range(length)]
    proposers = {"ngram": Ngram(NgramOptions()), "suffix": Suffix(SuffixOptions())}
    live = Sequence(1, "", 0, list(text), length, SamplingParams().resolved({}), 0, 10**9)
    times: dict[str, list[float]] = {name: [] for name in proposers}
    for new, _ in zip(additions(kind, text, chance), range(steps + 1), strict=False):
        for name, proposer in proposers.items():
            started = time.perf_counter()
            proposer.propose([live], [proposer.num_lookahead_tokens], 0.0)
            times[name].append(1000 * (time.perf_counter() - started))
        live.token_ids += new
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first call enters the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="500,1000,4000,16000")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print("milliseconds per step and sequence\ntext      tokens    ngram   suffix  together")
    for kind in ("copying", "new"):
        for length in map(int, arguments.lengths.split(",")):
            found = measure(kind, length, arguments.steps)
            print(f"{kind:8}{length:8}{found['ngram']:9.3f}{found['suffix']:9.3f}{sum(found.values()):10.3f}")


if __name__ == "__main__":
    main()
