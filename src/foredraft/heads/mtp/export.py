"""An MTP layer inside a copy of its model, as a folder that transformers could have written, with the names that
DeepSeek or Qwen give to such a layer. What a file has in few bits is written in bfloat16."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import InvalidModel
from foredraft.heads.base import CONFIG_FILE, D2T, T2D
from foredraft.heads.engines import Engine
from foredraft.heads.export import Head, Json, Layout, layer_fields
from foredraft.heads.formats.mtp import ACCEPTANCE, ARCHITECTURES, STYLES
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import read_json
from foredraft.models.safetensors.config import config_from_json

_COUNT = {Engine.deepseek: "num_nextn_predict_layers", Engine.qwen: "mtp_num_hidden_layers"}
_OF_LAYERS = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "qk_norm", "rope_theta", "norm_eps")
_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # of GGUF files


@dataclass(frozen=True)
class ModelLayout(Layout):
    """With the model's tokenizer and its sampling defaults beside it."""

    target: Checkpoint | None = None

    def write(self, folder: Path) -> None:
        assert self.target is not None
        super().write(folder)
        self.target.tokenizer().save(folder)
        generation: Json = {"eos_token_id": list(self.target.config.eos_token_ids)}
        if self.target.generation:
            generation |= {"do_sample": True, **self.target.generation}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def layout(head: Head, engine: Engine) -> Layout:
    target, config = head.target, head.config
    if target.config.architecture not in ARCHITECTURES:
        raise InvalidModel(
            f"{target.path} is a {target.config.architecture} model, and layers of the kind mtp are read out of models "
            f"of the families {', '.join(ARCHITECTURES)} only; use this one with --head {head.folder}."
        )
    for name in _OF_LAYERS:
        own, of_target = getattr(config, name), getattr(target.config, name.replace("norm_eps", "rms_norm_eps"))
        if own != of_target:
            raise InvalidModel(
                f"{head.folder}: {name} is {own}, but a layer inside {target.path} is one of its own kind, with "
                f"{of_target}; train one with `foredraft train mtp`."
            )
    tensors = {name: _model_tensor(target, name) for name in sorted(target.names())}
    for name, tensor in head.tensors.items():
        if name not in (D2T, T2D):
            tensors[STYLES[engine].theirs(name, config.target_num_layers)] = tensor
    fields = _fields(head) if target.path.is_file() else read_json(target.path / CONFIG_FILE)
    fields = {name: value for name, value in fields.items() if name not in _COUNT.values()}
    fields |= {_COUNT[engine]: 1, "foredraft": {ACCEPTANCE: list(config.acceptance)}}
    return ModelLayout(fields, tensors, "mtp", config.block, target=target)


def _model_tensor(target: Checkpoint, name: str) -> Tensor:
    if not name.endswith("proj.weight") and name not in ("lm_head.weight", "model.embed_tokens.weight"):
        return target.vector(name)
    dense = target.weight(name).dense()
    return dense if target.precision == "float32" else dense.to(torch.bfloat16)


def _fields(head: Head) -> Json:
    """The config.json of a model in a GGUF file; InvalidModel where that cannot say all that the file says."""
    target = head.target.config
    family = _FAMILIES.get(target.architecture, "")
    fields: Json = {
        "architectures": [f"{family}ForCausalLM"],
        **layer_fields(head, target.architecture),
        "num_hidden_layers": target.num_layers,
        "tie_word_embeddings": target.tie_word_embeddings,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "torch_dtype": "float32" if head.target.precision == "float32" else "bfloat16",
    }
    said = config_from_json(head.target.path, fields)
    if said != replace(target, num_mtp_layers=0):
        raise InvalidModel(
            f"{head.target.path} is a model that no plain config.json describes, with a stretched rope or a sliding "
            "window; give the folder of its .safetensors files as --model."
        )
    return fields
