"""Mutation fuzz of GGUF files: a mutated file gives a model or one sentence, in little time and memory.

    python -m tests.fuzz_gguf --count 10000

Files of several architectures, types and tokenizers are mutated in their structure, where the file stays well formed,
and in their bytes. Each is opened in a process of its own, its tokenizer is built and all of its tensors are read. Any
other exception than a ForedraftError, a crash, and a load above the limits is a failure; `--keep FOLDER` keeps those
files. Mutation `i` depends on the seed and `i` alone, so `--seed S --first i --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ForedraftError
from foredraft.models.catalog import open_checkpoint
from tests.gguf_mutations import base_files, mutated

LIMIT_SECONDS = 0.5  # of processor time: other processes must not make a file look slow
LIMIT_MB = 200
_HANG_SECONDS = 30
_ADDRESS_SPACE = 4 << 30  # above what a child starts with: a runaway allocation fails instead of taking the machine


def load(path: Path) -> None:
    """All that can be read from a model file."""
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("ab 12"))
    for name in sorted(checkpoint.names()):
        if name.endswith(("norm.weight", ".bias")):
            checkpoint.vector(name)
        else:
            checkpoint.weight(name).dense()


@dataclass(frozen=True)
class Verdict:
    """What came of a file: "loaded", "refused" with the sentence in `detail`, or "failed" with the reason."""

    outcome: str
    detail: str
    seconds: float = 0.0  # of processor time
    wall_seconds: float = 0.0
    peak_mb: float = 0.0  # of memory, above what there was before


def judge(path: Path, load: Callable[[Path], None] = load) -> Verdict:
    """Load a file in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_measured(path, load)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return Verdict("failed", f"the process ended with status {status}")
    verdict = Verdict(*json.loads(answer))
    if verdict.outcome != "failed" and (verdict.seconds > LIMIT_SECONDS or verdict.peak_mb > LIMIT_MB):
        took = f"{verdict.seconds:.2f} s and {verdict.peak_mb:.0f} MB"
        return replace(verdict, outcome="failed", detail=f"{took} until: {verdict.detail}")
    return verdict


def _measured(path: Path, load: Callable[[Path], None]) -> tuple[str, str, float, float, float]:
    signal.alarm(_HANG_SECONDS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, wall, processor = _peak_mb(), time.perf_counter(), time.process_time()
    outcome, detail = "loaded", ""
    try:
        load(path)
    except ForedraftError as error:
        outcome, detail = "refused", str(error)
    except BaseException:
        outcome, detail = "failed", traceback.format_exc()[-1500:]
    seconds, wall_seconds = time.process_time() - processor, time.perf_counter() - wall
    return outcome, detail[:3000], seconds, wall_seconds, _peak_mb() - before


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def fuzz(seed: int, first: int, count: int, keep: Path | None) -> dict[str, Any]:
    """Judge so many mutations; the summary is ready for JSON."""
    torch.set_num_threads(1)  # a child of a process with threads has none of them
    bases = base_files()
    outcomes: Counter[str] = Counter()
    sentences: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = slowest_wall = peak = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for base in bases:
            path.write_bytes(base.encode())
            load(path)  # imports happen here, not in the children
        for index in range(first, first + count):
            path.write_bytes(mutated(bases, seed, index))
            verdict = judge(path)
            outcomes[verdict.outcome] += 1
            slowest, slowest_wall = max(slowest, verdict.seconds), max(slowest_wall, verdict.wall_seconds)
            peak = max(peak, verdict.peak_mb)
            if verdict.outcome == "refused":
                sentences[_kind_of(verdict.detail, path)] += 1
            if verdict.outcome == "failed":
                failures.append({"index": index, "reason": verdict.detail})
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{seed}-{index}.gguf").write_bytes(path.read_bytes())
    return {
        "files": count,
        **outcomes,
        "kinds_of_sentences": len(sentences),
        "slowest_processor_s": round(slowest, 4),
        "slowest_wall_s": round(slowest_wall, 4),
        "peak_mb": round(peak, 1),
        "failures": failures,
    }


def _kind_of(sentence: str, path: Path) -> str:
    """A sentence without its names and numbers."""
    return re.sub(r"'[^']*'|\[[^]]*\]|-?\d[\w.+-]*", "_", sentence.replace(str(path), ""))[:120]


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation fuzz of GGUF files.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    summary = fuzz(options.seed, options.first, options.count, options.keep)
    print(json.dumps(summary, indent=2))
    sys.exit(1 if summary["failures"] else 0)


if __name__ == "__main__":
    main()
