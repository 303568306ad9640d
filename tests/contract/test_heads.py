"""Served heads give the logits of the modules that were trained, for chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.heads.base import CORRECTIONS
from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.dflash.serve import Corrected
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.files import read_tensors
from foredraft.heads.medusa.module import MedusaModule
from foredraft.heads.mtp.module import MtpModule
from foredraft.types import Draft, Sequence
from tests.backends import KERNELS
from tests.served_heads import CHAIN, TOKENS, TREE, Target
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import VOCAB, random_model, save_model

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def eagle_reference(head: EagleModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    tokens = sequence.token_ids
    h = head.fc(target.taps(sequence, head.config.taps))
    positions = torch.arange(len(tokens) - 1)[None]
    y, context = head.midlayer(target.embeddings(tokens[1:]), h, positions, [], None)
    ys, keys = {-1: y[:, -1:]}, {-1: [context]}
    output = head.output(target.output[head.token_ids])
    logits = [head.norm(y[:, -1:]) @ output.T]
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        past = keys[parent]
        place = torch.tensor([[len(tokens) - 2 + draft.depths[node]]])
        mask = torch.ones(1, 1, 1, len(tokens) - 2 + draft.depths[node] + 1, dtype=torch.bool)
        ys[node], own = head.midlayer(target.embeddings([token]), ys[parent], place, past, mask)
        keys[node] = [*past, own]
        logits.append(head.norm(ys[node]) @ output.T)
    return torch.cat(logits, 1)[0]


def mtp_reference(head: MtpModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    tokens, decoder = sequence.token_ids, target.engine.runner.decoder
    last = target.taps(sequence, head.config.taps)
    state = torch.nn.functional.rms_norm(last, last.shape[-1:], decoder.norm.cpu(), decoder.config.rms_norm_eps)
    positions = torch.arange(len(tokens) - 1)[None]
    y, context = head(target.embeddings(tokens[1:]), state, positions, [], None)
    ys, keys = {-1: y[:, -1:]}, {-1: [context]}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        past, depth = keys[parent], draft.depths[node]
        mask = torch.ones(1, 1, 1, len(tokens) - 1 + depth, dtype=torch.bool)
        place = torch.tensor([[len(tokens) - 2 + depth]])
        ys[node], own = head(target.embeddings([token]), ys[parent], place, past, mask)
        keys[node] = [*past, own]
    return torch.cat([*ys.values()], 1)[0] @ target.output.T


def medusa_reference(head: MedusaModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    state = head.norm(target.taps(sequence, head.config.taps)[0, -1:])
    offsets = torch.cat([head.lm_head(block(state)) for block in head.blocks])
    return offsets[[0, *draft.depths]]


def dflash_reference(head: DFlashModule, target: Target, sequence: Sequence, draft: Draft) -> Tensor:
    tokens, block = sequence.token_ids, head.config.block
    features = head.features(target.taps(sequence, head.config.taps))
    context = head.context(features, torch.arange(len(tokens) - 1)[None])
    x = head.rows(target.embeddings(tokens[-1:]), features[:, -1:])
    positions = torch.arange(len(tokens) - 1, len(tokens) - 1 + block)[None]
    mask = torch.ones(1, 1, block, len(tokens) - 1 + block, dtype=torch.bool)
    y = head.blocks(x, positions, context, mask)[0]
    previous = torch.tensor([tokens[-1], *draft.tokens])
    rows, weight = head.output(y[[0, *draft.depths]], previous)
    return rows @ weight.T


REFERENCES: dict[str, Callable[[Any, Target, Sequence, Draft], Tensor]] = {
    "eagle": eagle_reference,
    "medusa": medusa_reference,
    "dflash": dflash_reference,
    "mtp": mtp_reference,
}
CASES = [
    ("eagle", "none", "injected"),
    ("medusa", "none", "injected"),
    ("mtp", "none", "injected"),
    *(("dflash", correction, "injected") for correction in CORRECTIONS),
    ("dflash", "markov", "masked"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize(("kind", "correction", "rows"), CASES)
def test_served_logits_are_those_of_the_module(
    folder: Path, tmp_path: Path, kind: str, correction: str, rows: str, kernels: str, dtype: str
) -> None:
    """Of a corrected block, those of the few most probable tokens of each row."""
    head = random_head(tiny_config(kind, folder, correction, block_input=rows))
    target = Target(folder, save_head(head, tmp_path), dtype=dtype)
    compare(head, target, TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
def test_rows_of_mapped_tokens_are_made_of_the_targets(folder: Path, tmp_path: Path, kernels: str, bits: int) -> None:
    head = random_head(tiny_config("eagle", folder, mapped_vocab_size=100))
    assert isinstance(head, EagleModule)
    head.mapped[:] = head.mapped[torch.randperm(len(head.mapped))]
    target = Target(folder, save_head(head, tmp_path, bits=bits), dtype="float32" if bits == 16 else "bfloat16")
    head.load_state_dict({name: t.float() for name, t in read_tensors(tmp_path, head.config).items()})
    compare(head, target, {16: 1e-4, 8: 0.15, 4: 0.35}[bits])  # those rows are rounded as the head's own are


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("kind", "correction"), [("eagle", "none"), ("medusa", "none"), ("mtp", "none"), ("dflash", "refiner")]
)
def test_a_head_in_few_bits_runs_in_them(
    folder: Path, tmp_path: Path, kind: str, correction: str, bits: int, kernels: str
) -> None:
    """Unless it is told otherwise, and with the logits that the weights in the file give."""
    head = random_head(tiny_config(kind, folder, correction))
    target = Target(folder, save_head(head, tmp_path, bits=bits), dtype="bfloat16")
    head.load_state_dict({name: t.float() for name, t in read_tensors(tmp_path, head.config).items()})
    for dtype, expected in (("auto", f"q{bits}"), ("bfloat16", "bf16")):
        target.drafter = target.proposer(kind, dtype=dtype)
        served = target.drafter.model._head
        own = served.outputs[0] if kind == "medusa" else served.fc if kind == "mtp" else served.output
        assert own.kinds == (expected,)
        compare(head, target, TOLERANCE["bfloat16"])


def compare(head: Any, target: Target, tolerance: float) -> None:
    sequence = target.sequence(TOKENS)
    for draft in (CHAIN, TREE):
        with torch.no_grad():
            expected = REFERENCES[head.config.kind](head, target, sequence, draft)
        for row, module_row in zip(target.served(sequence, draft), expected, strict=True):
            known = row > -torch.inf
            assert int(known.sum()) in (head.config.draft_vocab_size, Corrected.SHORTLIST)
            there = torch.full((VOCAB,), -torch.inf).index_copy_(0, head.token_ids, module_row)
            assert (row - there)[known].abs().max() < tolerance * expected.std()
