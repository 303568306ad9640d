"""A head as somebody has published it, and what the readers of all layouts share: its layers, its draft vocabulary, and
the check that every tensor is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.heads.base import CONFIG_FILE, D2T, PROJECTIONS, T2D, HeadConfig
from foredraft.heads.files import Tensors, check_target, check_tensors, read_tensor_file
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import Fields, is_whole, read_json, shown
from foredraft.models.safetensors.checkpoint import shard_files, stored_names
from foredraft.models.safetensors.config import config_from_json

REMEDY = "download the head again, or use one that was published for this model"
DEFAULT_DEPTH = 5  # of drafts, where the publisher names none
_LAYERS = "transformer_layer_config"  # where speculators' configs describe the layers
_EMBEDDING = "embed_tokens.weight"
_SOME_ROWS = 1024  # of an embedding, looked at at once
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OTHERS = (torch.int64, torch.int32, torch.bool)  # of vocabularies
_BUFFER_SUFFIX = "rotary_emb.inv_freq"  # says what the config says
# What some families of models have in their layers, and those of heads do not.
_OF_MODELS = (
    *("rope_dim", "no_rope_layers", "experts", "attention_sinks", "window_rope_theta", "activation", "update_norms"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_divisor"),
)


@dataclass(frozen=True)
class Published:
    """A folder with a config.json and safetensors files. Opening one reads the config and the names of its tensors."""

    folder: Path

    @cached_property
    def raw(self) -> dict[str, Any]:
        return read_json(self.file)

    @property
    def file(self) -> Path:
        return self.folder / CONFIG_FILE

    @property
    def fields(self) -> Fields:
        return Fields(self.file, self.raw)

    @property
    def architectures(self) -> list[str]:
        value = self.raw.get("architectures")
        return [str(item) for item in value] if isinstance(value, list) else []

    @property
    def speculators_type(self) -> str | None:
        """What a config in the speculators format says that it is; None for all others."""
        value = self.raw.get("speculators_model_type")
        return None if value is None else str(value)

    @property
    def projector(self) -> str:
        """What drafts behind the layers of a block, where DFlash's relatives name it."""
        return Fields(self.file, {**self.raw, **self.section("dflash_config")}).text("projector_type", "")

    @cached_property
    def names(self) -> set[str]:
        """Of its tensors, as `tensors` has them."""
        found = (name for file in self._files for name in stored_names(file))
        return {name.removeprefix("model.") for name in found if not name.endswith(_BUFFER_SUFFIX)}

    @property
    def _files(self) -> list[Path]:
        if not any(self.folder.glob("*.safetensors")):
            raise self.refuse(
                "there are no .safetensors files, and a pickle (pytorch_model.bin) is not opened, because it can run "
                'any code; convert it in its folder: python -c "import torch, safetensors.torch as s; s.save_file({k: '
                "v.contiguous() for k, v in torch.load('pytorch_model.bin', weights_only=True).items()}, "
                "'model.safetensors')\", and give that folder."
            )
        return shard_files(self.folder)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, without the prefix that some publishers give to names."""
        tensors: dict[str, Tensor] = {}
        for file in self._files:
            for full, tensor in read_tensor_file(file, REMEDY)[1].items():
                name = full.removeprefix("model.")
                if name.endswith(_BUFFER_SUFFIX):
                    continue
                if name in tensors:
                    raise InvalidModel(f"{file}: tensor {shown(name)} is there twice; {REMEDY}.")
                if tensor.dtype not in (*_FLOATS, *_OTHERS):
                    raise InvalidModel(
                        f"{file}: tensor {shown(name)} is {str(tensor.dtype).removeprefix('torch.')}, but float32, "
                        "bfloat16 and float16 are supported; use an unquantised version of the head."
                    )
                tensors[name] = tensor
        return tensors

    def section(self, name: str) -> dict[str, Any]:
        """A part of the config that is an object; empty where it is not there."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fields.error(name, f"is {shown(value)}, but an object is needed")
        return value or {}

    def layers(self) -> ModelConfig:
        """The decoder layers of the head, as those of a model. Sliding windows are those that `layer_types` names."""
        raw = self.section(_LAYERS) or self.raw
        config = config_from_json(self.file, raw)
        for each in fields(config):
            found = getattr(config, each.name)
            if each.name in _OF_MODELS and found != each.default:
                raise self.refuse(
                    f"its layers are those of {config.architecture} models with {each.name} {shown(found)}, which "
                    "changes what they compute and is not supported in heads; use a head with layers of Llama or Qwen."
                )
        kinds = raw.get("layer_types") or []
        if not isinstance(kinds, list):
            raise self.fields.error("layer_types", f"is {shown(kinds)}, but a list is needed")
        sliding = tuple(
            index for index in range(config.num_layers) if kinds[index : index + 1] == ["sliding_attention"]
        )
        window = Fields(self.file, raw).integer("sliding_window") if sliding else None
        return replace(config, sliding_window=window, sliding_layers=sliding)

    def ids(self, section: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where it is not there or empty, which is how some publishers say so."""
        value = section.get(name)
        if value is not None and not (isinstance(value, list) and all(map(is_whole, value))):
            raise self.fields.error(name, f"is {shown(value)}, but a list of whole numbers is needed")
        return tuple(value) if value else None

    def refuse(self, sentence: str) -> InvalidModel:
        return InvalidModel(f"{self.folder}: {sentence}")

    def missing(self, name: str, announced: str) -> InvalidModel:
        """For a tensor that is not there, although a field of the config announces it."""
        return self.refuse(f"tensor {name!r} is missing, but config.json has {announced}; {REMEDY}.")

    def speculative_tokens(self) -> int | None:
        """How many tokens a draft should have, which only speculators' configs say."""
        methods = self.section("speculators_config").get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else None
        count = first.get("speculative_tokens") if isinstance(first, dict) else None
        return int(count) if count is not None and is_whole(count) and count >= 1 else None

    def target_name(self) -> str:
        verifier = self.section("speculators_config").get("verifier")
        name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return name if isinstance(name, str) and name else "another model"


def check_config(place: Path, config: HeadConfig, target: Checkpoint) -> None:
    """Raise InvalidModel unless the fields of a translated config fit each other and the target. Nothing that is as
    large as they say should be made before."""
    check_target(place, config, target)
    if problem := config.problem():
        raise InvalidModel(f"{place}: {problem[0]} {problem[1]}; {REMEDY}.")


def head_fields(published: Published, layers: ModelConfig, target: Checkpoint) -> dict[str, Any]:
    """Fields of HeadConfig that all kinds read alike."""
    return {
        "target_name": published.target_name(),
        "target_digest": "",
        "target_hidden_size": published.fields.integer("target_hidden_size", layers.hidden_size),
        "target_vocab_size": layers.vocab_size,
        "rope_scaling": layers.rope_scaling,
        "sliding_window": layers.sliding_window or 0,
        "sliding_layers": layers.sliding_layers or (),
    }


def drop_shared_embedding(tensors: dict[str, Tensor], target: Checkpoint) -> None:
    """Take the target's embedding in place of a copy of it: some formats store one."""
    own, shared = tensors.get(_EMBEDDING), target.weight(f"model.{_EMBEDDING}")
    if own is not None and tuple(own.shape) == (shared.outputs, shared.inputs):
        for start in range(0, len(own), _SOME_ROWS):
            rows = own[start : start + _SOME_ROWS]
            if not torch.equal(rows, shared.rows(start, start + len(rows)).dense().to(own.dtype)):
                return
        del tensors[_EMBEDDING]


def found_biases(published: Published, prefixes: Iterable[str], raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The projections of layers that have a bias. Where the config says that there are some, they must be there."""
    flags = Fields(published.file, raw)
    found: list[str] = []
    for module, names in PROJECTIONS.items():
        claimed = flags.flag("attention_bias" if module == "self_attn" else "mlp_bias", False)
        for name in names:
            if claimed or any(f"{prefix}.{module}.{name}.bias" in published.names for prefix in prefixes):
                found.append(name)
    return tuple(found)


def completed(
    published: Published,
    config: HeadConfig,
    tensors: dict[str, Tensor],
    by_column: tuple[str, ...],
    named: Callable[[str], str],
) -> tuple[HeadConfig, Tensors]:
    """The head with a draft vocabulary as ours are, once every tensor is known and none is missing. `by_column` names
    the tensors that have a row for each token of the vocabulary, and `named` gives the name of a tensor in the file."""
    _set_vocabulary(published, tensors, config, by_column)
    check_tensors(published.folder, config, tensors, named, REMEDY)
    return config, tensors


def _set_vocabulary(
    published: Published, tensors: dict[str, Tensor], config: HeadConfig, by_column: tuple[str, ...]
) -> None:
    """Make the draft vocabulary of `tensors` ours: d2t and t2d, whichever of them is there, with rising ids. Neither is
    the identity."""
    size, total = config.draft_vocab_size, config.target_vocab_size
    offsets, known = tensors.get(D2T), tensors.get(T2D)
    if offsets is not None:
        if offsets.shape != (size,):
            raise published.refuse(f"d2t has shape {list(offsets.shape)}, but config.json asks for [{size}]; {REMEDY}.")
        ids = offsets.long() + torch.arange(size)
    elif known is not None:
        ids = known.bool().nonzero()[:, 0]
    elif size == total:
        ids = torch.arange(size)
    else:
        raise published.refuse(
            f"draft_vocab_size is {size}, but neither d2t nor t2d says which of the {total} tokens these are; {REMEDY}."
        )
    outside = bool(len(ids)) and (int(ids.min()) < 0 or int(ids.max()) >= total)
    if len(ids) != size or len(ids.unique()) != size or outside:
        raise published.refuse(f"d2t and t2d do not name {size} different ones of {total} tokens; {REMEDY}.")
    order = ids.argsort()
    if not torch.equal(order, torch.arange(size)):
        for name in by_column:
            matrix = tensors.get(name)
            if matrix is not None and len(matrix) == size:
                tensors[name] = matrix[order]
        ids = ids[order]
    mask = torch.zeros(total, dtype=torch.bool)
    mask[ids] = True
    if known is not None and not torch.equal(known.bool(), mask):
        raise published.refuse(f"d2t and t2d name different draft vocabularies; {REMEDY}.")
    tensors[D2T], tensors[T2D] = ids - torch.arange(size), mask
