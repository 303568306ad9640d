"""The kernels alone, with random weights, beside the machine's limits.

    python benchmarks/kernels.py [--threads 2] [--rows 1,8,512] [--kind bf16] [--kind q4] [--activations int16]
    python benchmarks/kernels.py --device cuda --shape 135m --shape 8b --kind bf16 --kind q4 --rows 1,4,16,64 --parts

On a CPU: milliseconds for all linear layers of the default model. Every layer has weights of its own, so that caches do
not flatter. A run goes through all of them once, as a forward run does. The median of several runs is printed, and
after the slash the sum of each layer's own fastest time, which other programs disturb the least.

On a GPU: device times of a whole run, captured as a graph, and with --parts of each kernel. Rows are draft tokens of
one sequence (with --apart: one row each of as many sequences). The floor is the time to read all weights once at the
bandwidth of a large copy; of experts, as many as so many rows have on average.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.layers import AttentionShape, Experts, Layer, LayerKV, Linear, Mlp, Stack
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.weight import Weight
from foredraft.batch import PackedBatch

if torch.cuda.is_available():  # elsewhere there is no Triton
    from foredraft.backends.cuda import linear as cuda_linear
    from foredraft.backends.cuda import rows as cuda_rows
    from foredraft.backends.cuda.backend import CudaBackend
    from foredraft.backends.cuda.experts import layers_of, route
    from foredraft.backends.cuda.plan import Plan, single_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16
KINDS = ("f32", "bf16", "q8", "q4", "mx4")


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    chosen: int = 0


SHAPES = {
    "135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    "1.5b": Shape(1536, 28, 12, 2, 128, 8960, 151936),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256),
    # Layers of Qwen3-30B-A3B and gpt-oss-20b, fewer of them.
    "30b-a3b": Shape(2048, 12, 32, 4, 128, 768, 32768, 128, 8),
    "gpt-oss-20b": Shape(2880, 12, 64, 8, 64, 2880, 32768, 32, 4),
}


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The run as a graph, after one run that compiles its kernels."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of a run that is already warm."""
    run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeats // 2]


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * len(source) / milliseconds(lambda: target.copy_(source)) * 1e3


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    if kind in ("f32", "bf16"):
        dtype = torch.float32 if kind == "f32" else torch.bfloat16
        return Weight(kind, torch.randn(outputs, inputs, device=DEVICE, dtype=dtype).mul_(inputs**-0.5))
    groups = (outputs, inputs // 32)
    if kind == "q8":
        codes = torch.randint(-127, 128, (outputs, inputs), device=DEVICE, dtype=torch.int8)
        return Weight("q8", codes, torch.full(groups, inputs**-0.5 / 73, device=DEVICE).half())
    codes = torch.randint(0, 16, (outputs, inputs), device=DEVICE, dtype=torch.uint8)
    if kind == "mx4":
        return Weight("mx4", codes, torch.full(groups, 120, device=DEVICE, dtype=torch.uint8))
    scales = torch.full(groups, inputs**-0.5 / 4.6, device=DEVICE).half()
    return Weight("q4", codes, scales, -7.5 * scales)


class Model:
    """A random model of a shape, and rows to run through it."""

    def __init__(self, shape: Shape, kind: str) -> None:
        self.shape, self.backend = shape, CudaBackend("bfloat16", DEVICE)
        self.attention = AttentionShape(
            *(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape.head_dim**-0.5, 0, 1e-5)
        )
        layers = tuple(self._layer(kind) for _ in range(shape.layers))
        angles = torch.rand(16384, shape.head_dim // 2, device=DEVICE)
        rope = torch.stack([angles.cos(), angles.sin()], 1)
        self.stack = Stack(layers, torch.ones(shape.hidden, device=DEVICE), rope, 1.0, 1e-5)
        self.head = self._linear("q8" if kind in ("q4", "mx4") else kind, shape.vocab, shape.hidden)
        self.kv: list[LayerKV] = []

    def _linear(self, kind: str, outputs: int, inputs: int) -> Linear:
        return Linear((self.backend.pack(random_weight(kind, outputs, inputs)),), outputs, inputs)

    def _layer(self, kind: str) -> Layer:
        s = self.shape
        norm, attention = torch.ones(s.hidden, device=DEVICE), "q8" if kind == "mx4" else kind
        return Layer(
            input_norm=norm,
            qkv=self._linear(attention, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
            q_norm=None,
            k_norm=None,
            output=self._linear(attention, s.hidden, s.heads * s.head_dim),
            post_norm=norm,
            mlp=self._experts(kind) if s.experts else self._mlp(kind),
            shape=self.attention,
        )

    def _mlp(self, kind: str) -> Mlp:
        s = self.shape
        return Mlp(self._linear(kind, 2 * s.ffn, s.hidden), self._linear(kind, s.hidden, s.ffn))

    def _experts(self, kind: str) -> Experts:
        s = self.shape
        each = tuple(self._mlp(kind) for _ in range(s.experts))
        return Experts(self._linear("f32", s.experts, s.hidden), each, s.chosen, normalised=True)

    def nbytes(self, rows: int) -> int:
        """Of the weights that rows need: those of experts as often as any of the rows chooses them."""
        total = _nbytes([self.head])
        for layer in self.stack.layers:
            total += _nbytes(layer.linears)
            if isinstance(layer.mlp, Experts):
                of_experts = _nbytes(layer.mlp.linears[1:])
                total -= int(of_experts * (1 - self.shape.chosen / self.shape.experts) ** rows)
        return total

    def plan(self, rows: int, context: int, apart: bool) -> Plan:
        """Rows behind `context` tokens, of one sequence or of one each; and a cache that holds them."""
        sequences = rows if apart else 1
        length = context + (1 if apart else rows)
        width = -(-length // BLOCK_SIZE)
        slots = sequences * width * BLOCK_SIZE
        if not self.kv or len(self.kv[0].k) < slots:
            self.kv.clear()
            size = (slots, self.shape.kv_heads, self.shape.head_dim)
            for _ in self.stack.layers:
                self.kv.append(LayerKV(*(torch.randn(size, device=DEVICE).bfloat16() for _ in range(2))))
        tables = np.random.permutation(sequences * width).astype(np.int32).reshape(sequences, width)
        row = np.arange(rows)
        sequence = row if apart else row * 0
        positions = row * 0 + context if apart else context + row
        slots = tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = PackedBatch(
            wide=np.array([row * 0, positions, slots], np.int64),
            narrow=np.array([sequence, positions + 1, row * 0], np.int32),
            block_tables=tables,
            paths=np.zeros((rows, 0), np.int32),
            row_counts=[1] * rows if apart else [rows],
            logit_rows=None,
            block_size=BLOCK_SIZE,
            max_keys=-(-length // 1024) * 1024,
            reach=length,
        )
        plan = single_plan(batch, self.attention, DEVICE)
        plan.upload()
        return plan

    def run(self, plan: Plan, x: Tensor) -> Tensor:
        _, normed = self.backend.run_layers(x, self.stack, self.kv, plan)
        return self.backend.logits(normed, self.head)

    def parts(self, plan: Plan, x: Tensor) -> dict[str, Callable[[], object]]:
        """Each kernel over all layers, so that no weight is read from the cache."""
        layers, rows, s = self.stack.layers, len(x), self.shape
        dtype = cuda_linear.operand_dtype(layers[0].qkv)
        normed, q = x.to(dtype), torch.randn(rows, s.heads * s.head_dim, device=DEVICE).bfloat16()
        attended = q.to(dtype)
        qkv, update = cuda_linear.sums(normed, layers[0].qkv), cuda_linear.sums(attended, layers[0].output)

        def all_layers(call: Callable[[Layer, LayerKV], object]) -> Callable[[], object]:
            return lambda: [call(layer, kv) for layer, kv in zip(layers, self.kv, strict=True)]

        def rope(layer: Layer, kv: LayerKV) -> object:
            where = plan.positions, plan.slots
            return cuda_rows.rope_and_store(qkv, (None, None), self.stack.rope, kv, layer.shape, *where)

        return {
            "qkv": all_layers(lambda layer, kv: cuda_linear.sums(normed, layer.qkv)),
            "rope": all_layers(rope),
            "attend": all_layers(lambda layer, kv: self.backend._attend(q, kv, layer.shape, plan, None, dtype)),
            "output": all_layers(lambda layer, kv: cuda_linear.sums(attended, layer.output)),
            "norm": all_layers(lambda layer, kv: cuda_rows.add_norm(x, update, 1.0, layer.post_norm, 1e-5, dtype)),
            **{name: all_layers(part) for name, part in self._mlp_parts(normed).items()},
        }

    def _mlp_parts(self, normed: Tensor) -> dict[str, Callable[[Layer, LayerKV], object]]:
        s, rows, dtype = self.shape, len(normed), normed.dtype
        active = torch.randn(rows * max(1, s.chosen), s.ffn, device=DEVICE).to(dtype)
        if not s.experts:
            return {
                "gate_up": lambda layer, kv: cuda_linear.gated(normed, layer.mlp.gate_up, dtype),
                "down": lambda layer, kv: cuda_linear.sums(active, layer.mlp.down),
            }
        joined = {layer.mlp: layers_of(layer.mlp) for layer in self.stack.layers}
        scores = {layer.mlp: cuda_linear.sums(normed, layer.mlp.router) for layer in self.stack.layers}
        routes = {experts: route(sums, experts, None) for experts, sums in scores.items()}
        return {
            "router": lambda layer, kv: cuda_linear.sums(normed, layer.mlp.router),
            "route": lambda layer, kv: route(scores[layer.mlp], layer.mlp, None),
            "gate_up": lambda layer, kv: cuda_linear.gated(
                normed, joined[layer.mlp].gate_up, dtype, "silu", routes[layer.mlp]
            ),
            "down": lambda layer, kv: cuda_linear.from_experts(active, joined[layer.mlp].down, routes[layer.mlp]),
        }


def _nbytes(linears: list[Linear]) -> int:
    return sum(part.nbytes for linear in linears for part in linear.parts)


def on_gpu(options: argparse.Namespace) -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, context {options.context}")
    for name in options.shape or SHAPES:
        for kind in options.kind or ("bf16", "q4"):
            model = Model(SHAPES[name], kind)
            print(f"{name} {kind}: {model.nbytes(1) / 1e9:.2f} GB for a row")
            for rows in map(int, (options.rows or "1,4,16,64").split(",")):
                _report(model, rows, options, model.nbytes(rows) / bandwidth * 1e3)
            if options.prompt:
                _report_prompt(model, options.prompt)
            del model


def _report(model: Model, rows: int, options: argparse.Namespace, floor: float) -> None:
    with torch.inference_mode():
        plan = model.plan(rows, options.context, options.apart)
        x = torch.randn(rows, model.shape.hidden, device=DEVICE)
        graph = captured(lambda: model.run(plan, x.clone()))
        took = milliseconds(graph.replay)
        line = f"  rows {rows:4d}: {took:7.3f} ms, {took / floor:5.2f} x floor of {floor:.3f} ms"
        if options.parts:
            parts = {name: milliseconds(captured(part).replay) for name, part in model.parts(plan, x).items()}
            normed = x.to(cuda_linear.operand_dtype(model.head))
            head = milliseconds(captured(lambda: model.backend.logits(normed, model.head)).replay)
            line += " | us a layer:"
            line += "".join(f" {part} {ms * 1e3 / model.shape.layers:.1f}" for part, ms in parts.items())
            line += f" | head {head * 1e3:.0f} us"
        print(line, flush=True)


def _report_prompt(model: Model, rows: int) -> None:
    with torch.inference_mode():
        plan = model.plan(rows, 0, apart=False)
        x = torch.randn(rows, model.shape.hidden, device=DEVICE)

        def run() -> None:
            model.backend.run_layers(x.clone(), model.stack, model.kv, plan)

        run()
        took = milliseconds(run, 5)
        s = model.shape
        per_row = (s.heads + 2 * s.kv_heads) * s.head_dim * s.hidden + s.heads * s.head_dim * s.hidden
        operations = 2 * rows * s.layers * (per_row + 3 * s.hidden * s.ffn * max(1, s.chosen))
        a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
        peak = 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
        rate = operations / took / 1e9
        print(f"  prompt {rows}: {took:.2f} ms, {rate:.0f} TFLOP/s in layers, {rate / peak:.2f} of matmul's {peak:.0f}")


def linears_ms(backend: NativeBackend, stack: list[Linear], rows: int) -> tuple[float, float]:
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


def on_cpu(options: argparse.Namespace) -> None:
    s, backend = SHAPES["135m"], NativeBackend("bfloat16", options.threads, activations=options.activations)
    shapes = [
        ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        (s.hidden, s.heads * s.head_dim),
        (2 * s.ffn, s.hidden),
        (s.hidden, s.ffn),
    ]

    def packed(kind: str, outputs: int, inputs: int) -> Linear:
        return Linear((backend.pack(random_weight(kind, outputs, inputs)),), outputs, inputs)

    row_counts = [int(rows) for rows in (options.rows or "1,2,3,4,5,6,7,8,12,16,32,64,512").split(",")]
    print(f"median / fastest milliseconds, {options.threads} threads; the head of q4 is q8")
    print("kind   MB   " + "".join(f"{rows:>16}" for rows in row_counts))
    for kind in options.kind or KINDS:
        stack = [packed(kind, *shape) for _ in range(s.layers) for shape in shapes]
        stack.append(packed("q8" if kind == "q4" else kind, s.vocab, s.hidden))
        megabytes = sum(part.memory.numel() for layer in stack for part in layer.parts) / 1e6
        print(f"{kind:5}{megabytes:6.0f}  ", end="")
        for rows in row_counts:
            median, fastest = linears_ms(backend, stack, rows)
            print(f"{median:>9.1f}/{fastest:<6.1f}", end="", flush=True)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--rows")
    cpu, gpu = parser.add_argument_group("on a CPU"), parser.add_argument_group("on a GPU")
    cpu.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    cpu.add_argument("--activations", default="int8", choices=("int8", "int16"))
    gpu.add_argument("--shape", action="append", choices=SHAPES)
    gpu.add_argument("--context", type=int, default=512)
    gpu.add_argument("--apart", action="store_true", help="each row is a sequence of its own")
    gpu.add_argument("--parts", action="store_true", help="also the time of each kernel")
    gpu.add_argument("--prompt", type=int, default=0, help="also a prompt of so many tokens")
    options = parser.parse_args()
    if options.device == "cpu":
        global DEVICE
        DEVICE = torch.device("cpu")
        on_cpu(options)
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    else:
        on_gpu(options)


if __name__ == "__main__":
    main()
