"""Medusa heads: those of its authors, whose config names no sizes, and in the layout that vLLM reads. All of them read
the target's last state after its final norm."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from foredraft.heads.base import D2T, HeadConfig
from foredraft.heads.files import Tensors
from foredraft.heads.formats.published import REMEDY, Published, check_config, completed
from foredraft.models.checkpoint import Checkpoint

_AUTHORS = "medusa_num_heads"
_FIRST_OUTPUT = "lm_heads.0.weight"
_BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")


def fits(published: Published) -> bool:
    named = any("medusa" in name.lower() for name in published.architectures)
    return named or published.raw.get("model_type") == "medusa" or _AUTHORS in published.raw


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    fields, sizes = published.fields, target.config
    is_authors = _AUTHORS in published.raw
    offsets = fields.integer(_AUTHORS if is_authors else "num_heads", most=1024)
    layers = fields.integer("medusa_num_layers" if is_authors else "num_hidden_layers", 1, most=1024)
    theirs = {_renamed(name, layers): name for name in published.names}
    shares_one = fields.flag("original_lm_head", False)
    if shares_one and "lm_head.weight" not in theirs and _FIRST_OUTPUT in theirs:
        theirs["lm_head.weight"] = theirs[_FIRST_OUTPUT]
        theirs = {name: old for name, old in theirs.items() if not name.startswith("lm_heads.")}
    if not shares_one and not {"lm_head.weight", _FIRST_OUTPUT} & theirs.keys():
        own = f"0.{layers}.weight" if is_authors else _FIRST_OUTPUT
        raise published.missing(own, "an output head for each offset (original_lm_head false)")
    if fields.flag("medusa_fc_bias", False) and "blocks.0.layers.0.bias" not in theirs:
        raise published.missing("blocks.0.layers.0.bias", "medusa_fc_bias true")
    read = published.tensors()
    tensors = {name: read[old] for name, old in theirs.items()}
    vocab_size = fields.integer("vocab_size", sizes.vocab_size)
    config = HeadConfig.of_sizes(
        sizes,
        sizes,
        kind="medusa",
        target_name="another model",
        target_digest="",
        num_layers=layers,
        hidden_size=fields.integer("hidden_size", sizes.hidden_size),
        target_vocab_size=vocab_size,
        draft_vocab_size=fields.integer("truncated_vocab_size", vocab_size),
        taps=(sizes.num_layers,),
        block=offsets,
        shares_output="lm_head.weight" not in tensors and _FIRST_OUTPUT not in tensors,
        output_per_offset=_FIRST_OUTPUT in tensors,
    )
    check_config(published.folder, config, target)
    _fill_biases(tensors, config)
    tensors["norm.weight"] = target.vector("model.norm.weight")
    outputs = ("lm_head.weight", *(f"lm_heads.{offset}.weight" for offset in range(offsets)))
    if (token_map := tensors.pop("token_map", None)) is not None:
        _cut(published, tensors, outputs, token_map, vocab_size)
    return completed(published, config, tensors, outputs, lambda name: theirs.get(name, name))


def _renamed(name: str, layers: int) -> str:
    """The authors number the parts of an offset: its layers, and behind them its output head."""
    name = name.removeprefix("medusa_heads.")
    if block := _BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    output = _OUTPUT.fullmatch(name)
    return f"lm_heads.{output[1]}.weight" if output and int(output[2]) == layers else name


def _cut(
    published: Published, tensors: dict[str, Tensor], outputs: tuple[str, ...], token_map: Tensor, vocab_size: int
) -> None:
    """Take the draft vocabulary that `token_map` names, and of output heads over all tokens the rows of these."""
    ids = token_map.long()
    if ids.dim() != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise published.refuse(f"token_map must be a list of tokens below {vocab_size}; {REMEDY}.")
    tensors[D2T] = ids - torch.arange(len(ids))
    for name in outputs:
        if name in tensors and len(ids) < len(tensors[name]) == vocab_size:
            tensors[name] = tensors[name][ids]


def _fill_biases(tensors: dict[str, Tensor], config: HeadConfig) -> None:
    """Layers without a bias have one of zeros; all have one, or none has."""
    names = [
        f"blocks.{offset}.layers.{layer}.bias" for offset in range(config.block) for layer in range(config.num_layers)
    ]
    if not any(name in tensors for name in names):
        tensors |= {name: torch.zeros(config.hidden_size) for name in names}
