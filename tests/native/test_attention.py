"""Attention over paged trees, and the rope that fills the cache, against float64 and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.backends.layers import LayerKV
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.torch import TorchBackend
from foredraft.kernels.build import Level
from tests.backends import needs_native
from tests.native.conftest import THREADS, backend_of
from tests.native.scene import Scene, attention_shape
from tests.native.weights import error

pytestmark = needs_native


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "head_dim", "window"), [(1, 64, 0), (3, 64, 0), (4, 80, 100), (3, 24, 64), (7, 16, 5)]
)
def test_attention(level: Level, kv_dtype: str, group: int, head_dim: int, window: int) -> None:
    backend = backend_of(level, kv_dtype)
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
        alone = backend_of(level, kv_dtype, threads)
        for row in shuffled[:25].tolist():
            result = alone.attend(q[row : row + 1], scene.cache, scene.shape, scene.batch([row]))
            assert torch.equal(result, together[row : row + 1])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 70])
def test_sinks_take_their_share(level: Level, kv_dtype: str, window: int) -> None:
    """With a sink, a head's attention is what it is without, times the share that the keys have beside it."""
    backend = backend_of(level, kv_dtype)
    scene = Scene(attention_shape(3, 64, window), [1, 65, 700], backend.kv_dtype)
    for sequence, length in enumerate(scene.lengths):
        scene.rows += [(sequence, end, []) for end in range(max(1, length - 20), length + 1)]
    heads = scene.shape.num_heads
    q, sinks = torch.randn(len(scene.rows), heads * 64), 3 * torch.randn(heads)
    plain = backend.attend(q, scene.cache, scene.shape, scene.batch())
    nothing = backend.attend(q, scene.cache, scene.shape, scene.batch(), torch.full((heads,), -torch.inf))
    assert torch.equal(nothing, plain)
    found = backend.attend(q, scene.cache, scene.shape, scene.batch(), sinks)
    reference = TorchBackend(kv_dtype, torch.device("cpu")).attend(q, scene.cache, scene.shape, scene.batch(), sinks)
    assert error(found, reference.double()) < 1e-5
    # The share of the keys, from their values: ones in place of all values mix to it.
    ones = LayerKV(scene.cache.k, torch.ones_like(scene.cache.v))
    shares = backend.attend(q, ones, scene.shape, scene.batch(), sinks)
    assert error(found, (plain * shares).double()) < 1e-5
    assert shares.min() < 0.5 < shares.max()
    for row in (0, 3, 20, len(scene.rows) - 1):
        alone = backend_of(level, kv_dtype, 1).attend(
            q[row : row + 1], scene.cache, scene.shape, scene.batch([row]), sinks
        )
        assert torch.equal(alone, found[row : row + 1])
    with pytest.raises(ValueError, match="sinks must be"):
        backend.attend(q, scene.cache, scene.shape, scene.batch(), sinks[1:])


@pytest.mark.parametrize("window", [0, 60])
def test_rows_of_heads(backend: NativeBackend, window: int) -> None:
    """EAGLE: nothing lies at the first place. DFlash: the rows of a block see all rows of it, in both directions."""
    scene = Scene(attention_shape(3, 64, window, first_key=1), [2, 64, 300], torch.float32)
    for side in (scene.cache.k, scene.cache.v):
        side[scene.slots(0, torch.tensor([0]))] = torch.nan
    for sequence, length in enumerate(scene.lengths):
        scene.rows += [(sequence, length, []), *[(sequence, length - 1, [length - 1])] * 2]
    scene.rows += [(2, 292, list(range(292, 300)))] * 8
    batch = scene.batch()
    batch.positions[-8:] = torch.arange(292, 300)
    q = torch.randn(len(scene.rows), scene.shape.num_heads * 64)
    for some_backend in (backend, TorchBackend("float32", torch.device("cpu"))):
        assert error(some_backend.attend(q, scene.cache, scene.shape, batch), scene.reference(q)) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix", [1, 60, 64, 150])
def test_a_drafted_row_does_not_know_how_many_there_are(level: Level, kv_dtype: str, prefix: int) -> None:
    backend = backend_of(level, kv_dtype)
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
def test_rope_and_store(level: Level, kv_dtype: str, head_dim: int, rotary_dim: int, norms: bool) -> None:
    backend = backend_of(level, kv_dtype)
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
    q = backend.rope_and_store(qkv, (q_norm, k_norm), rope, scene.cache, shape, batch)
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
    assert torch.equal(backend.rope_and_store(qkv[3:4], (q_norm, k_norm), rope, scene.cache, shape, single), q[3:4])
