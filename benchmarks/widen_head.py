"""The EAGLE head of a small model, for the model that benchmarks/widen.py has made of it.

    python -m benchmarks.widen_head HEAD WIDE_HEAD --model wide.gguf

Up to rounding it drafts what the small head drafts, and takes as long as a head of the wide model's width: its layer
has the wide model's heads, and its feed-forward part grows as the width does.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.widen import Shape, Widening, placed
from torch import Tensor

from foredraft.heads.base import OUTPUT_MAP, HeadConfig
from foredraft.heads.files import read_tensors, target_digest, write_head
from foredraft.models.catalog import open_checkpoint

FFN_STEP = 64  # its width is a multiple of this
NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "lm_head.weight": "output.weight",
}


def widen_head(source: Path, target: Path, model: Path) -> None:
    config, checkpoint = HeadConfig.read(source), open_checkpoint(model)
    if config.kind != "eagle":
        raise SystemExit(f"{source} is a {config.kind} head; only eagle heads are widened.")
    shape = checkpoint.config
    inner = -(-config.intermediate_size * shape.hidden_size // config.hidden_size // FFN_STEP) * FFN_STEP
    widening = Widening(
        Shape(config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size, 1),
        Shape(shape.hidden_size, shape.num_heads, shape.num_kv_heads, inner, 1),
    )
    wide = replace(
        config,
        target_name=model.stem,
        target_digest=target_digest(checkpoint),
        target_hidden_size=shape.hidden_size,
        target_num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=inner,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        norm_eps=config.norm_eps * config.hidden_size / shape.hidden_size,
    )
    tensors = {
        name: _widened(name, tensor, widening) if tensor.is_floating_point() else tensor
        for name, tensor in read_tensors(source, config).items()
    }
    write_head(target, wide, tensors)


def _widened(name: str, tensor: Tensor, widening: Widening) -> Tensor:
    small, wide = widening.small.hidden, widening.wide.hidden
    value = tensor.float().numpy()
    if value.ndim == 1:
        made = widening("output_norm.weight", value)
    elif name in (
        "fc.weight",
        OUTPUT_MAP,
    ):  # one block of columns for each tap; what it does not fill is written as zeros
        taps = np.split(value, value.shape[1] // small, axis=1)
        made = np.concatenate([placed(tap, np.zeros((wide, wide), np.float32)) for tap in taps], axis=1)
    else:
        role = NAMES[name.removeprefix("midlayer.")]
        # q, k and v read the embedding and the feature side by side.
        halves = np.split(value, 2, axis=1) if role in ("attn_q.weight", "attn_k.weight", "attn_v.weight") else [value]
        made = np.concatenate([widening(role, half) for half in halves], axis=1)
    return torch.from_numpy(np.ascontiguousarray(made)).to(tensor.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("wide_head", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the wide model")
    arguments = parser.parse_args()
    widen_head(arguments.head, arguments.wide_head, arguments.model)


if __name__ == "__main__":
    main()
