"""Every native kernel against a float64 reference, and every row against itself in other company: equal bits."""

from __future__ import annotations

import ctypes
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.base import AttentionShape, LayerKV, Linear, Weight
from foredraft.backends.native import NativeBackend, load_library, open_library
from foredraft.engine.batch import ForwardBatch
from foredraft.kernels.build import Level, usable_levels

LEVELS = usable_levels()
KINDS = ("f32", "bf16", "q8", "q6", "q5", "q4", "q5k", "q4k")
BLOCKS = ("q6", "q5k", "q4k")  # kinds whose inputs come in blocks of 256
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 65)
THREADS = 2
BLOCK = 16

pytestmark = pytest.mark.skipif(not LEVELS, reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Fresh numbers in every run; a failure prints how to repeat it with FOREDRAFT_SEED."""
    value = int(os.environ.get("FOREDRAFT_SEED", random.randrange(2**31)))
    print(f"FOREDRAFT_SEED={value}")
    torch.manual_seed(value)


def backend_of(level: Level) -> NativeBackend:
    try:
        return NativeBackend("float32", THREADS, open_library(level.library))
    except OSError as error:  # the processor has the level, but the system does not grant it
        pytest.skip(str(error))


@pytest.fixture(params=[level.name for level in LEVELS])
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return backend_of(next(level for level in LEVELS if level.name == request.param))


def error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm())


def fitting(kind: str, inputs: int) -> int:
    """As many inputs, or the next number that a weight of this kind can have."""
    return -(-inputs // 256) * 256 if kind in BLOCKS else inputs


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    """Without minimums the codes lie around 0, with them the weights do."""
    if kind == "f32":
        return Weight(kind, torch.randn(outputs, inputs))
    if kind == "bf16":
        return Weight(kind, torch.randn(outputs, inputs).bfloat16())
    if kind == "q8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        return Weight(kind, codes, torch.rand(outputs, inputs // 32).half() + 0.01)
    if kind == "q6":
        codes = torch.randint(-32, 32, (outputs, inputs), dtype=torch.int8)
        scales = torch.randint(-128, 128, (outputs, inputs // 16), dtype=torch.int8)
        return Weight(kind, codes, scales, block_scales=torch.randn(outputs, inputs // 256).half() / 128)
    limit = 16 if kind in ("q4", "q4k") else 32
    codes = torch.randint(0, limit, (outputs, inputs), dtype=torch.uint8)
    if kind in BLOCKS:
        scales = torch.randint(0, 64, (outputs, inputs // 32), dtype=torch.int8)
        block_scales = torch.rand(outputs, inputs // 256).half() / 64
        return Weight(kind, codes, scales, scales.flip(1), block_scales, -block_scales * limit / 2)
    scales = torch.rand(outputs, inputs // 32).half() + 0.01
    return Weight(kind, codes, scales, torch.randn(outputs, inputs // 32).half() - scales * limit / 2)


def linear_of(backend: NativeBackend, *weights: Weight, bias: bool = True) -> Linear:
    outputs = sum(weight.outputs for weight in weights)
    parts = tuple(backend.pack(weight) for weight in weights)
    return Linear(parts, outputs, weights[0].inputs, torch.randn(outputs) if bias else None)


def bf16_rounded(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 96), (40, 64), (100, 576), (333, 1568)])
def test_linear_is_exact_and_rows_do_not_know_each_other(
    backend: NativeBackend, kind: str, outputs: int, inputs: int
) -> None:
    inputs = fitting(kind, inputs)
    weight = random_weight(kind, outputs, inputs)
    layer = linear_of(backend, weight)
    x = bf16_rounded(max(ROW_COUNTS), inputs)
    together = backend.linear(x, layer)
    assert layer.bias is not None
    reference = x.double() @ weight.dense().double().T + layer.bias.double()
    assert error(together, reference) < 1e-5
    for rows in ROW_COUNTS:
        first = int(torch.randint(0, len(x) - rows + 1, ()))
        assert torch.equal(backend.linear(x[first : first + rows], layer), together[first : first + rows])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 55, 769, 1538])
def test_linear_takes_any_number_of_inputs(backend: NativeBackend, kind: str, inputs: int) -> None:
    weight = random_weight(kind, 21, inputs)
    x = torch.randn(19, inputs)
    layer = linear_of(backend, weight, bias=False)
    assert error(backend.linear(x, layer), x.double() @ weight.dense().double().T) < 1e-5
    assert torch.equal(backend.linear(x[4:5], layer), backend.linear(x, layer)[4:5])


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("inputs", [32, 96, 608])
@pytest.mark.parametrize("kind", ["q8", "q6", "q5", "q5k", "q4", "q4k"])
def test_quantised_layers_have_the_same_bits_at_every_level(kind: str, inputs: int, level: Level) -> None:
    """Whatever serves a number of rows: packed codes, unpacked ones, or tiles."""
    inputs = fitting(kind, inputs)
    plainest = next((other for other in reversed(LEVELS) if other.name != "sse4"), level)
    if level.name in ("sse4", plainest.name):
        pytest.skip("sse4 rounds each multiply-add twice, and a level need not be compared with itself")
    weight = random_weight(kind, 40, inputs)
    backends = backend_of(level), backend_of(plainest)
    layers = [linear_of(backend, weight, bias=False) for backend in backends]
    x = torch.randn(70, inputs) * torch.logspace(-9, 9, 70)[:, None]
    x[3, 5] = x[40, inputs - 1] = 65278.0  # a group whose largest number just fits two planes of int8
    expected = backends[1].linear(x, layers[1])
    for rows in range(1, 71):
        assert torch.equal(backends[0].linear(x[70 - rows :], layers[0]), expected[70 - rows :])


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (33, 31), (40, 65), (100, 130), (17, 700)])
def test_bf16_rows_do_not_know_how_many_there_are(backend: NativeBackend, outputs: int, inputs: int) -> None:
    weight = random_weight("bf16", outputs, inputs)
    layer = linear_of(backend, weight, bias=False)
    x = torch.randn(70, inputs) * torch.logspace(-9, 9, 70)[:, None]
    together = backend.linear(x, layer)
    reference = x.double() @ weight.dense().double().T
    assert max(error(row, right) for row, right in zip(together, reference, strict=True)) < 1e-5
    for rows in range(1, 70):
        assert torch.equal(backend.linear(x[70 - rows :], layer), together[70 - rows :])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 3.4e38, -3.4e38])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_what_is_huge_or_infinite_stays_so(backend: NativeBackend, kind: str, value: float) -> None:
    weight = Weight(kind, (torch.randn(40, 67) * 2.0**-20).to(torch.float32 if kind == "f32" else torch.bfloat16))
    x = torch.randn(5, 67)
    x[2, 66] = value
    result = backend.linear(x, linear_of(backend, weight, bias=False))
    assert torch.allclose(result.double(), x.double() @ weight.dense().double().T, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    inputs = fitting(kind, 576)
    weight = random_weight(kind, 1000, inputs)
    results = []
    for threads in (1, 2, 3):
        backend = NativeBackend("float32", threads)
        layer = Linear((backend.pack(weight),), 1000, inputs)
        torch.manual_seed(7)
        results.append([backend.linear(torch.randn(rows, inputs), layer) for rows in (1, 9, 300)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_parts_of_several_kinds_fill_one_output(backend: NativeBackend) -> None:
    weights = [random_weight(kind, outputs, 64) for kind, outputs in (("q4", 33), ("q8", 16), ("bf16", 5))]
    layer = linear_of(backend, *weights)
    x = bf16_rounded(6, 64)
    assert layer.bias is not None
    reference = x.double() @ torch.cat([weight.dense() for weight in weights]).double().T + layer.bias.double()
    assert error(backend.linear(x, layer), reference) < 1e-5


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-140, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("kind", KINDS[2:])
def test_extreme_activations_are_not_lost(backend: NativeBackend, kind: str, magnitude: float) -> None:
    weight = random_weight(kind, 16, fitting(kind, 64))
    x = bf16_rounded(3, weight.inputs) * magnitude
    result = backend.linear(x, linear_of(backend, weight, bias=False))
    dense = weight.dense().double()
    size = float((x.double().abs() @ dense.abs().T).max())  # of what is added up: the sums themselves may cancel
    assert torch.allclose(result.double(), x.double() @ dense.T, rtol=0, atol=1e-5 * size + 1e-33)


def test_a_broken_row_stays_alone(backend: NativeBackend) -> None:
    for kind in KINDS:
        layer = linear_of(backend, random_weight(kind, 40, fitting(kind, 64)))
        x = torch.randn(9, layer.inputs)
        clean = backend.linear(x, layer)
        x[4, 7] = float("nan")
        broken = backend.linear(x, layer)
        others = [row for row in range(9) if row != 4]
        assert torch.equal(broken[others], clean[others])
        assert broken[4].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_returns_the_dequantised_rows(backend: NativeBackend, kind: str) -> None:
    inputs = fitting(kind, 96)
    weights = [random_weight(kind, 50, inputs), random_weight("q8", 30, inputs)]
    ids = torch.randint(0, 80, (23,))
    expected = torch.cat([weight.dense() for weight in weights])[ids]
    assert torch.equal(backend.embed(ids, linear_of(backend, *weights)), expected)


@pytest.mark.parametrize("width", [1, 7, 64, 576, 577, 1000])
def test_norms_and_gate(backend: NativeBackend, width: int) -> None:
    x, update, weight = torch.randn(33, width), torch.randn(33, width), torch.randn(width)

    def reference(value: Tensor) -> Tensor:
        value = value.double()
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert error(backend.rms_norm(x, weight, 1e-5), reference(x)) < 1e-6
    total, normed = backend.add_rms_norm(x.clone(), update, 0.5, weight, 1e-5)
    assert torch.equal(total, x + 0.5 * update)
    assert error(normed, reference(total)) < 1e-6
    gate_up = 8 * torch.randn(33, 2 * width)
    gate, up = gate_up.double().split(width, dim=1)
    result = backend.gated(gate_up)
    assert error(result, torch.nn.functional.silu(gate) * up) < 1e-6
    for row in (0, 13, 32):
        one = slice(row, row + 1)
        assert torch.equal(backend.rms_norm(x[one], weight, 1e-5), backend.rms_norm(x, weight, 1e-5)[one])
        assert torch.equal(backend.gated(gate_up[one]), result[one])


def test_gate_survives_extreme_values(backend: NativeBackend) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    result = backend.gated(torch.cat([gates, torch.ones_like(gates)], 1))
    assert torch.allclose(result, torch.nn.functional.silu(gates), atol=1e-30)


# Attention: texts of several lengths, scattered over the shuffled blocks of a cache that is NaN everywhere else.


class Scene:
    """Sequences with their keys and values, a cache that holds them, and rows that look at them."""

    def __init__(self, shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype) -> None:
        self.shape, self.lengths = shape, lengths
        self.width = (max(lengths) + 40) // BLOCK + 1
        blocks = len(lengths) * self.width + 3
        self.tables = torch.randperm(blocks)[: len(lengths) * self.width].view(len(lengths), -1).int()
        self.cache = LayerKV(*(self._nothing(blocks, kv_dtype) for _ in range(2)))
        self.rows: list[tuple[int, int, list[int]]] = []  # sequence, prefix length, path offsets
        for sequence, length in enumerate(lengths):
            for side in (self.cache.k, self.cache.v):
                values = torch.randn(length, shape.num_kv_heads, shape.head_dim).to(kv_dtype)
                side[self.slots(sequence, torch.arange(length))] = values

    def _nothing(self, blocks: int, dtype: torch.dtype) -> Tensor:
        return torch.full((blocks * BLOCK, self.shape.num_kv_heads, self.shape.head_dim), float("nan"), dtype=dtype)

    def slots(self, sequence: int, offsets: Tensor) -> Tensor:
        return self.tables[sequence].long()[offsets // BLOCK] * BLOCK + offsets % BLOCK

    def batch(self, rows: list[int] | None = None) -> ForwardBatch:
        chosen = self.rows if rows is None else [self.rows[row] for row in rows]
        depth = max(len(path) for _, _, path in chosen)
        paths = torch.full((len(chosen), depth), -1, dtype=torch.int32)
        for row, (_, _, path) in enumerate(chosen):
            paths[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
        positions = torch.tensor([prefix + len(path) - 1 for _, prefix, path in chosen])
        return ForwardBatch(
            token_ids=torch.zeros(len(chosen), dtype=torch.int64),
            positions=positions,
            slots=torch.zeros(len(chosen), dtype=torch.int64),
            sequences=torch.tensor([sequence for sequence, _, _ in chosen], dtype=torch.int32),
            block_tables=self.tables,
            prefix_lens=torch.tensor([prefix for _, prefix, _ in chosen], dtype=torch.int32),
            paths=paths,
            path_lens=torch.tensor([len(path) for _, _, path in chosen], dtype=torch.int32),
            logit_rows=torch.arange(len(chosen)),
            block_size=BLOCK,
            max_keys=int(positions.max()) + 1,
        )

    def reference(self, q: Tensor) -> Tensor:
        shape, out = self.shape, []
        for row, (sequence, prefix, path) in enumerate(self.rows):
            offsets = torch.tensor([*range(prefix), *path])
            offsets = offsets[-shape.window :] if shape.window else offsets
            slots = self.slots(sequence, offsets)
            group = shape.num_heads // shape.num_kv_heads
            k, v = (side[slots].double().repeat_interleave(group, 1) for side in (self.cache.k, self.cache.v))
            query = q[row].double().view(shape.num_heads, shape.head_dim)
            weights = torch.softmax(torch.einsum("hd,khd->hk", query, k) * shape.scale, -1)
            out.append(torch.einsum("hk,khd->hd", weights, v).flatten())
        return torch.stack(out)


def attention_shape(group: int, head_dim: int, window: int = 0, rotary_dim: int = 0) -> AttentionShape:
    return AttentionShape(3 * group, 3, head_dim, rotary_dim, head_dim**-0.5, window, 1e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "head_dim", "window"), [(1, 64, 0), (3, 64, 0), (4, 80, 100), (3, 24, 64), (7, 16, 5)]
)
def test_attention(backend: NativeBackend, kv_dtype: str, group: int, head_dim: int, window: int) -> None:
    backend = NativeBackend(kv_dtype, THREADS, backend._library)
    scene = Scene(attention_shape(group, head_dim, window), [1, 63, 64, 65, 500, 4000], backend.kv_dtype)
    for sequence, length in enumerate(scene.lengths):
        scene.rows.append((sequence, length, []))  # plain decoding
        scene.rows += [(sequence, end, []) for end in range(max(1, length - 70), length, 3)]  # a prompt chunk
        prefix = max(1, length - 9)
        tree = [[0], [1], [0, 2], [0, 3], [1, 4], [0, 2, 5], [0, 2, 5, 6]]
        scene.rows += [(sequence, prefix, [prefix + n for n in path]) for path in tree if prefix + max(path) < length]
    q = torch.randn(len(scene.rows), scene.shape.num_heads * head_dim)
    together = backend.attend(q, scene.cache, scene.shape, scene.batch())
    assert error(together, scene.reference(q)) < 1e-5
    shuffled = torch.randperm(len(scene.rows))
    reordered = backend.attend(q[shuffled], scene.cache, scene.shape, scene.batch(shuffled.tolist()))
    assert torch.equal(reordered, together[shuffled])
    for threads in (1, THREADS):
        alone = NativeBackend(kv_dtype, threads, backend._library)
        for row in shuffled[:25].tolist():
            result = alone.attend(q[row : row + 1], scene.cache, scene.shape, scene.batch([row]))
            assert torch.equal(result, together[row : row + 1])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", [1, 60, 64, 150])
def test_a_drafted_row_does_not_know_how_many_there_are(backend: NativeBackend, kv_dtype: str, prefix: int) -> None:
    backend = NativeBackend(kv_dtype, THREADS, backend._library)
    scene = Scene(attention_shape(3, 64), [200], backend.kv_dtype)
    paths: list[list[int]] = [[prefix]]  # a chain whose every third node has a sibling
    for node in range(1, 20):
        parent = paths[-2] if node % 3 == 0 else paths[-1]
        paths.append([*parent, prefix + node])
    scene.rows = [(0, prefix, path) for path in paths]
    q = torch.randn(len(paths), scene.shape.num_heads * 64)
    together = backend.attend(q, scene.cache, scene.shape, scene.batch())
    assert error(together, scene.reference(q)) < 1e-5
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17):
        first = int(torch.randint(0, len(paths) - rows + 1, ()))
        chosen = list(range(first, first + rows))
        result = backend.attend(q[chosen], scene.cache, scene.shape, scene.batch(chosen))
        assert torch.equal(result, together[chosen])


def test_a_drafted_row_equals_the_same_row_decoded_plainly(backend: NativeBackend) -> None:
    scene = Scene(attention_shape(3, 64), [200, 200], torch.float32)
    branch = [190, 193, 196, 199]  # one path of a tree whose nodes lie at 190 ... 199
    for side in (scene.cache.k, scene.cache.v):
        side[scene.slots(1, torch.arange(190))] = side[scene.slots(0, torch.arange(190))]
        side[scene.slots(1, torch.arange(190, 194))] = side[scene.slots(0, torch.tensor(branch))]
    scene.rows = [(0, 190, branch), (1, 194, [])]
    q = torch.randn(1, 9 * 64).expand(2, -1).contiguous()
    drafted, plain = backend.attend(q, scene.cache, scene.shape, scene.batch())
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norms"), [(64, 64, False), (64, 32, True), (80, 80, True), (24, 0, False)]
)
def test_rope_and_store(backend: NativeBackend, kv_dtype: str, head_dim: int, rotary_dim: int, norms: bool) -> None:
    backend = NativeBackend(kv_dtype, THREADS, backend._library)
    shape = attention_shape(3, head_dim, rotary_dim=rotary_dim)
    scene = Scene(shape, [300], backend.kv_dtype)
    scene.rows = [(0, int(end), []) for end in torch.randint(1, 300, (65,))]
    batch = scene.batch()
    batch.slots.copy_(torch.randperm(len(scene.cache.k))[:65])
    angles = torch.rand(300, max(1, rotary_dim // 2)) * 6
    rope = torch.stack([angles.cos(), angles.sin()], 1)
    q_norm, k_norm = (torch.randn(head_dim), torch.randn(head_dim)) if norms else (None, None)
    qkv = torch.randn(65, 15 * head_dim)

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.double()
        if norm is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + shape.norm_eps).sqrt() * norm.double()
        cos, sin = rope[batch.positions].double().unbind(1)
        a, b = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
        if rotary_dim:
            cos, sin = cos[:, None], sin[:, None]
            x = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], -1)
        return x

    before = scene.cache.k.clone()
    q = backend.rope_and_store(qkv, q_norm, k_norm, rope, scene.cache, shape, batch)
    heads = qkv.view(65, 15, head_dim)
    assert error(q, turned(heads[:, :9], q_norm).flatten(1)) < 1e-6
    tolerance = 1e-6 if kv_dtype == "float32" else 4e-3
    assert error(scene.cache.k[batch.slots], turned(heads[:, 9:12], k_norm)) < tolerance
    assert torch.equal(scene.cache.v[batch.slots], heads[:, 12:].to(backend.kv_dtype))
    untouched = torch.ones(len(before), dtype=torch.bool).index_fill(0, batch.slots, False)
    assert torch.equal(scene.cache.k[untouched].nan_to_num(7), before[untouched].nan_to_num(7))
    scene.rows = scene.rows[3:4]
    single = scene.batch()
    single.slots.copy_(batch.slots[3:4])
    assert torch.equal(backend.rope_and_store(qkv[3:4], q_norm, k_norm, rope, scene.cache, shape, single), q[3:4])


def test_wrong_input_is_an_exception_and_not_a_crash(backend: NativeBackend) -> None:
    layer = linear_of(backend, random_weight("q4", 40, 64))
    shape, other_shape = attention_shape(3, 64, rotary_dim=64), attention_shape(9, 64)
    scene = Scene(shape, [30], torch.float32)
    scene.rows = [(0, 30, [])]
    batch, q, rope = scene.batch(), torch.randn(1, 576), torch.zeros(30, 2, 32)
    wrong_calls = [
        lambda: backend.linear(torch.randn(2, 63), layer),
        lambda: backend.linear(torch.randn(64, 2).T, layer),
        lambda: backend.linear(torch.randn(2, 64).double(), layer),
        lambda: backend.linear(None, layer),  # type: ignore[arg-type]
        lambda: backend.linear(torch.randn(2, 64), Linear(layer.parts, 41, 64)),
        lambda: backend.linear(torch.randn(2, 64), Linear(layer.parts, 39, 64)),
        lambda: backend.embed(torch.tensor([40]), layer),
        lambda: backend.embed(torch.tensor([-1]), layer),
        lambda: backend.gated(torch.randn(2, 7)),
        lambda: backend.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5),
        lambda: backend.pack(Weight("q4", torch.zeros(4, 33, dtype=torch.uint8), *[torch.zeros(4, 1).half()] * 2)),
        lambda: backend.pack(Weight("q4", torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1).half())),
        lambda: backend.pack(Weight("q4", torch.zeros(4, 32, dtype=torch.uint8), *[torch.zeros(4, 1)] * 2)),
        lambda: backend.pack(replace(random_weight("q4k", 4, 256), block_minimums=None)),
        lambda: backend.pack(replace(random_weight("q6", 4, 256), values=torch.zeros(4, 224, dtype=torch.int8))),
        lambda: backend.pack(Weight("q3", torch.zeros(4, 32, dtype=torch.uint8))),
        lambda: backend.attend(torch.randn(1, 575), scene.cache, shape, batch),
        lambda: backend.attend(q, LayerKV(scene.cache.k, scene.cache.v.bfloat16()), shape, batch),
        lambda: backend.attend(q, LayerKV(scene.cache.k[:20], scene.cache.v[:20]), shape, batch),
        lambda: backend.rope_and_store(torch.randn(1, 960), None, None, rope[:29], scene.cache, shape, batch),
        lambda: backend.attend(torch.randn(1, 27 * 64), scene.cache, replace(other_shape, num_kv_heads=9), batch),
        lambda: NativeBackend("float32", 0),
    ]
    for call in wrong_calls:
        with pytest.raises((ValueError, RuntimeError), match=r"\.$"):
            call()
    for name in ("sequences", "block_tables", "prefix_lens", "path_lens", "slots"):
        corrupted = scene.batch()
        getattr(corrupted, name)[:] = 10**6
        with pytest.raises(ValueError, match="native kernel"):
            backend.rope_and_store(torch.randn(1, 960), None, None, rope, scene.cache, shape, corrupted)
            backend.attend(q, scene.cache, shape, corrupted)


def test_python_threads_may_share_the_kernels(backend: NativeBackend) -> None:
    layer = linear_of(backend, random_weight("q4", 500, 320))
    inputs = [torch.randn(rows, 320) for rows in (1, 2, 5, 40) * 10]
    expected = [backend.linear(x, layer) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: backend.linear(x, layer), inputs))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_nothing_in_nothing_out(backend: NativeBackend) -> None:
    layer = linear_of(backend, random_weight("bf16", 40, 64))
    assert backend.linear(torch.empty(0, 64), layer).shape == (0, 40)
    assert backend.embed(torch.empty(0, dtype=torch.int64), layer).shape == (0, 64)
    assert backend.gated(torch.empty(0, 8)).shape == (0, 4)


def test_the_best_library_is_found() -> None:
    assert load_library() is not None


def test_a_refused_level_leaves_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may keep a level's registers from a process, although the processor has them."""
    refused: list[Path] = []

    def refuse_the_first(path: Path) -> ctypes.CDLL:
        if not refused:
            refused.append(path)
            raise OSError("the system does not let this process use these instructions")
        return open_library(path)

    monkeypatch.setattr(native, "open_library", refuse_the_first)
    library = load_library()
    assert refused == [LEVELS[0].library]
    assert library is None if len(LEVELS) == 1 else library is not None and library._name != str(refused[0])
