"""The Triton kernels against plain references, and the promise that a row's bits depend on that row alone.

Without a device, TRITON_INTERPRET=1 runs what does not ask for bits, slowly, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import run_layers
from foredraft.backends.layers import ACTIVATIONS, Layer, LayerKV, Linear, Mlp, Stack
from foredraft.backends.weight import Weight
from foredraft.batch import PackedBatch
from tests.gpu.kernel_device import DEVICE, INTERPRETED, needs_kernels, small
from tests.native.scene import BLOCK, Scene, attention_shape
from tests.native.weights import KINDS, error, fitting, random_weight

pytestmark = needs_kernels
if INTERPRETED or torch.cuda.is_available():
    from foredraft.backends.cuda import linear as cuda_linear
    from foredraft.backends.cuda import rows as cuda_rows
    from foredraft.backends.cuda.backend import CudaBackend
    from foredraft.backends.cuda.linear import SPLIT_ROWS
    from foredraft.backends.cuda.pack import cut
    from foredraft.backends.cuda.plan import Plan, single_plan

bits = pytest.mark.skipif(INTERPRETED, reason="asks for the bits of a device")
ROW_COUNTS = (1, 2, 3, 7, 8, 16, 17, 32, 33, 64, 100, 128, 129, 256, 257, 512, 1000, 2048)


def backend(dtype: str = "bfloat16") -> CudaBackend:
    return CudaBackend(dtype, DEVICE)


def layer_of(*weights: Weight, bias: bool = False) -> Linear:
    outputs = sum(weight.outputs for weight in weights)
    parts = tuple(backend().pack(weight) for weight in weights)
    return Linear(parts, outputs, weights[0].inputs, torch.randn(outputs, device=DEVICE) if bias else None)


def widened(weight: Weight) -> Tensor:
    """The values that the kernels multiply with: products of factors and then the values are rounded to float16."""
    if weight.block_scales is not None:
        scales, minimums = weight.scales, weight.minimums
        assert scales is not None
        factors = [scales.float() * repeated(weight.block_scales, scales)]
        if minimums is not None:
            assert weight.block_minimums is not None
            factors.append(minimums.float() * repeated(weight.block_minimums, minimums))
        weight = Weight(weight.kind, weight.values, *(factor.half() for factor in factors))
    return rounded(weight.dense().to(DEVICE), weight)


def repeated(of_blocks: Tensor, of_groups: Tensor) -> Tensor:
    return of_blocks.float().repeat_interleave(of_groups.shape[1] // of_blocks.shape[1], 1)


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """As what multiplies the weight."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(weight.kind, torch.float16)
    return x.to(dtype).double()


