"""A layer for multi-token prediction in the target's own checkpoint, as DeepSeek, MiMo or Qwen and their relatives
write it, or in a folder of its own in the speculators format. The names of llama.cpp become those of DeepSeek when a
file is opened.

They differ in names and in what stands first in the rows that fc reads: the embedding, with MiMo the state. The layer
is one of the target's own kind, and reads what the target's output head reads. vLLM blanks the embedding of the first
row out; nothing in the publishers' own code does, and neither does this."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.heads.base import CONFIG_FILE, D2T, MAX_BLOCK, PROJECTIONS, T2D, HeadConfig
from foredraft.heads.files import HeadFiles, Tensors, check_tensors
from foredraft.heads.formats.published import (
    Published,
    check_config,
    completed,
    drop_shared_embedding,
    found_biases,
    head_fields,
)
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import is_number, read_json, shown

log = logging.getLogger(__name__)

DEFAULT_DEPTH = 3  # of drafts: most layers were trained to predict one token
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mimo")  # whose layers are those that heads can have
ACCEPTANCE = "mtp_acceptance"  # in config.json, under the one key that Foredraft adds
REMEDY = "download the model again, or load it without this layer (head=None)"


@dataclass(frozen=True)
class Style:
    """How the names of a layer begin, where `{}` is the number of the model's own layers, and those of its parts."""

    prefix: str
    parts: Mapping[str, str]  # our names by theirs; the first that a name begins with counts
    state_first: bool = False  # in the rows that fc reads

    def ours(self, name: str, num_layers: int) -> str:
        """Our name of a tensor; its own where this style has none for it."""
        inner = name.removeprefix(self.prefix.format(num_layers))
        found = ((their, our) for their, our in self.parts.items() if inner != name and inner.startswith(their))
        return next((our + inner.removeprefix(their) for their, our in found), name)

    def theirs(self, name: str, num_layers: int) -> str:
        """The name that one of our tensors has in this style."""
        found = ((their, our) for their, our in self.parts.items() if name.startswith(our))
        return next((self.prefix.format(num_layers) + their + name.removeprefix(our) for their, our in found), name)


STYLES = {
    "deepseek": Style(
        "model.layers.{}.",
        {
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "fc.",
            "shared_head.norm.": "norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
            "": "midlayer.",
        },
    ),
    "mimo": Style(
        "model.mtp_layers.0.",
        {
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "fc.",
            "final_layernorm.": "norm.",
            "": "midlayer.",
        },
        state_first=True,
    ),
    "qwen": Style(
        "mtp.",
        {
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "fc.": "fc.",
            "norm.": "norm.",
            "embed_tokens.": "embed_tokens.",
            "lm_head.": "lm_head.",
            "layers.0.": "midlayer.",
        },
    ),
}
_SPECULATORS = Style("mtp_layers.0.", STYLES["mimo"].parts)  # MiMo's names, with Qwen's order


def fits(published: Published) -> bool:
    return published.speculators_type == "mtp"


def read(published: Published, target: Checkpoint) -> tuple[HeadConfig, Tensors]:
    """A layer in a folder of its own, whose config describes the whole target."""
    layers = published.layers()
    sliding = tuple(layer for layer in layers.sliding_layers or () if layer == 0)
    layers = replace(
        layers, num_layers=1, sliding_window=layers.sliding_window if sliding else None, sliding_layers=sliding
    )
    tensors = {_SPECULATORS.ours(name, 0): tensor for name, tensor in published.tensors().items()}
    drop_shared_embedding(tensors, target)
    config = HeadConfig.of_sizes(
        layers,
        target.config,
        kind="mtp",
        **head_fields(published, layers, target),
        taps=(target.config.num_layers,),
        draft_vocab_size=layers.vocab_size,
        block=published.speculative_tokens() or DEFAULT_DEPTH,
        shares_embedding="embed_tokens.weight" not in tensors,
        shares_output="lm_head.weight" not in tensors,
        biases=found_biases(published, ["mtp_layers.0"], published.section("transformer_layer_config")),
        qk_norm=layers.qk_norm,
    )
    check_config(published.folder, config, target)
    return completed(published, config, tensors, ("lm_head.weight",), lambda name: _SPECULATORS.theirs(name, 0))


