"""Many layers in one call of the native kernels: the bits of the verbs one by one, whatever the architecture, the rows
and the taps; and bad input is an exception."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import entered, run_layers
from foredraft.backends.layers import Entry, LayerKV, Linear, Mlp, Stack, Taps, WindowMap
from foredraft.backends.native.backend import NativeBackend
from foredraft.backends.native.header import STRUCTURES
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch, pack
from foredraft.config import ModelConfig
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import Decoder, load_decoder
from foredraft.params import SamplingParams
from foredraft.runtime.kv import KVCache
from foredraft.types import Draft, Sequence, Work
from tests.backends import needs_native
from tests.native.weights import KINDS, fitting, random_weight
from tests.tiny_models import ARCHITECTURES, VOCAB, random_model, save_model

pytestmark = needs_native
BLOCK, BLOCKS = 16, 24


class VerbByVerb(NativeBackend):
    """The same kernels, called from Python."""

    def run_layers(self, x: Tensor, stack: Stack, kv: Any, *given: Any) -> tuple[Tensor, Tensor]:
        return run_layers(self, x, stack, kv, *given)


def random_tree(chance: random.Random, nodes: int) -> Draft:
    parents = tuple(chance.randint(-1, node - 1) for node in range(nodes))
    tokens = tuple(chance.randrange(VOCAB) for _ in range(nodes))
    return Draft(tokens, parents, (0.5,) * nodes, ("test",) * nodes)


def runs(chance: random.Random) -> list[list[Work]]:
    """Prompts in a batch, one of them in two pieces, then trees and single tokens, then one row alone."""
    params, tables = SamplingParams(), list(range(BLOCKS))
    chance.shuffle(tables)
    sequences = []
    for index, length in enumerate((70, 33, 1, 90)):
        tokens = [chance.randrange(VOCAB) for _ in range(length)]
        table = tables[index * 6 : index * 6 + 6]
        sequences.append(Sequence(index, "", 0, tokens, length, params, 0, 1, block_table=table))
    sizes = [[70, 30, 0, 90], [0, 3, 1, 0]]
    steps: list[list[Work]] = []
    for counts in sizes:
        works = [Work(replace(s), count) for s, count in zip(sequences, counts, strict=True) if count]
        steps.append(works)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed_tokens += count
    for sequence in sequences:
        sequence.num_computed_tokens -= 1
    steps.append(
        [Work(s, 1, draft=random_tree(chance, nodes)) for s, nodes in zip(sequences, (5, 0, 4, 3), strict=True)]
    )
    steps.append([Work(sequences[3], 1)])
    return steps


def results(
    decoder: Decoder, config: ModelConfig, backend: NativeBackend, steps: list[list[Work]], layers: tuple[int, ...]
) -> list[Tensor]:
    """All that the steps leave: normed rows, taps, and the caches that they wrote. Layers with a window have blocks of
    their own, for all but one that nobody has."""
    cache = KVCache(BLOCKS + 1, BLOCK, num_window_blocks=BLOCKS)
    cache.window_blocks[:BLOCKS] = array("i", random.Random(3).sample(range(BLOCKS), BLOCKS))
    kv = cache.add_group("target", config, backend)
    taps = cache.add_taps(layers, config.hidden_size, backend) if layers else None
    everything = [tensor for layer in kv for tensor in (layer.k, layer.v)] + ([taps.cache] if taps else [])
    for tensor in everything:
        tensor.zero_()
    return [decoder.run(pack(works, BLOCK).tensors(), kv, backend, taps) for works in steps] + everything


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_one_call_has_the_bits_of_the_verbs(name: str, dtype: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FOREDRAFT_SEED", random.randrange(2**31)))
    print(f"FOREDRAFT_SEED={seed}")
    checkpoint = open_checkpoint(save_model(random_model(name), tmp_path))
    verbs, fused = VerbByVerb(dtype, 2), NativeBackend(dtype, 2)
    decoder = load_decoder(checkpoint, dtype, 512, fused)
    for layers in ((), (1,), (0, 1, len(decoder.layers))):
        expected, found = (
            results(decoder, checkpoint.config, backend, runs(random.Random(seed)), layers)
            for backend in (verbs, fused)
        )
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_tap_is_the_residual_stream_after_so_many_layers(decoder: Decoder) -> None:
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    count, width = len(decoder.layers), x.shape[1]
    taps = Taps((0, 1, count), torch.full((BLOCKS * BLOCK, 3 * width), torch.nan))
    last, _ = backend.run_layers(x.clone(), stack_of(decoder), kv, batch, taps)
    first, _ = backend.run_layers(x.clone(), replace(stack_of(decoder), layers=decoder.layers[:1]), kv[:1], batch)
    assert torch.equal(taps.cache[batch.slots], torch.cat([x, first, last], 1))
    assert int(taps.cache.isnan().all(1).sum()) == BLOCKS * BLOCK - batch.num_rows, "no other slot is written"


@pytest.mark.parametrize("has_norm", [True, False])
def test_the_first_layer_may_read_the_embedding_too(decoder: Decoder, has_norm: bool) -> None:
    """As that of an EAGLE head does, and behind it the rows, normed or as they are."""
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    layer, width = decoder.layers[0], x.shape[1]
    wide = Linear((backend.pack(random_weight("f32", layer.qkv.outputs, 2 * width)),), layer.qkv.outputs, 2 * width)
    halves = [backend.pack(random_weight("q4", VOCAB // 2, width)) for _ in range(2)]
    entry = Entry(Linear(tuple(halves), 2 * (VOCAB // 2), width), torch.randn(width) if has_norm else None)
    stack = replace(stack_of(decoder), layers=(replace(layer, qkv=wide), *decoder.layers[1:]), entry=entry)
    expected = run_layers(backend, x.clone(), stack, kv, batch)
    found = backend.run_layers(x.clone(), stack, kv, batch)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    embedded = backend.rms_norm(backend.embed(batch.token_ids, entry.embedding), layer.input_norm, stack.norm_eps)
    both = entered(backend, x, stack, batch)
    assert torch.equal(both[:, :width], embedded) and torch.equal(both[:, width:], x) != has_norm
    wrong: dict[str, Stack] = {
        "no entry": replace(stack, entry=None),
        "narrow layer": replace(stack_of(decoder), entry=entry),
        "norm": replace(stack, entry=replace(entry, norm=torch.zeros(63))),
        "parts": replace(stack, entry=replace(entry, embedding=replace(entry.embedding, parts=tuple(halves[:1])))),
        "width": replace(stack, entry=replace(entry, embedding=layer.mlp.down)),
    }
    for name, one in wrong.items():
        with pytest.raises(ValueError, match=r"\.$"):
            backend.run_layers(x.clone(), one, kv, batch)
            pytest.fail(f"{name} was taken")
    unknown = replace(batch, token_ids=batch.token_ids + VOCAB)
    with pytest.raises(ValueError, match="outside its table"):
        backend.run_layers(x.clone(), stack, kv, unknown)


def test_only_the_first_layer_may_read_rows_as_they_are(decoder: Decoder) -> None:
    """As that of an EAGLE-1 head does."""
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    plain = [replace(layer, input_norm=None) for layer in decoder.layers]
    stack = replace(stack_of(decoder), layers=(plain[0], *decoder.layers[1:]))
    expected = run_layers(backend, x.clone(), stack, kv, batch)
    found = backend.run_layers(x.clone(), stack, kv, batch)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(entered(backend, x, stack, batch), x)
    wrong = replace(stack, layers=(decoder.layers[0], plain[1], *decoder.layers[2:]))
    with pytest.raises(ValueError, match=r"\.$"):
        backend.run_layers(x.clone(), wrong, kv, batch)


def test_taps_may_be_kept_in_full_precision(decoder: Decoder) -> None:
    backend = NativeBackend("bfloat16", 2)
    x, kv, batch = scene(decoder, backend)
    taps = Taps((1,), torch.zeros(BLOCKS * BLOCK, x.shape[1]))
    first, _ = backend.run_layers(x.clone(), replace(stack_of(decoder), layers=decoder.layers[:1]), kv[:1], batch, taps)
    assert torch.equal(taps.cache[batch.slots], first)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    checkpoint = open_checkpoint(save_model(random_model("llama-biased"), tmp_path_factory.mktemp("tiny")))
    return load_decoder(checkpoint, "float32", 512, NativeBackend("float32", 2))


def stack_of(decoder: Decoder) -> Stack:
    config = decoder.config
    return Stack(decoder.layers, decoder.norm, decoder.rope, config.residual_multiplier, config.rms_norm_eps)


def scene(decoder: Decoder, backend: NativeBackend) -> tuple[Tensor, list[LayerKV], ForwardBatch]:
    """Residual rows, caches and a batch that fit the decoder."""
    kv = KVCache(BLOCKS, BLOCK).add_group("target", decoder.config, backend)
    batch = pack(runs(random.Random(1))[0], BLOCK).tensors()
    return backend.embed(batch.token_ids, decoder.embedding), kv, batch


def test_projections_of_many_parts(decoder: Decoder) -> None:
    backend = NativeBackend("float32", 2)

    def mixed(linear: Linear) -> Linear:
        """Other weights, packed in parts of every kind that its number of inputs allows."""
        sizes = [linear.outputs - 7 * (len(KINDS) - 1), *[7] * (len(KINDS) - 1)]
        in_groups = linear.inputs % 32 == 0
        kinds = [k if in_groups and fitting(k, linear.inputs) == linear.inputs else "f32" for k in KINDS]
        parts = [backend.pack(random_weight(k, size, linear.inputs)) for k, size in zip(kinds, sizes, strict=True)]
        return Linear(tuple(parts), linear.outputs, linear.inputs, linear.bias)

    layer = decoder.layers[0]
    several = replace(
        layer,
        qkv=mixed(layer.qkv),
        output=mixed(layer.output),
        mlp=Mlp(mixed(layer.mlp.gate_up), mixed(layer.mlp.down)),
    )
    stack = replace(stack_of(decoder), layers=(several,))
    x, kv, batch = scene(decoder, backend)
    expected = run_layers(backend, x.clone(), stack, kv[:1], batch)
    found = backend.run_layers(x.clone(), stack, kv[:1], batch)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_no_rows(decoder: Decoder) -> None:
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    names = ("token_ids", "positions", "slots", "sequences", "prefix_lens", "paths", "path_lens")
    nobody = replace(batch, logit_rows=None, **{name: getattr(batch, name)[:0] for name in names})
    assert backend.run_layers(x[:0], stack_of(decoder), kv, nobody)[1].shape == (0, x.shape[1])


def test_wrong_input_is_an_exception_and_not_a_crash(decoder: Decoder) -> None:
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    stack, layer = stack_of(decoder), decoder.layers[1]

    def changed(**fields: Any) -> Stack:
        return replace(stack, layers=(stack.layers[0], replace(layer, **fields), stack.layers[2]))

    dense = layer.mlp
    assert isinstance(dense, Mlp)

    def mlp(**fields: Any) -> Stack:
        return changed(mlp=replace(dense, **fields))

    def f32(outputs: int, inputs: int) -> Linear:
        return Linear((backend.pack(Weight("f32", torch.zeros(outputs, inputs))),), outputs, inputs)

    bf16 = NativeBackend("bfloat16", 2)
    wide = replace(layer.shape, head_dim=2 * layer.shape.head_dim)
    wrong_stacks: dict[str, Callable[[], Stack]] = {
        "no layers": lambda: replace(stack, layers=()),
        "norm": lambda: replace(stack, norm=torch.zeros(63)),
        "input norm": lambda: changed(input_norm=torch.zeros(65)),
        "double norm": lambda: changed(post_norm=torch.zeros(64).double()),
        "strided norm": lambda: changed(post_norm=torch.zeros(128)[::2]),
        "q norm": lambda: changed(q_norm=torch.zeros(7)),
        "bias": lambda: changed(qkv=replace(layer.qkv, bias=torch.zeros(3))),
        "outputs beyond the parts": lambda: changed(output=replace(layer.output, outputs=80, bias=None)),
        "parts beyond the outputs": lambda: mlp(gate_up=replace(dense.gate_up, parts=dense.gate_up.parts * 2)),
        "no parts": lambda: mlp(down=replace(dense.down, parts=())),
        "other inputs": lambda: mlp(down=f32(64, 95)),
        "odd gate": lambda: mlp(gate_up=f32(191, 64)),
        "heads": lambda: changed(shape=wide),
        "no heads": lambda: changed(shape=replace(layer.shape, num_heads=0)),
        "rotary": lambda: changed(shape=replace(layer.shape, rotary_dim=layer.shape.rotary_dim - 2)),
        "rope": lambda: replace(stack, rope=stack.rope[:20]),
        "flat rope": lambda: replace(stack, rope=stack.rope.flatten(1)),
    }
    nowhere = WindowMap(array("i", [-1] * BLOCKS), backend.device)
    wrong_calls: dict[str, Callable[[], object]] = {
        "rows": lambda: backend.run_layers(x[1:], stack, kv, batch),
        "width": lambda: backend.run_layers(x[:, :63].contiguous(), stack, kv, batch),
        "no tensor": lambda: backend.run_layers(None, stack, kv, batch),  # type: ignore[arg-type]
        "fewer caches": lambda: backend.run_layers(x, stack, kv[:2], batch),
        "more caches": lambda: backend.run_layers(x, stack, [*kv, kv[0]], batch),
        "width of taps": lambda: backend.run_layers(x, stack, kv, batch, Taps((1,), torch.zeros(999, 65))),
        "dtype of taps": lambda: backend.run_layers(x, stack, kv, batch, Taps((1,), torch.zeros(999, 64).bfloat16())),
        "layer of taps": lambda: backend.run_layers(x, stack, kv, batch, Taps((4,), torch.zeros(999, 64))),
        "order of taps": lambda: backend.run_layers(x, stack, kv, batch, Taps((2, 1), torch.zeros(999, 128))),
        "few slots of taps": lambda: backend.run_layers(x, stack, kv, batch, Taps((1,), torch.zeros(9, 64))),
        "cache dtype": lambda: bf16.run_layers(x, stack, kv, batch),
        "small cache": lambda: backend.run_layers(x, stack, [LayerKV(c.k[:9], c.v[:9]) for c in kv], batch),
        "slots": lambda: backend.run_layers(x, stack, kv, replace(batch, slots=batch.slots - 1000)),
        "no window blocks": lambda: backend.run_layers(x, stack, [replace(kv[0], window_map=nowhere), *kv[1:]], batch),
    }
    for name, wrong in wrong_stacks.items():
        with pytest.raises(ValueError, match=r"\.$"):
            backend.run_layers(x, wrong(), kv, batch)
            pytest.fail(f"{name} was taken")
    for name, call in wrong_calls.items():
        with pytest.raises(ValueError, match=r"\.$"):
            call()
            pytest.fail(f"{name} was taken")
    backend.run_layers(x, stack, kv, batch)  # and what is right still runs


def test_descriptions_go_with_what_they_describe(decoder: Decoder) -> None:
    """A batch is described for one run; a stack and its caches as long as they live."""

    def described(*kinds: type[ctypes.Structure]) -> int:
        gc.collect()
        return sum(type(one) in kinds for one in gc.get_objects())

    stack_kinds, batch_kind = (STRUCTURES["fd_stack"], STRUCTURES["fd_kv"]), STRUCTURES["fd_batch"]
    before, batches = described(*stack_kinds), described(batch_kind)
    backend = NativeBackend("float32", 2)
    x, kv, batch = scene(decoder, backend)
    stack = stack_of(decoder)
    backend.run_layers(x, stack, kv, batch)
    assert described(*stack_kinds) > before and described(batch_kind) == batches
    del stack, kv
    assert described(*stack_kinds) == before