class TestLinear:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rows", [1, 5, 40] if INTERPRETED else [1, 5, 40, 100, 300])
    def test_is_the_product_with_the_files_values(self, kind: str, rows: int) -> None:
        outputs, inputs = (70, 288) if INTERPRETED else (1000, 1120)
        weight = random_weight(kind, outputs, fitting(kind, inputs))
        layer = layer_of(weight, bias=True)
        x = small(rows, weight.inputs)
        assert layer.bias is not None
        expected = rounded(x, weight) @ widened(weight).T + layer.bias.double()
        assert error(backend().linear(x, layer), expected) < 1e-6
        assert error(backend().logits(x, layer), expected) < 1e-6

    @pytest.mark.parametrize("kind", KINDS)
    def test_embeds_the_files_values(self, kind: str) -> None:
        weight = random_weight(kind, 50, fitting(kind, 96))
        ids = torch.tensor([3, 49, 0, 17], device=DEVICE)
        expected = widened(weight)[ids].float()
        assert torch.equal(backend().embed(ids, layer_of(weight)), expected)
        halves = layer_of(weight.rows(0, 20), weight.rows(20, 50))
        assert torch.equal(backend().embed(ids, halves), expected)

    def test_parts_of_different_kinds_are_one_layer(self) -> None:
        weights = [random_weight("q4k", 64, 256), random_weight("q6", 32, 256), random_weight("bf16", 40, 256)]
        x = small(3, 256)
        expected = torch.cat([rounded(x, weight) @ widened(weight).T for weight in weights], 1)
        assert error(backend().linear(x, layer_of(*weights)), expected) < 1e-6

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_rows_have_no_outputs(self, kind: str) -> None:
        """A piece of a prompt that does not end it asks for no logits."""
        layer = layer_of(random_weight(kind, 32, fitting(kind, 128)))
        assert backend().linear(torch.empty(0, layer.inputs, device=DEVICE), layer).shape == (0, 32)

    @pytest.mark.parametrize("kind", ["bf16", "q4"])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gates_as_the_unfused_kernels_do(self, kind: str, activation: str) -> None:
        layer = layer_of(random_weight(kind, 160 if INTERPRETED else 3072, 128), bias=True)
        assert cuda_linear.can_gate(layer) and cut(layer).count == 1
        for rows in (1, 20) if INTERPRETED else (1, 20, 300):
            x = small(rows, 128).bfloat16() / 16
            for dtype in (torch.bfloat16, torch.float16):
                apart = cuda_rows.gated(cuda_linear.sums(x, layer), dtype, activation)
                assert torch.equal(cuda_linear.gated(x, layer, dtype, activation), apart)

    def test_what_float16_cannot_hold_stays_finite(self) -> None:
        layer = layer_of(random_weight("q4", 32, 64))
        assert cuda_linear.sums(small(2, 64) * 1e6, layer).isfinite().all()
        active = cuda_rows.gated(torch.full((1, 2, 64), 1e6, device=DEVICE), torch.float16)
        assert torch.equal(active, torch.full((2, 32), 65504.0, dtype=torch.float16, device=DEVICE))
        assert cuda_rows.gated(torch.full((1, 2, 64), torch.nan, device=DEVICE), torch.float16).isnan().all()

    @bits
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("outputs", "inputs"), [(960, 576), (576, 1536), (1024, 4096), (4096, 1024), (512, 14336), (70, 96)]
    )
    def test_bits_of_a_row_are_its_own(self, kind: str, outputs: int, inputs: int) -> None:
        if kind == "f32" and inputs > 4096:
            pytest.skip("the same code as for fewer inputs, and slow")
        layer = layer_of(random_weight(kind, outputs, fitting(kind, inputs)))
        x = small(2048, layer.inputs)
        whole = backend().linear(x, layer)
        for rows in ROW_COUNTS:
            for start in {0, (2048 - rows) // 3, 2048 - rows}:
                part = backend().linear(x[start : start + rows].contiguous(), layer)
                assert torch.equal(part, whole[start : start + rows]), (rows, start)

    @bits
    def test_the_largest_tile_gives_the_bits_of_the_smallest(self) -> None:
        layer = layer_of(random_weight("bf16", 512, 2048))
        x = small(SPLIT_ROWS, 2048)
        tiles = [cuda_linear.Tile(*of) for of in ((64, 16, 64, 4, 3), (64, 16, 128, 4, 2), (128, 128, 32, 8, 2))]
        results = [cuda_rows.collect(cuda_linear.sums(x, layer, tile)) for tile in tiles]
        assert all(torch.equal(results[0], other) for other in results[1:])


class TestRows:
    @pytest.mark.parametrize("width", [576, 100, 4096])
    def test_norms_and_residual(self, width: int) -> None:
        x, update, weight = small(5, width), small(3, 5, width), small(width)
        y = x.double() + 0.5 * update.double().sum(0)
        expected = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight
        changed = x.clone()
        normed = cuda_rows.add_norm(changed, update, 0.5, weight, 1e-5, torch.float32)
        assert error(changed, y) < 1e-6 and error(normed, expected) < 1e-6
        assert error(backend("float32").rms_norm(changed, weight, 1e-5), expected) < 1e-6
        for row in range(5):
            alone = cuda_rows.add_norm(
                x[row : row + 1].clone(), update[:, row : row + 1].contiguous(), 0.5, weight, 1e-5, torch.float32
            )
            assert torch.equal(alone[0], normed[row])

    @pytest.mark.parametrize("rotary_dim", [0, 40, 64])
    @pytest.mark.parametrize("with_norms", [False, True])
    def test_rope_and_store(self, rotary_dim: int, with_norms: bool) -> None:
        shape = attention_shape(3, 64, rotary_dim=rotary_dim)
        rows, width = 6, (shape.num_heads + 2 * shape.num_kv_heads) * 64
        qkv, slots = small(rows, width), torch.tensor([4, 9, 1, -1, 7, 30], device=DEVICE)
        positions = torch.tensor([0, 5, 2, 3, 11, 1], device=DEVICE)
        rope = small(12, 2, max(1, rotary_dim // 2))
        norms = (small(64), small(64)) if with_norms else (None, None)
        kv = LayerKV(*(torch.zeros(32, 3, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
        q = cuda_rows.rope_and_store(qkv[None], norms, rope, kv, shape, positions, slots)
        parts = list(qkv.double().view(rows, -1, 64).split([9, 3, 3], dim=1))
        for part, norm in zip(parts, norms, strict=False):
            if norm is not None:
                part *= torch.rsqrt((part * part).mean(-1, keepdim=True) + shape.norm_eps) * norm
        if half := rotary_dim // 2:
            cos, sin = rope.double()[positions, :, None].unbind(1)
            for part in parts[:2]:
                left, right = part[..., :half].clone(), part[..., half:rotary_dim].clone()
                part[..., :half], part[..., half:rotary_dim] = left * cos - right * sin, right * cos + left * sin
        assert error(q, parts[0].flatten(1)) < 4e-3
        stored = slots >= 0
        assert error(kv.k[slots[stored]], parts[1][stored]) < 4e-3
        assert error(kv.v[slots[stored]], parts[2][stored]) < 4e-3
        assert kv.k.count_nonzero() == kv.v.count_nonzero() == 5 * 3 * 64


def tree_scene(window: int = 0, head_dim: int = 64, group: int = 3, dtype: torch.dtype = torch.bfloat16) -> Scene:
    """Plain rows, a chunk, a chain and a tree, over one to several blocks of keys."""
    lengths = [40, 300, 150] if INTERPRETED else [40, 700, 150, 3000]
    scene = Scene(attention_shape(group, head_dim, window), lengths, dtype)
    for sequence, length in enumerate(lengths):
        scene.rows += [(sequence, length, [])]
    scene.rows += [(1, prefix, []) for prefix in range(200, 212)]
    scene.rows += [(2, 140, [140 + i for i in range(n)]) for n in (1, 2, 3)]
    scene.rows += [(1, 250, path) for path in ([260], [261], [260, 263], [261, 266], [260, 263, 270], [262])]
    scene.rows += [(0, 1, []), (2, 127, []), (2, 128, []), (2, 129, []), (2, 126, [130, 128, 135])]
    return scene


def attended(
    scene: Scene, q: Tensor, rows: list[int] | None = None, dtype: str = "bfloat16", sinks: Tensor | None = None
) -> Tensor:
    """What some rows of a scene on the host get on the device."""
    cache = LayerKV(scene.cache.k.to(DEVICE), scene.cache.v.to(DEVICE))
    sinks = None if sinks is None else sinks.to(DEVICE)
    return backend(dtype).attend(q.to(DEVICE), cache, scene.shape, planned(scene, rows), sinks).cpu()


def planned(scene: Scene, rows: list[int] | None = None, slots: Tensor | None = None) -> Plan:
    """The scene's rows as the kernels see them, in a plan of their own size."""
    batch = scene.batch(rows).to(torch.device("cpu"))
    packed = PackedBatch(
        wide=torch.stack([batch.token_ids, batch.positions, batch.slots if slots is None else slots.cpu()]).numpy(),
        narrow=torch.stack([batch.sequences, batch.prefix_lens, batch.path_lens]).numpy(),
        block_tables=batch.block_tables.numpy(),
        paths=batch.paths.numpy(),
        row_counts=[len(list(run)) for _, run in groupby(batch.sequences.tolist())],
        logit_rows=list(range(batch.num_rows)),
        block_size=batch.block_size,
        max_keys=batch.max_keys,
        reach=batch.max_keys,
    )
    plan = single_plan(packed, scene.shape, DEVICE, scene.cache.k.dtype)
    plan.upload()
    return plan


class TestAttention:
    @pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4), (32, 1), (80, 2)])
    @pytest.mark.parametrize("window", [0, 100])
    def test_is_attention(self, head_dim: int, group: int, window: int) -> None:
        scene = tree_scene(window, head_dim, group)
        q = torch.randn(len(scene.rows), 3 * group * head_dim).bfloat16().float()
        assert error(attended(scene, q), scene.reference(q)) < 4e-3

    def test_keys_before_the_first_do_not_exist(self) -> None:
        scene = Scene(attention_shape(3, 64, first_key=1), [2, 64, 300], torch.float32)
        for side in (scene.cache.k, scene.cache.v):
            for sequence in range(3):
                side[scene.slots(sequence, torch.tensor([0]))] = torch.nan
        for sequence, length in enumerate(scene.lengths):
            scene.rows += [(sequence, length, []), *[(sequence, length - 1, [length - 1])] * 2]
        scene.rows += [(2, 292, list(range(292, 300)))] * 8  # a block that attends both ways
        q = torch.randn(len(scene.rows), 9 * 64)
        assert error(attended(scene, q, dtype="float32"), scene.reference(q)) < 1e-5

    @pytest.mark.parametrize(("prefix", "path"), [(1, []), (0, [0])])
    def test_a_row_that_sees_no_key_reads_none_of_others(self, prefix: int, path: list[int]) -> None:
        """What lies behind its path leads to NaN. Sequences that only fill a program of an EAGLE head have such rows:
        their only key comes before the first."""
        scene = Scene(attention_shape(3, 64, first_key=1), [5], torch.float32)
        scene.rows = [(0, prefix, path)] * 3
        paths = torch.full((4, 1), BLOCK, dtype=torch.int32, device=DEVICE)
        paths[:3, : len(path)] = 0
        plan = replace(planned(scene), paths=paths[:3])
        cache = LayerKV(scene.cache.k.to(DEVICE), scene.cache.v.to(DEVICE))
        assert not backend("float32").attend(small(3, 9 * 64), cache, scene.shape, plan).any()

    def test_float32_is_exact(self) -> None:
        scene = tree_scene(dtype=torch.float32)
        q = torch.randn(len(scene.rows), 9 * 64)
        assert error(attended(scene, q, dtype="float32"), scene.reference(q)) < 1e-5

    @bits
    @pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
    @pytest.mark.parametrize("window", [0, 100])
    def test_bits_of_a_row_are_its_own(self, head_dim: int, group: int, window: int) -> None:
        scene = tree_scene(window, head_dim, group)
        q = torch.randn(len(scene.rows), 3 * group * head_dim)
        together = attended(scene, q)
        for row in range(len(scene.rows)):
            assert torch.equal(attended(scene, q[row : row + 1], [row])[0], together[row]), row

    @bits
    @pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
    @pytest.mark.parametrize(("window", "dtype"), [(0, "bfloat16"), (700, "bfloat16"), (0, "float32")])
    def test_prompts_have_the_bits_of_single_rows(self, head_dim: int, group: int, window: int, dtype: str) -> None:
        scene = Scene(attention_shape(group, head_dim, window), [2048], backend(dtype).kv_dtype)
        scene.rows = [(0, prefix, []) for prefix in range(1, 2049)]
        q = torch.randn(2048, 3 * group * head_dim)
        assert planned(scene).split is None
        whole = attended(scene, q, dtype=dtype)
        for rows in [[0], [127, 128, 129], list(range(500, 520)), list(range(1000, 1256, 8)), [2047]]:
            assert torch.equal(attended(scene, q[rows], rows, dtype), whole[rows]), rows


def random_stack(kind: str, layers: int = 2) -> Stack:
    hidden, ffn = 576, 1536
    shape = attention_shape(3, 64, rotary_dim=64)

    def linear(outputs: int, inputs: int, kind: str = kind) -> Linear:
        weight = Weight("bf16", (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16())
        if kind == "q4":
            from foredraft.models.quantise import convert

            weight = convert(weight, "int4")
        return layer_of(weight)

    made = tuple(
        Layer(
            *(small(hidden), linear(960, hidden), None, None, linear(hidden, hidden), small(hidden)),
            *(Mlp(linear(2 * ffn, hidden), linear(hidden, ffn)), shape),
        )
        for _ in range(layers)
    )
    angles = torch.rand(4096, 32, device=DEVICE) * 6
    return Stack(made, small(hidden), torch.stack([angles.cos(), angles.sin()], 1), 1.0, 1e-5)


def as_gemma(stack: Stack) -> Stack:
    """With norms of what is added to the residual stream, another activation, and a window with its own rotations."""
    windowed, full = stack.layers
    windowed = replace(windowed, shape=replace(windowed.shape, window=100))
    layers = tuple(
        replace(layer, activation="gelu_tanh", attention_update_norm=small(576), mlp_update_norm=small(576))
        for layer in (windowed, full)
    )
    return replace(stack, layers=layers, window_rope=stack.rope.flip(0).contiguous())


class TestLayers:
    @bits
    @pytest.mark.parametrize("kind", ["bf16", "q4"])
    @pytest.mark.parametrize("gemma", [False, True])
    def test_all_ways_through_the_layers_give_the_same_bits(self, kind: str, gemma: bool) -> None:
        """Fused, verb by verb, as a prompt in one go, in chunks, and row by row at the end."""
        stack, rows = as_gemma(random_stack(kind)) if gemma else random_stack(kind), 640
        scene = Scene(stack.layers[0].shape, [rows], torch.bfloat16)
        scene.rows = [(0, prefix, []) for prefix in range(1, rows + 1)]
        slots = scene.slots(0, torch.arange(rows)).to(DEVICE)
        scene.tables = scene.tables.to(DEVICE)
        x = small(rows, 576)

        def run(chunks: list[int], fused: bool = True) -> Tensor:
            shape = (len(scene.cache.k), 3, 64)
            kv = [
                LayerKV(*(torch.full(shape, torch.nan, device=DEVICE).bfloat16() for _ in range(2)))
                for _ in stack.layers
            ]
            done, out = 0, []
            for size in chunks:
                part = list(range(done, done + size))
                batch = planned(scene, part, slots=slots[part])
                go = backend().run_layers if fused else lambda *given: run_layers(backend(), *given)
                out.append(go(x[part].clone(), stack, kv, batch)[1])
                done += size
            return torch.cat(out)

        whole = run([rows])
        assert torch.equal(run([rows], fused=False).to(whole.dtype), whole)
        assert torch.equal(run([256, 320, 33, *[1] * 20, 8, 3]), whole)


class TestDots:
    @pytest.mark.parametrize("width", [1, 48, 300, 576, 1537])
    def test_are_products_with_the_vectors_of_a_lane(self, width: int) -> None:
        x, vectors = small(7, width), small(3, 20, width)
        lanes = torch.tensor([2, 0, 1, 1, 2, 0, 0], device=DEVICE)
        expected = torch.einsum("rcw,rw->rc", vectors[lanes].double(), x.double())
        assert error(backend().dots(vectors, lanes, x), expected) < 1e-6

    @bits
    def test_bits_of_a_row_are_its_own(self) -> None:
        x, vectors, lanes = small(70, 576), small(9, 64, 576), torch.randint(9, (70,), device=DEVICE)
        whole = backend().dots(vectors, lanes, x)
        for row in range(0, 70, 7):
            own = vectors[lanes[row]][None].clone()
            alone = backend().dots(own, torch.zeros(1, dtype=torch.int64, device=DEVICE), x[row : row + 1])
            assert torch.equal(alone[0], whole[row])


class TestStore:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_writes_the_columns_of_the_slots_and_nothing_for_rows_without(self, dtype: torch.dtype) -> None:
        x, slots = small(4, 70).bfloat16().float(), torch.tensor([5, -1, 0, 8], device=DEVICE)
        cache = small(9, 300).to(dtype)
        expected = cache.clone()
        expected[slots[[0, 2, 3]], 140:210] = x[[0, 2, 3]].to(dtype)
        backend().store(x, cache, 140, slots)
        assert torch.equal(cache, expected)


def test_the_block_of_a_scene_is_smaller_than_a_block_of_keys() -> None:
    """Otherwise the scenes above would not show keys of one block in several places."""
    assert BLOCK < 128
