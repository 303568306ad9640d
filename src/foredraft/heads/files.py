"""A head on disk: config.json and one or more safetensors files; and the digest of the target that it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.heads.base import CONFIG_FILE, D2T, T2D, HeadConfig, tensor_shapes
from foredraft.heads.coding import coded, decoded, encoded
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import read_json, shown

Tensors = Mapping[str, Tensor | Weight]  # by their names; weights where the file has 8 or 4 bits
SHARD_BYTES = 15 << 20  # a file of a head stays below 16 MiB, which every host of repositories takes
_REPLACED = ("*.json", "model*.safetensors")  # what a folder loses when a head or a draft model is written to it
_AGAIN = "train or download the head again"


@dataclass(frozen=True)
class HeadFiles:
    """A head on disk that belongs to the model at hand."""

    folder: Path
    config: HeadConfig
    read: Callable[[], Tensors]  # all tensors of the head, checked against its config
    layout: str = "Foredraft"  # whose it is, for people
    is_in_target: bool = False  # the model's own file holds it

    @property
    def size_bytes(self) -> int:
        """Of the files that hold its tensors, and of a model that brings it along all others too."""
        files = self.folder.glob("*.safetensors") if self.folder.is_dir() else [self.folder]
        return sum(file.stat().st_size for file in files)

    @property
    def bits(self) -> float:
        """That a weight takes on disk, on average, beside those that the head shares with its target."""
        shapes = tensor_shapes(self.config)
        vocabulary = {D2T: 8, T2D: 1}  # bytes of an entry
        weights = sum(prod(shape) for name, shape in shapes.items() if name not in vocabulary)
        entries = sum(size * prod(shapes[name]) for name, size in vocabulary.items())
        return max(0, self.size_bytes - entries) * 8 / weights


def target_digest(checkpoint: Checkpoint) -> str:
    """What names a model in every precision: its sizes and its norm vectors, which quantisation leaves as they are."""
    config = checkpoint.config
    digest = hashlib.sha256()
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads)
    digest.update(repr((*sizes, config.num_kv_heads, config.head_dim)).encode())
    for name in sorted(name for name in checkpoint.names() if name.endswith("norm.weight")):
        digest.update(name.encode())
        digest.update(checkpoint.vector(name).numpy().tobytes())
    return digest.hexdigest()


def check_target(folder: Path, config: HeadConfig, checkpoint: Checkpoint) -> None:
    """Raise InvalidModel unless the head was trained for this target, as far as it says which one that is."""
    for name in ("hidden_size", "vocab_size", "num_layers"):
        wanted, found = getattr(config, f"target_{name}"), getattr(checkpoint.config, name)
        if wanted != found:
            raise InvalidModel(
                f"{folder}: the head was trained for {config.target_name} with target_{name} {wanted}, but "
                f"{checkpoint.path} has {found}; use the head of this model, or train one."
            )
    if config.target_digest and config.target_digest != target_digest(checkpoint):
        raise InvalidModel(
            f"{folder}: the head was trained for {config.target_name}, whose weights are not those of "
            f"{checkpoint.path}; use the head of this model, or train one."
        )


def check_out(folder: Path) -> None:
    """Raise InvalidParameter unless a head or a draft model may be written to the folder: what would be replaced there
    is one that Foredraft has written."""
    if folder.exists() and not folder.is_dir():
        raise InvalidParameter(f"{folder} is a file; name a folder that is new or empty.")
    found = sorted(file.name for pattern in _REPLACED for file in folder.glob(pattern))
    config = read_json(folder / CONFIG_FILE)
    if found and "target_digest" not in config and not isinstance(config.get("foredraft"), dict):
        raise InvalidParameter(
            f"{folder} holds {shown(found[0])} and no head or draft model that Foredraft has written, so nothing is "
            "replaced there; name a folder that is new or empty."
        )


def read_tensor_file(file: Path, remedy: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file; InvalidModel where it is damaged."""
    from safetensors import SafetensorError, safe_open

    opened: Any  # the library's own type is not annotated
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in list(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{file} is truncated or damaged ({error}); {remedy}.") from error


def write_tensor_file(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """All at once or not at all: a file that is there is whole."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata)
    partial.replace(file)


def write_head(
    folder: Path, config: HeadConfig, weights: Mapping[str, Tensor | Weight], bits: Mapping[str, int] | None = None
) -> None:
    """The head in `folder`, in place of the one that is there; large heads in several files. Floating tensors should be
    bfloat16; `bits` names those that are written in 8 or 4."""
    check_tensors(folder, config, weights)
    check_out(folder)
    tensors = encoded(weights, bits or {})
    config.write(folder)  # first: by it the folder is known if writing stops half-way
    write_shards(folder, tensors)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, str]:
    """Writes tensors in place of those in a folder, in several files if they are large; one that is too large for a
    file has one of its own. Returns the file of each."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * tensor.element_size()
        if used and used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    files = {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    for file, shard in files.items():
        write_tensor_file(folder / file, shard, metadata)
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()
    return {name: file for file, shard in files.items() for name in shard}


def read_tensors(folder: Path, config: HeadConfig) -> dict[str, Tensor]:
    """All tensors of a head, checked against its config: bfloat16 where they were written in fewer bits."""
    return {name: decoded(tensor) for name, tensor in read_weights(folder, config).items()}


def read_weights(folder: Path, config: HeadConfig) -> dict[str, Tensor | Weight]:
    """All tensors of a head, checked against its config. Those that were written in 8 or 4 bits keep their codes."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InvalidModel(f"{folder} has no model.safetensors; {_AGAIN}.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        shard = read_tensor_file(file, _AGAIN)[1]
        if twice := tensors.keys() & shard.keys():
            raise InvalidModel(f"{file}: tensor {shown(min(twice))} is there twice; {_AGAIN}.")
        tensors |= shard
    weights = coded(tensors)
    check_tensors(folder, config, weights)
    return weights


def check_tensors(
    folder: Path, config: HeadConfig, weights: Tensors, named: Callable[[str], str] = str, remedy: str = _AGAIN
) -> None:
    """Raise InvalidModel unless the tensors are exactly those that `config` describes, and the vocabularies agree.
    `named` gives the name that a tensor has in the file."""
    expected = tensor_shapes(config)
    tensors = {name: weight if isinstance(weight, Tensor) else weight.values for name, weight in weights.items()}
    for name, shape in expected.items():
        if name not in tensors:
            raise InvalidModel(
                f"{folder}: tensor {named(name)!r} is missing, but {config.kind} heads need it; {remedy}."
            )
        if tuple(tensors[name].shape) != shape:
            raise InvalidModel(
                f"{folder}: tensor {named(name)!r} has shape {list(tensors[name].shape)}, but config.json asks for "
                f"{list(shape)}; {remedy}."
            )
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        raise InvalidModel(
            f"{folder}: tensor {shown(named(unknown[0]))} is not a tensor of {config.kind} heads; {remedy}."
        )
    if tensors[D2T].dtype != torch.int64 or tensors[T2D].dtype != torch.bool:
        raise InvalidModel(f"{folder}: d2t must be int64 and t2d bool; {remedy}.")
    ids = tensors[D2T].cpu() + torch.arange(config.draft_vocab_size)
    if not torch.equal(ids, tensors[T2D].cpu().nonzero()[:, 0]):
        raise InvalidModel(f"{folder}: d2t and t2d name different draft vocabularies; {remedy}.")
