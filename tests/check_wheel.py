"""What a user of the wheel sees first, in a bare environment: `make check-wheel`. The first start fetches the model and
proves that rows are exact; the second is what people wait for every day."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "Why does ice float on water?"
FOREDRAFT = Path(sys.executable).parent / "foredraft"


def run(*arguments: str) -> tuple[str, float]:
    """What the command printed, and how many seconds it took."""
    started = time.perf_counter()
    done = subprocess.run([FOREDRAFT, *arguments], check=True, capture_output=True, text=True)
    return done.stdout, time.perf_counter() - started


def main() -> None:
    assert shutil.which("cc") is None and shutil.which("gcc") is None, "a compiler is in reach"
    info = json.loads(run("models", "info", "smollm2-135m", "--json")[0])
    assert info["backend"] == "native", f"the backend is {info['backend']}: {info['note']}"
    assert info["heads"], "the default model's head is missing"
    times = [run("generate", PROMPT, "--max-tokens", "1")[1] for _ in range(4)]
    print(f"kernels: {info['backend']}; to the first token: {times[0]:.1f} s at first, then {min(times[1:]):.1f} s")


if __name__ == "__main__":
    main()
