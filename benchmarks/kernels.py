"""The native linear layers beside the machine's limits: milliseconds for all weights of the default model.

Every layer has weights of its own (30 distinct copies), so that caches do not flatter. A run goes through all of them
once, as a forward run does. The median of several runs is printed, and after the slash the sum of each layer's own
fastest time, which other programs disturb the least.

    python benchmarks/kernels.py [--threads 2] [--rows 1,8,512] [--kinds bf16,q4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import pairwise

import torch

from foredraft.backends.base import Linear, Weight
from foredraft.backends.native.backend import NativeBackend

LAYERS = 30
LAYER_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, attention output, gate and up, down
HEAD_SHAPE = (49152, 576)
GROUP = 32


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    if kind in ("f32", "bf16"):
        dtype = torch.float32 if kind == "f32" else torch.bfloat16
        return Weight(kind, torch.randn(outputs, inputs, dtype=torch.float32).to(dtype))
    scales = torch.rand(outputs, inputs // GROUP).half() / 100
    if kind == "q8":
        return Weight(kind, torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), scales)
    return Weight(kind, torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8), scales, -8 * scales)


def packed(backend: NativeBackend, kind: str, shape: tuple[int, int]) -> Linear:
    return Linear((backend.pack(random_weight(kind, *shape)),), *shape)


def measure(backend: NativeBackend, stack: list[Linear], rows: int) -> tuple[float, float]:
    """Milliseconds of a run through the whole stack: the median, and the sum of each layer's fastest."""
    inputs = {width: torch.randn(rows, width) for width in {layer.inputs for layer in stack}}
    runs: list[list[float]] = []
    start = time.perf_counter()
    while len(runs) < 3 or (time.perf_counter() - start < 2 and len(runs) < 50):
        ends = [time.perf_counter()]
        for layer in stack:
            backend.linear(inputs[layer.inputs], layer)
            ends.append(time.perf_counter())
        runs.append([1000 * (end - before) for before, end in pairwise(ends)])
    return statistics.median(map(sum, runs)), sum(map(min, zip(*runs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rows", default="1,2,3,4,5,6,7,8,12,16,32,64,512")
    parser.add_argument("--kinds", default="f32,bf16,q8,q4")
    parser.add_argument("--activations", default="int8", choices=("int8", "int16"))
    arguments = parser.parse_args()
    backend = NativeBackend("bfloat16", arguments.threads, activations=arguments.activations)
    row_counts = [int(rows) for rows in arguments.rows.split(",")]
    print(f"median / fastest milliseconds, {arguments.threads} threads; the head of q4 is q8")
    print("kind   MB   " + "".join(f"{rows:>16}" for rows in row_counts))
    for kind in arguments.kinds.split(","):
        stack = [packed(backend, kind, shape) for _ in range(LAYERS) for shape in LAYER_SHAPES]
        stack.append(packed(backend, "q8" if kind == "q4" else kind, HEAD_SHAPE))
        megabytes = sum(part.memory.numel() for layer in stack for part in layer.parts) / 1e6
        print(f"{kind:5}{megabytes:6.0f}  ", end="")
        for rows in row_counts:
            median, fastest = measure(backend, stack, rows)
            print(f"{median:>9.1f}/{fastest:<6.1f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