def find_mtp(target: Checkpoint) -> HeadFiles | None:
    """The layer that a checkpoint brings along, if it has one that can run; InvalidModel where it is not whole."""
    names, sizes = sorted(target.mtp_names()), target.config
    if not names:
        return None
    if sizes.architecture not in ARCHITECTURES or sizes.rope_dim:
        log.warning(
            "%s has a layer for multi-token prediction, which is not supported in %s models, so it is left out.",
            *(target.path, sizes.architecture),
        )
        return None
    if sizes.num_mtp_layers > 1:
        log.warning(
            "%s has %d layers for multi-token prediction, but only one is supported, so they are left out.",
            *(target.path, sizes.num_mtp_layers),
        )
        return None
    fitting = (style for style in STYLES.values() if names[0].startswith(style.prefix.format(sizes.num_layers)))
    style = next(fitting, STYLES["mimo"])
    theirs = {style.ours(name, sizes.num_layers): name for name in names}
    for name, of_target in _shared(sizes).items():
        if name in theirs and _same(target.weight(theirs[name]), target.weight(of_target)):
            del theirs[name]  # most publishers repeat what is the target's
    config = _config(target, theirs)

    def read() -> Tensors:
        tensors = {name: _tensor(target.weight(their)) for name, their in theirs.items()}
        if style.state_first and isinstance(fc := tensors.get("fc.weight"), Tensor):
            tensors["fc.weight"] = fc.roll(fc.shape[-1] // 2, dims=-1)
        every = {D2T: torch.zeros(sizes.vocab_size, dtype=torch.int64), T2D: torch.ones(sizes.vocab_size).bool()}
        return tensors | every

    def named(name: str) -> str:
        return theirs.get(name) or style.theirs(name, sizes.num_layers)

    check_tensors(target.path, config, read(), named, REMEDY)
    # Its tensors are read again when it is used, which may be never.
    return HeadFiles(target.path, config, read, layout="MTP", is_in_target=True)


def _config(target: Checkpoint, theirs: Mapping[str, str]) -> HeadConfig:
    """A layer of the target's own sizes. What it has beside the usual parts, its tensors tell."""
    sizes = target.config
    window = sizes.window_of_layer(sizes.num_layers)
    biases = (
        name
        for module, projections in PROJECTIONS.items()
        for name in projections
        if f"midlayer.{module}.{name}.bias" in theirs
    )
    return HeadConfig.of_sizes(
        sizes,
        sizes,
        num_layers=1,
        kind="mtp",
        target_name=target.path.name,
        target_digest="",
        taps=(sizes.num_layers,),
        draft_vocab_size=sizes.vocab_size,
        block=DEFAULT_DEPTH,
        shares_embedding="embed_tokens.weight" not in theirs,
        shares_output="lm_head.weight" not in theirs,
        rope_scaling=sizes.rope_scaling,
        sliding_window=window,
        sliding_layers=(0,) if window else (),
        biases=tuple(biases),
        qk_norm=sizes.qk_norm,
        acceptance=_measured(target),
    )


def _measured(target: Checkpoint) -> tuple[float, ...]:
    """By depth, as an export from here has it; others measure nothing."""
    file = target.path / CONFIG_FILE
    record = read_json(file).get("foredraft")
    rates = record.get(ACCEPTANCE, []) if isinstance(record, dict) else []
    if not isinstance(rates, list) or len(rates) > MAX_BLOCK or not all(is_number(r) and 0 <= r <= 1 for r in rates):
        raise InvalidModel(
            f"{file}: field foredraft.{ACCEPTANCE} is {shown(rates)}, but at most {MAX_BLOCK} rates from 0 to 1 are "
            "needed; remove it."
        )
    return tuple(map(float, rates))


def _shared(sizes: ModelConfig) -> dict[str, str]:
    """Tensors that may be the target's, and what they are called there."""
    embedding = "model.embed_tokens.weight"
    return {
        "embed_tokens.weight": embedding,
        "lm_head.weight": embedding if sizes.tie_word_embeddings else "lm_head.weight",
    }


def _same(one: Weight, other: Weight) -> bool:
    pairs = zip(one.parts, other.parts, strict=True)
    return one.kind == other.kind and all(a is b is None or torch.equal(a, b) for a, b in pairs)


def _tensor(weight: Weight) -> Tensor | Weight:
    """A tensor where the file has floats, else a weight with its codes. A GGUF file has vectors as columns."""
    if weight.scales is not None:
        return weight
    return weight.values.flatten() if weight.values.shape[1:] == (1,) else weight.values
