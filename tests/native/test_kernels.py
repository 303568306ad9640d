"""The small verbs against float64, and what all kernels share: refusals, threads, and the choice of a library."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.backends.layers import LayerKV, Linear
from foredraft.backends.native import library
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.library import load_library, open_library
from foredraft.backends.weight import Weight
from foredraft.kernels import build
from tests.backends import needs_native
from tests.native.conftest import LEVELS
from tests.native.scene import Scene, attention_shape
from tests.native.weights import error, linear_of, random_weight

pytestmark = needs_native


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
    gelu = backend.gated(gate_up, "gelu_tanh")
    assert error(gelu, torch.nn.functional.gelu(gate, approximate="tanh") * up) < 1e-6
    clamped = backend.gated(gate_up, "clamped")
    low = gate.clamp(max=7)
    assert error(clamped, low * torch.sigmoid(1.702 * low) * (up.clamp(-7, 7) + 1)) < 1e-6
    for row in (0, 13, 32):
        one = slice(row, row + 1)
        assert torch.equal(backend.gated(gate_up[one], "clamped"), clamped[one])
        assert torch.equal(backend.rms_norm(x[one], weight, 1e-5), backend.rms_norm(x, weight, 1e-5)[one])
        assert torch.equal(backend.gated(gate_up[one]), result[one])
        assert torch.equal(backend.gated(gate_up[one], "gelu_tanh"), gelu[one])


@pytest.mark.parametrize("width", [1, 7, 48, 64, 576, 577])
def test_silu_and_dots(backend: NativeBackend, width: int) -> None:
    x, vectors, lanes = 4 * torch.randn(33, width), torch.randn(5, 9, width), torch.randint(5, (33,))
    activated, dots = backend.silu(x), backend.dots(vectors, lanes, x)
    assert error(activated, torch.nn.functional.silu(x.double())) < 1e-6
    assert error(dots, torch.einsum("rcw,rw->rc", vectors[lanes].double(), x.double())) < 1e-6
    for row in (0, 13, 32):
        one = slice(row, row + 1)
        own = vectors[lanes[row]][None].clone()
        assert torch.equal(backend.silu(x[one]), activated[one])
        assert torch.equal(backend.dots(own, torch.tensor([0]), x[one]), dots[one])
    with pytest.raises(ValueError, match="outside its table"):
        backend.dots(vectors, lanes + 5, x)


def test_gate_survives_extreme_values(backend: NativeBackend) -> None:
    gates = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    result = backend.gated(torch.cat([gates, torch.ones_like(gates)], 1))
    assert torch.allclose(result, torch.nn.functional.silu(gates), atol=1e-30)


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
        lambda: backend.embed(torch.tensor([39]), Linear(layer.parts, 41, 64)),
        lambda: backend.embed(torch.tensor([39]), Linear(layer.parts, 40, 32)),
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
        lambda: backend.rope_and_store(torch.randn(1, 960), (None, None), rope[:29], scene.cache, shape, batch),
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
            backend.rope_and_store(torch.randn(1, 960), (None, None), rope, scene.cache, shape, corrupted)
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
    tried: list[Path] = []

    def refuse_the_first(path: Path, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
        tried.append(path)
        if len(tried) == 1:
            raise OSError("the system does not let this process use these instructions")
        return open_library(path, kind)

    monkeypatch.setattr(library, "open_library", refuse_the_first)
    assert (load_library() is None) == (len(LEVELS) == 1)
    assert tried == [level.library for level in LEVELS[:2]]


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "sources_digest", lambda: "of another day")
    with pytest.raises(OSError, match="other sources; run: python -m foredraft"):
        open_library(LEVELS[0].library)
    assert load_library() is None


def test_a_forked_child_starts_its_own_threads(backend: NativeBackend) -> None:
    """Also when the parent was at work."""
    layer = linear_of(backend, random_weight("q4", 2000, 320))
    x = torch.randn(8, 320)
    expected = backend.linear(x, layer)
    parent_works = True

    def keep_working() -> None:
        while parent_works:
            backend.linear(x, layer)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_working)
        statuses = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if all(torch.equal(backend.linear(x, layer), expected) for _ in range(3)) else 1)
            statuses.append(os.waitpid(child, 0)[1])
        parent_works = False
        busy.result()
    assert statuses == [0] * 20


def test_the_digest_of_sources_does_not_depend_on_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = build.sources_digest()
    for place, source in enumerate(sorted([*build.SOURCES.glob("*.c"), *build.SOURCES.glob("*.h")], reverse=True)):
        (tmp_path / f"{place:02}{source.suffix}").write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.sources_digest() == digest
    (tmp_path / "more.c").write_text("int more;")
    assert build.sources_digest() != digest
