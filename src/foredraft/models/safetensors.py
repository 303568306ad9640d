"""A folder with config.json and *.safetensors files as a checkpoint, read through the safetensors library only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import Weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.models.hf_config import config_from_json
from foredraft.models.json_file import read_json
from foredraft.models.shapes import check_shapes, fused_parts
from foredraft.models.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_PRECISION = {"F32": "float32", "F16": "bfloat16", "BF16": "bfloat16"}
_SAMPLING_FIELDS = ("top_p", "top_k", "min_p", "repetition_penalty")
_BUFFER_SUFFIX = "rotary_emb.inv_freq"  # old exports store what the config already says


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from: some rows of a stored tensor of an open shard."""

    shard: Any
    stored_name: str
    dtype: str
    first_row: int
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """See Checkpoint. Opening reads the headers only; a tensor's bytes are touched when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        generation = read_json(folder / "generation_config.json")
        self.config = _read_config(folder, generation)
        self.generation = _sampling_defaults(generation)
        self._sources: dict[str, _Source] = {}
        for file in _shard_files(folder):
            self._sources.update(_open_shard(file, self.config))
        check_shapes(folder, self.config, {name: source.shape for name, source in self._sources.items()})
        if self.config.tie_word_embeddings:
            self._sources.pop("lm_head.weight", None)  # some files repeat the embedding
        self.precision = _precision(self._sources)

    def names(self) -> set[str]:
        return set(self._sources)

    def weight(self, name: str) -> Weight:
        tensor = self._read(name)
        return Weight("bf16", tensor) if tensor.dtype == torch.bfloat16 else Weight("f32", tensor.float())

    def vector(self, name: str) -> Tensor:
        return self._read(name).float()

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_folder(self.path, self.config.eos_token_ids)
        tokenizer.check_fits(self.config.vocab_size, self.path)
        return tokenizer

    def _read(self, name: str) -> Tensor:
        if name not in self._sources:
            raise InvalidModel(f"{self.path} has no tensor {name!r}.")
        source = self._sources[name]
        last_row = source.first_row + source.shape[0]
        tensor: Tensor = source.shard.get_slice(source.stored_name)[source.first_row : last_row]
        return tensor


def _read_config(folder: Path, generation: dict[str, Any]) -> ModelConfig:
    file = folder / "config.json"
    if not file.is_file():
        if any(folder.glob("*.gguf")):
            raise InvalidModel(f"{folder} has no config.json, but GGUF files; give the path of one of those files.")
        raise InvalidModel(f"{folder} has no config.json; give a folder with config.json and .safetensors files.")
    raw = read_json(file)
    if generation.get("eos_token_id") is not None:
        raw["eos_token_id"] = generation["eos_token_id"]
    return config_from_json(file, raw)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """What the model's authors recommend, where they recommend sampling."""
    if generation.get("do_sample") is not True:
        return {}
    temperature = generation.get("temperature")
    given = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    return {"temperature": 1.0 if temperature is None else temperature, **given}


def _shard_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidModel(f"{index}: field weight_map is missing or empty; download the model again.")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise InvalidModel(f"{folder / name} is missing, but {_INDEX} lists it; download the model again.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if folder / "model.safetensors" in files:
        return [folder / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        raise InvalidModel(f"{folder} has {len(files)} .safetensors files but no {_INDEX}; download the model again.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise InvalidModel(
            f"{folder} has its weights in pickles, which can run any code when they are opened, so they are refused; "
            "use the .safetensors or .gguf version of the model."
        )
    raise InvalidModel(f"{folder} has no .safetensors files; download the model again, or name a GGUF file.")


def _open_shard(file: Path, config: ModelConfig) -> dict[str, _Source]:
    """Every tensor of a file under its name in the Llama layout; fused ones appear as their parts."""
    from safetensors import SafetensorError, safe_open

    shard: Any  # the library's own type is not annotated
    try:
        shard = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{file} is truncated or damaged ({error}); download it again.") from error
    sources: dict[str, _Source] = {}
    for stored_name in list(shard.keys()):
        if stored_name.endswith(_BUFFER_SUFFIX):
            continue
        view = shard.get_slice(stored_name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        if dtype not in _PRECISION or not shape:
            raise InvalidModel(
                f"{file}: tensor {stored_name!r} is {dtype} with shape {list(shape)}, but {', '.join(_PRECISION)} "
                "matrices and vectors are supported; use an unquantised version of the model."
            )
        first_row = 0
        for name, num_rows in fused_parts(file, config, stored_name, shape[0]):
            sources[name] = _Source(shard, stored_name, dtype, first_row, (num_rows, *shape[1:]))
            first_row += num_rows
    return sources


def _precision(sources: dict[str, _Source]) -> str:
    """The class in which most weights of the linear layers are stored."""
    weights: Counter[str] = Counter()
    for name, source in sources.items():
        if name.endswith("_proj.weight"):
            weights[_PRECISION[source.dtype]] += source.shape[0] * source.shape[1]
    return weights.most_common(1)[0][0]
