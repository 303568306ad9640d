"""From a folder that `foredraft train` wrote to one that another engine loads, or to a model with the head inside, and
what all layouts share."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.heads.base import CONFIG_FILE, D2T, T2D, HeadConfig
from foredraft.heads.engines import Engine
from foredraft.heads.files import check_target, read_tensors, write_tensor_file
from foredraft.heads.kinds import part
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import read_json

Json = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Head:
    """A head to export, and the model that it belongs to. `verifier` is the name by which the other engine finds that
    model."""

    folder: Path
    config: HeadConfig
    target: Checkpoint
    verifier: str

    @cached_property
    def tensors(self) -> Tensors:
        return read_tensors(self.folder, self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, which training writes as bfloat16."""
        return self.tensors["norm.weight"].dtype

    @property
    def embedding(self) -> Tensor:
        """The target's [vocab, hidden]."""
        return self.target.weight("model.embed_tokens.weight").dense().to(self.dtype).contiguous()

    @property
    def output(self) -> Tensor:
        """The target's output head [vocab, hidden]."""
        name = "model.embed_tokens.weight" if self.target.config.tie_word_embeddings else "lm_head.weight"
        return self.target.weight(name).dense().float()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """A head as another engine reads it, or a model with one inside. `method` and `tokens` are what that engine is told
    when it starts."""

    config: Json
    tensors: Tensors
    method: str
    tokens: int  # draft tokens per run of the target
    options: tuple[str, ...] = ()  # further words of the command that starts it
    files: tuple[Path, ...] = ()  # to be copied, instead of a config and tensors

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
        if self.files:
            return
        write_tensor_file(folder / "model.safetensors", self.tensors, {"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Exported:
    """What was written, and the command that uses it."""

    kind: str
    engine: Engine
    folder: Path
    command: str


def export(folder: Path, engine: Engine, out: Path, target: Checkpoint, verifier: str) -> Exported:
    """Write the head or draft model in `folder` to `out`, in the engine's layout. `verifier` is the name by which the
    engine finds the target. Raises InvalidModel where its layout has no place for a part of the head."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameter(f"{out} is there already; name a folder that is new or empty.")
    kind, layout = _layout(folder, engine, target, verifier)
    layout.write(out)
    return Exported(kind, engine, out, start_command(engine, layout, out, verifier))


def _layout(folder: Path, engine: Engine, target: Checkpoint, verifier: str) -> tuple[str, Layout]:
    """What is in the folder, and how the engine reads it."""
    file = folder / CONFIG_FILE
    is_model = file.is_file() and read_json(file).get("model_type") == "llama"
    kind = "draft" if is_model else HeadConfig.read(folder).kind
    if engine.is_of_models and kind != "mtp":
        raise InvalidModel(
            f"{engine.label} is that of models with an mtp layer inside, but {folder} is of the kind {kind}; those "
            "of heads are vllm, sglang and speculators."
        )
    if kind == "mtp" and not engine.is_of_models:
        raise InvalidModel(
            f"{folder} is an mtp layer, which engines read out of a model's own files; export it to deepseek or qwen: "
            "both write a copy of its model with the layer inside."
        )
    if is_model:
        return kind, part("draft_model", "export").model_layout(folder, engine)
    config = HeadConfig.read(folder)
    check_target(folder, config, target)
    if list(config.taps) != sorted(set(config.taps)):
        raise InvalidModel(f"{folder}: the taps {list(config.taps)} do not rise, as other engines deliver them.")
    return config.kind, part(config.kind, "export").layout(Head(folder, config, target, verifier), engine)


def start_command(engine: Engine, layout: Layout, folder: Path, verifier: str) -> str:
    """How the engine is started with an exported head."""
    if engine.is_of_models:
        return shlex.join(["foredraft", "chat", "--model", str(folder)])  # which finds the layer by itself
    if engine is Engine.speculators:
        return shlex.join(["vllm", "serve", str(folder)])  # which finds the target by the head's config
    if engine is Engine.vllm:
        chosen = {"method": layout.method, "model": str(folder), "num_speculative_tokens": layout.tokens}
        return shlex.join(["vllm", "serve", verifier, "--speculative-config", json.dumps(chosen), *layout.options])
    words = ["python", "-m", "sglang.launch_server", "--model-path", verifier]
    words += ["--speculative-algorithm", layout.method.upper(), "--speculative-draft-model-path", str(folder)]
    words += ["--speculative-num-steps", str(layout.tokens), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(layout.tokens + 1)])


def size_fields(config: HeadConfig) -> Json:
    """The sizes of decoder layers, as transformers names them."""
    return {
        "vocab_size": config.target_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
    }


def layer_fields(head: Head, model_type: str) -> Json:
    """The decoder layers of a head, as transformers describes those of a model."""
    return {
        "model_type": model_type,
        **size_fields(head.config),
        "attention_bias": False,
        "max_position_embeddings": head.target.config.max_position_embeddings,
        # Transformers 5 reads this, transformers 4 the rope_theta beside it.
        "rope_parameters": {"rope_type": "default", "rope_theta": head.config.rope_theta},
        "tie_word_embeddings": False,  # the output head is the head's own
        "torch_dtype": head.dtype_name,
    }


def vocabulary_tensors(head: Head) -> Tensors:
    """d2t and t2d; none where the draft vocabulary is the target's, because engines then expect none."""
    if head.config.draft_vocab_size == head.config.target_vocab_size:
        return {}
    return {name: head.tensors[name] for name in (D2T, T2D)}


def speculators_fields(head: Head, model_type: str, architecture: str, layers: Json, tokens: int) -> Json:
    """What the config of every kind has in the speculators format."""
    return {
        "architectures": [architecture],
        "speculators_model_type": model_type,
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": head.verifier, "architectures": []},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": head.dtype_name,
    }


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Tensors:
    """Tensors without d2t and t2d, where `names` gives another beginning to a name."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        start = next((start for start in names if name.startswith(start)), "")
        if name not in (D2T, T2D):
            found[names.get(start, "") + name.removeprefix(start)] = tensor
    return found
