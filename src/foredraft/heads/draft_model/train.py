"""Training of a draft model: a small Llama that learns the target's distribution from tokens alone. It is saved as a
folder that `draft_model` loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.heads.base import CONFIG_FILE, D2T, MAX_BLOCK, T2D, HeadConfig
from foredraft.heads.draft_model.module import Llama
from foredraft.heads.export import size_fields
from foredraft.heads.files import check_out, check_target, write_shards
from foredraft.models.catalog import open_checkpoint
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import MAX_LAYERS, read_json
from foredraft.models.tokenizer import Tokenizer
from foredraft.train.features import FrozenTarget
from foredraft.train.losses import best, distributions, soft_cross_entropy
from foredraft.train.student import MAX_WIDTH, Facts, Start, Student, whole
from foredraft.train.target_batch import TargetBatch

_ROWS = 8192  # that a step looks at: the logits are over the target's whole vocabulary


@dataclass(frozen=True)
class Options:
    layers: int = whole(4, MAX_LAYERS)
    hidden: int = whole(0, MAX_WIDTH)  # 0: two thirds of the target's, in whole attention heads
    depth: int = whole(4, MAX_BLOCK)


class DraftStudent(Student):
    module: Llama
    taps: frozenset[int] = frozenset()

    def __init__(self, name: str, shape: HeadConfig, target: FrozenTarget, tokenizer: Tokenizer, depth: int) -> None:
        """The embedding starts as the target's, projected on the directions in which that varies most."""
        self.name, self.depth = name, depth
        self._shape, self._target, self._tokenizer = shape, target, tokenizer
        self.module = Llama(shape)
        with torch.no_grad():
            table = target.embedding.float()
            directions = torch.linalg.eigh((table.T @ table).cpu())[1].flip(1)[:, : shape.hidden_size]
            embedding = self.module.model.embed_tokens.weight
            embedding[:, : directions.shape[1]] = (table @ directions.to(table.device)).cpu()
            self.module.model.norm.weight.fill_(1 / embedding.norm(dim=1).mean())  # logits of about unit spread
        self.module.to(target.device)

    def loss(self, seen: TargetBatch, generator: torch.Generator) -> Tensor:
        places = (seen.label_rows >= 0).flatten().nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator, device=places.device)
        places = places[order[:_ROWS]]
        normed = seen.features.normed.flatten(0, 1)[places]
        wanted = distributions(normed, self._target.head, self._target.config.logits_divisor)
        rows = self._rows(seen).flatten(0, 1)[places]
        scale = torch.full((len(places),), 1 / max(1, len(places)), device=places.device)
        index = torch.arange(len(places), device=places.device)
        return soft_cross_entropy(rows, self.module.output_weight, wanted, index, scale)

    @torch.no_grad()
    def drafts(self, seen: TargetBatch) -> Tensor:
        rows = self._rows(seen)
        found = best(rows.flatten(0, 1), self.module.output_weight).view(seen.batch.tokens.shape)
        # Draft token j behind i is what the model says after position i + j.
        return torch.stack([torch.nn.functional.pad(found[:, j:], (0, j)) for j in range(self.depth)])

    def save(self, folder: Path, acceptance: Sequence[float], provenance: Facts) -> None:
        check_out(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / CONFIG_FILE, self._config(acceptance, provenance))  # first, as heads are written
        tensors = {name: tensor.bfloat16() for name, tensor in self.module.state_dict().items()}
        weight_map = write_shards(folder, tensors, metadata={"format": "pt"})
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        self._tokenizer.save(folder)

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        state = {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise InvalidModel(
                f"{folder} holds a draft model of another shape; give its options, or another folder."
            ) from error

    def _rows(self, seen: TargetBatch) -> Tensor:
        return self.module(seen.batch.tokens, seen.positions, seen.features.normed)

    def _config(self, acceptance: Sequence[float], provenance: Facts) -> dict[str, object]:
        """As transformers writes it; what Foredraft adds is under one key."""
        shape, target = self._shape, self._target.config
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **size_fields(shape),
            "max_position_embeddings": target.max_position_embeddings,
            "tie_word_embeddings": True,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": list(target.eos_token_ids or self._tokenizer.eos_token_ids),
            "torch_dtype": "bfloat16",
            "foredraft": {
                "target_name": shape.target_name,
                "target_digest": shape.target_digest,
                "acceptance": [round(rate, 4) for rate in acceptance],
                "provenance": provenance,
            },
        }


def build(options: Options, start: Start) -> DraftStudent:
    shape = _narrower(replace(start.shape, num_layers=options.layers), options.hidden)
    return DraftStudent(start.name, shape, start.target, start.tokenizer, options.depth)


def _narrower(shape: HeadConfig, hidden: int) -> HeadConfig:
    """The layers of a narrower model: as many heads as fit, two of them to each key."""
    if hidden % shape.head_dim:
        raise InvalidParameter(f"draft: hidden={hidden} must be a multiple of the target's head size {shape.head_dim}.")
    heads = hidden // shape.head_dim or max(1, round(shape.hidden_size * 2 / 3 / shape.head_dim))
    hidden = heads * shape.head_dim
    inner = -(-shape.intermediate_size * hidden // shape.hidden_size // 32) * 32
    kv_heads = heads // 2 if heads % 2 == 0 else heads
    return replace(shape, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)


def as_head(folder: Path, target: Checkpoint, token_ids: Tensor) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The draft model in `folder` as a head of its target: with these tokens only, which are sorted. The embeddings of
    the others become functions of the target's, as close as one matrix gives them."""
    draft, record = open_checkpoint(folder), read_json(folder / CONFIG_FILE)["foredraft"]
    config = HeadConfig.of_sizes(
        draft.config,
        target.config,
        kind="draft_model",
        target_name=record["target_name"],
        target_digest=record["target_digest"],
        taps=(),
        draft_vocab_size=len(token_ids),
        block=max(1, len(record["acceptance"])),
        acceptance=tuple(record["acceptance"]),
        provenance=record["provenance"],
    )
    check_target(folder, config, target)
    tensors = {name.removeprefix("model."): draft.weight(name).dense() for name in draft.names() if "norm" not in name}
    tensors |= {name.removeprefix("model."): draft.vector(name) for name in draft.names() if "norm" in name}
    table = tensors.pop("embed_tokens.weight")
    known = torch.zeros(len(table), dtype=torch.bool)
    known[token_ids] = True
    fitted = known if known.all() else ~known
    theirs = target.weight("model.embed_tokens.weight").dense()[fitted]
    tensors["embed_tokens.weight"] = table[known]
    tensors["unknown_proj.weight"] = torch.linalg.lstsq(theirs, table[fitted]).solution.T
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return config, tensors | {D2T: token_ids - torch.arange(len(token_ids)), T2D: known}


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
