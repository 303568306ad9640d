"""A folder with config.json and *.safetensors files as a checkpoint, read through the safetensors library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.backends.weight import Weight, plain_weight
from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.models.architectures import MODEL_TYPES
from foredraft.models.checkpoint import Checkpoint, StoredTensor
from foredraft.models.fields import Fields, read_json, shown
from foredraft.models.safetensors import gpt_oss
from foredraft.models.safetensors.config import config_from_json
from foredraft.models.tokenizer import Tokenizer
from foredraft.params import NEUTRAL, SamplingParams

_INDEX = "model.safetensors.index.json"
_PRECISION = {"F32": "float32", "F16": "bfloat16", "BF16": "bfloat16"}
_BUFFER_SUFFIX = "rotary_emb.inv_freq"  # old exports store what the config already says


class SafetensorsCheckpoint(Checkpoint):
    """See Checkpoint."""

    def __init__(self, folder: Path) -> None:
        file = folder / "config.json"
        if not file.is_file():
            if any(folder.glob("*.gguf")):
                raise InvalidModel(f"{folder} has no config.json, but GGUF files; give the path of one of those files.")
            raise InvalidModel(f"{folder} has no config.json; give a folder with config.json and .safetensors files.")
        config = config_from_json(file, read_json(file))
        generation = folder / "generation_config.json"
        sampling = read_json(generation)
        eos_token_ids = Fields(generation, sampling).token_ids("eos_token_id") or config.eos_token_ids
        config = replace(config, eos_token_ids=eos_token_ids)
        stored = _all_tensors(shard_files(folder), config)
        read_tokenizer = partial(Tokenizer.from_folder, folder, config.eos_token_ids)
        super().__init__(folder, config, _sampling_defaults(generation, sampling), stored, read_tokenizer)


def _sampling_defaults(file: Path, generation: dict[str, Any]) -> dict[str, Any]:
    """What the model's authors recommend, where they recommend sampling."""
    if generation.get("do_sample") is not True:
        return {}
    given = {name: generation[name] for name in NEUTRAL if generation.get(name) is not None}
    defaults = {"temperature": 1.0, **given}
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise InvalidModel(f"{file} cannot be used: {error} Correct it, or remove the file.") from error
    return defaults


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, which its index lists where there are several."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidModel(f"{index}: field weight_map is missing or empty; download the model again.")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidModel(
                f"{index}: field weight_map must give a file for every tensor; download the model again."
            )
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


def stored_names(file: Path) -> list[str]:
    """The names of the tensors of a file."""
    return list(_opened(file).keys())


def _opened(file: Path) -> Any:
    """The library's own type is not annotated."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{file} is truncated or damaged ({error}); download it again.") from error


def _all_tensors(files: list[Path], config: ModelConfig) -> Iterator[StoredTensor]:
    """Of all files. The experts of gpt-oss are read last: what belongs together may lie in several of them."""
    fuses_experts, experts = MODEL_TYPES[config.architecture].fuses_experts, dict[str, gpt_oss.Place]()
    for file in files:
        shard = _opened(file)
        plain = []
        for name in list(shard.keys()):
            if fuses_experts and gpt_oss.are_experts(name):
                experts[name] = gpt_oss.Place(file, shard)
            elif not name.endswith(_BUFFER_SUFFIX):
                plain.append(name)
        yield from _stored_tensors(file, shard, plain, config)
    if config.experts is not None:
        yield from gpt_oss.expert_tensors(experts, config.experts.count)


def _stored_tensors(file: Path, shard: Any, wanted: list[str], config: ModelConfig) -> Iterator[StoredTensor]:
    """Some tensors of a file. The library compares the header's length, shapes and offsets with the file's size."""
    architecture = MODEL_TYPES[config.architecture]
    for name in wanted:
        view = shard.get_slice(name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        if dtype not in _PRECISION or not shape:
            raise InvalidModel(
                f"{file}: tensor {shown(name)} is {dtype} with shape {list(shape)}, but {', '.join(_PRECISION)} "
                "matrices and vectors are supported; use an unquantised version of the model."
            )
        read = partial(_read, shard, name, architecture.norms_from_zero and len(shape) == 1)
        yield StoredTensor(file, _layout_name(name, architecture.tensor_names), shape, _PRECISION[dtype], read)


def _layout_name(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + ours
    return name


def _read(shard: Any, stored_name: str, adds_one: bool, name: str, wanted: slice) -> Weight:
    """`adds_one`: Gemma's norms multiply by one more than what is stored."""
    values = shard.get_slice(stored_name)[wanted]
    return plain_weight(values.float() + 1 if adds_one else values)
