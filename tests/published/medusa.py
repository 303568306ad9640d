"""Medusa heads.

Source: FasterDecoding/Medusa medusa/model/medusa_model.py, vllm-project/vllm medusa.py.

* Every head reads the target's last stream after its final norm at the last position that the target ran: the one
  whose own logits chose the anchor. Head h drafts the h-th token behind the anchor.
* A head is residual blocks, x + silu(linear(x)), and an output head: its own, or one that all share.
* vLLM's loader takes `medusa_heads.` off names, `lm_heads.0` for a shared output head that has no name of its own, and
  of output heads over all tokens the rows that `token_map` names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.published.blocks import linear, rms_norm
from tests.published.shapes import (
    Draw,
    Layout,
    OffsetReference,
    Streams,
    TargetShape,
    Tensors,
    read_tensors,
    scatter_logits,
    write_files,
)

OFFSETS, BLOCKS = 3, 2


class MedusaReference(OffsetReference):
    def load(self) -> None:
        self.tensors = read_tensors(self.given.folder)
        config = json.loads((self.given.folder / "config.json").read_text())
        self.old = "0.0.linear.weight" in self.tensors
        self.offsets: int = config["medusa_num_heads" if self.old else "num_heads"]
        self.blocks: int = config["medusa_num_layers" if self.old else "num_hidden_layers"]
        self.tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in self.tensors.items()}
        self.ids = self.tensors.get("token_map")  # row of the output head to target id
        self.shared = bool(config.get("original_lm_head"))
        if self.shared and "lm_head.weight" not in self.tensors:
            self.tensors["lm_head.weight"] = self.tensors["lm_heads.0.weight"]

    def offset_logits(self, streams: Streams, tokens: Sequence[int]) -> Tensor:
        last = rms_norm(streams[-1][-1:].float(), self.given.final_norm, self.given.target.eps)
        rows = []
        for offset in range(self.offsets):
            x = last
            for block in range(self.blocks):
                name = f"{offset}.{block}.linear" if self.old else f"blocks.{offset}.layers.{block}"
                x = x + F.silu(linear(x, self.tensors, name))
            # In the old layout the output head is the part of a head behind its blocks.
            own = f"{offset}.{self.blocks}.weight" if self.old else f"lm_heads.{offset}.weight"
            head = self.tensors["lm_head.weight" if self.shared else own]
            if self.ids is not None and len(head) > len(self.ids):
                head = head[self.ids]
            rows.append(scatter_logits(x @ head.T, self.ids, self.given.target.vocab))
        return torch.cat(rows)


def _blocks(draw: Draw, target: TargetShape, name: str, bias: bool) -> Tensors:
    tensors = {}
    for offset in range(OFFSETS):
        for block in range(BLOCKS):
            part = name.format(offset=offset, block=block)
            tensors[f"{part}.weight"] = draw.matrix(target.hidden, target.hidden)
            if bias:
                tensors[f"{part}.bias"] = draw.bias(target.hidden)
    return tensors


def _old(file: str) -> Layout:
    """FasterDecoding: blocks have a bias, and the parts of a head are numbered."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw = Draw(seed)
        tensors = _blocks(draw, target, "{offset}.{block}.linear", bias=True)
        for offset in range(OFFSETS):
            tensors[f"{offset}.{BLOCKS}.weight"] = draw.matrix(target.vocab, target.hidden)
        config = {
            "medusa_num_heads": OFFSETS,
            "medusa_num_layers": BLOCKS,
            "base_model_name_or_path": "target",
            "transformers_version": "4.31.0",
        }
        write_files(folder, config, tensors, name=file)

    return Layout(write, MedusaReference)


def _new(
    shared: str = "", bias: bool = False, truncated: bool = False, whole_heads: bool = False, prefix: str = ""
) -> Layout:
    """vLLM: `blocks`, and `lm_heads` or one that is `shared`; `token_map` names the target ids of a smaller vocabulary,
    which the output heads have, or `whole_heads` all tokens."""

    def write(folder: Path, target: TargetShape, seed: int) -> None:
        draw = Draw(seed)
        tensors = _blocks(draw, target, "blocks.{offset}.layers.{block}", bias)
        size = target.vocab // 2 if truncated else target.vocab
        heads = [shared] if shared else [f"lm_heads.{offset}.weight" for offset in range(OFFSETS)]
        tensors |= {name: draw.matrix(target.vocab if whole_heads else size, target.hidden) for name in heads}
        if truncated:
            tensors["token_map"] = draw.subset(target.vocab, size)
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "truncated_vocab_size": size,
            "num_heads": OFFSETS,
            "num_hidden_layers": BLOCKS,
            "max_paths": 64,
            "topk": 10,
            "medusa_fc_bias": bias,
            "original_lm_head": bool(shared),
        }
        write_files(folder, config, tensors, torch.bfloat16)

    return Layout(write, MedusaReference)


LAYOUTS: dict[str, Layout] = {
    "old": _old("medusa_lm_head.safetensors"),
    "old-one-file": _old("model.safetensors"),
    "new": _new(),
    "new-bias": _new(bias=True),
    "new-shared": _new(shared="lm_head.weight"),
    "new-shared-first": _new(shared="lm_heads.0.weight"),
    "new-token-map": _new(truncated=True),
    "new-token-map-whole-heads": _new(truncated=True, whole_heads=True),
    "new-prefix": _new(truncated=True, prefix="medusa_heads."),
}
