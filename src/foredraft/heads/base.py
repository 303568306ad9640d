"""What a trained head is, whatever its kind: its config.json, checked when it is read, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from foredraft.config import ModelConfig
from foredraft.errors import InvalidModel
from foredraft.heads.kinds import KINDS, part
from foredraft.models.fields import MAX_LAYERS, is_number, is_positive, is_whole, read_json, shown

CONFIG_FILE = "config.json"
CORRECTIONS = ("none", "markov", "refiner")
BLOCK_INPUTS = ("injected", "masked")
MAX_BLOCK = 64  # tokens of a draft: four times as many as any head has, and blocks of so many rows stay small
D2T, T2D = "d2t", "t2d"  # int64 [draft_vocab]: target id = i + d2t[i]; bool [target_vocab]
_MOST = 2**31 - 1  # of sizes, which the shapes of the tensors then confirm

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadConfig:
    """One trained head. It belongs to the target whose digest it names and reads that model's residual streams; only a
    distilled draft model, which counts as a head here, reads tokens alone.

    Tap k is the residual stream after k layers: `target_num_layers` is the one before the final norm.
    `block` is an EAGLE head's default depth, the number of a Medusa head's offsets, the rows of a DFlash block, or how
    deep a draft model was measured. The rows of a block are `injected`, so that each knows the anchor and the last
    feature, and taps are normed; or `masked`, as in other engines: the anchor's embedding, then that of
    `mask_token_id`, and taps as they are.
    """

    kind: str  # one of KINDS
    target_name: str
    target_digest: str
    target_hidden_size: int
    target_vocab_size: int
    target_num_layers: int
    taps: tuple[int, ...]  # none for a draft model
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    rope_theta: float
    norm_eps: float
    draft_vocab_size: int
    block: int
    correction: str = "none"  # one of CORRECTIONS; only a DFlash head may have one
    rank: int = 0  # of the correction
    block_input: str = "injected"  # one of BLOCK_INPUTS
    mask_token_id: int = 0  # of masked rows; a token that is hardly ever the anchor
    acceptance: tuple[float, ...] = ()  # measured by depth on held-out text; empty before it is measured
    provenance: dict[str, str | int | float] = field(default_factory=dict)

    @classmethod
    def of_sizes(cls, layers: ModelConfig, target: ModelConfig, **others: Any) -> HeadConfig:
        """A head with layers of these sizes; `others` are the remaining fields."""
        sizes = {
            "target_hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "target_num_layers": target.num_layers,
            "hidden_size": layers.hidden_size,
            "intermediate_size": layers.intermediate_size,
            "num_heads": layers.num_heads,
            "num_kv_heads": layers.num_kv_heads,
            "head_dim": layers.head_dim,
            "num_layers": layers.num_layers,
            "rope_theta": layers.rope_theta,
            "norm_eps": layers.rms_norm_eps,
        }
        return cls(**sizes | others)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> HeadConfig:
        """The head that a folder holds; raises InvalidModel with the field that is at fault."""
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise InvalidModel(f"{folder} has no {CONFIG_FILE}; give a folder that `foredraft train` has written.")
        raw = read_json(file)
        types = {each.name: str(each.type) for each in fields(cls)}
        for name in types:
            if name not in raw and name not in _OPTIONAL:
                raise _error(file, name, "is missing")
        if unknown := sorted(raw.keys() - types.keys()):
            raise _error(file, unknown[0], "is not a field of a head that this version of Foredraft knows")
        values = {name: _typed(file, name, types[name], value) for name, value in raw.items()}
        config = cls(**values)
        if problem := next(config._problems(), None):
            raise _error(file, *problem)
        return config

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Fields, each possible by itself, that do not fit each other. Later ones rely on earlier ones."""
        if self.kind not in KINDS:
            yield "kind", f"is {shown(self.kind)}, but {', '.join(KINDS)} are known"
        rules = rules_of(self.kind)
        if self.correction not in CORRECTIONS:
            yield "correction", f"is {shown(self.correction)}, but {', '.join(CORRECTIONS)} are known"
        if (self.correction != "none") != (self.rank > 0):
            yield "rank", f"is {self.rank}, which does not fit correction {self.correction!r}"
        if self.correction not in rules.corrections:
            able = _able(lambda kind: self.correction in kind.corrections)
            yield "correction", f"is {self.correction!r}, but only a {able} head may have one"
        if self.block_input not in BLOCK_INPUTS:
            yield "block_input", f"is {shown(self.block_input)}, but {', '.join(BLOCK_INPUTS)} are known"
        is_as_wide = self.hidden_size == self.target_hidden_size
        if self.block_input not in rules.block_inputs or (self.block_input == "masked" and not is_as_wide):
            able = _able(lambda kind: self.block_input in kind.block_inputs)
            yield "block_input", f"is {self.block_input!r}, but only a {able} head as wide as its target may be"
        if self.mask_token_id >= self.target_vocab_size:
            yield "mask_token_id", f"is {self.mask_token_id}, but the target has {self.target_vocab_size} tokens"
        taps, layers = shown(list(self.taps)), self.target_num_layers
        if not rules.reads_taps and self.taps:
            yield "taps", f"is {taps}, but a draft model reads none"
        if (rules.reads_taps and not self.taps) or any(not 0 <= tap <= layers for tap in self.taps):
            yield "taps", f"is {taps}, but numbers from 0 to {layers}, the target's layers, are needed"
        if len(set(self.taps)) < len(self.taps):
            yield "taps", f"is {taps}, but each may be named once"
        if rules.as_wide_as_target and not is_as_wide:
            width = f"{self.kind} heads are as wide as their target: {self.target_hidden_size}"
            yield "hidden_size", f"is {self.hidden_size}, but {width}"
        if self.num_heads % self.num_kv_heads:
            yield "num_heads", f"is {self.num_heads}, no multiple of num_kv_heads={self.num_kv_heads}"
        if self.head_dim % 2:
            yield "head_dim", f"is {self.head_dim}, but an even number is needed"
        if self.num_layers > rules.most_layers:
            yield "num_layers", f"is {self.num_layers}, but at most {rules.most_layers} are supported"
        if self.block > MAX_BLOCK:
            yield "block", f"is {self.block}, but at most {MAX_BLOCK} are supported"
        if self.draft_vocab_size > self.target_vocab_size:
            more = f"more than the {self.target_vocab_size} tokens of the target"
            yield "draft_vocab_size", f"is {self.draft_vocab_size}, {more}"
        if len(self.acceptance) > MAX_BLOCK or any(not 0 <= rate <= 1 for rate in self.acceptance):
            rates = shown(list(self.acceptance))
            yield "acceptance", f"is {rates}, but at most {MAX_BLOCK} rates from 0 to 1 are needed"


@dataclass(frozen=True)
class Rules:
    """What sets the heads of one kind apart on disk."""

    tensors: Callable[[HeadConfig], Shapes]  # all but d2t and t2d; the names are those that vLLM reads
    reads_taps: bool = True
    as_wide_as_target: bool = False
    most_layers: int = MAX_LAYERS
    corrections: tuple[str, ...] = CORRECTIONS[:1]
    block_inputs: tuple[str, ...] = BLOCK_INPUTS[:1]


def rules_of(kind: str) -> Rules:
    rules: Rules = part(kind, "config").RULES
    return rules


def _able(fits: Callable[[Rules], bool]) -> str:
    """The kinds whose rules fit, for a sentence."""
    return " or ".join(kind for kind in KINDS if fits(rules_of(kind)))


def tensor_shapes(config: HeadConfig) -> Shapes:
    """Every tensor of a head, nothing else."""
    vocabulary: Shapes = {D2T: (config.draft_vocab_size,), T2D: (config.target_vocab_size,)}
    return rules_of(config.kind).tensors(config) | vocabulary


def layer_tensors(prefix: str, config: HeadConfig, inputs: int) -> Shapes:
    """Those of a decoder layer whose q, k and v read rows of `inputs`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}.self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


_OPTIONAL = ("correction", "rank", "block_input", "mask_token_id", "acceptance", "provenance")
_MAY_BE_0 = ("rank", "mask_token_id")


def _typed(file: Path, name: str, kind: str, value: Any) -> Any:
    """The value as its field's type, or InvalidModel."""
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and is_whole(value) and (name in _MAY_BE_0 or value >= 1) and 0 <= value <= _MOST:
        return value
    if kind == "float" and is_positive(value):
        return float(value)
    if kind.startswith("tuple[int") and isinstance(value, list) and all(map(is_whole, value)):
        return tuple(value)
    if kind.startswith("tuple[float") and isinstance(value, list) and all(map(is_number, value)):
        return tuple(float(item) for item in value)
    if kind.startswith("dict") and isinstance(value, dict):
        return value
    needed = {
        "str": "a text",
        "int": f"a whole number from 1 to {_MOST}",
        "float": "a positive number that float32 holds",
    }.get(kind, "an object" if kind.startswith("dict") else "a list of numbers")
    raise _error(file, name, f"is {shown(value)}, but {needed} is needed")


def _error(file: Path, name: str, problem: str) -> InvalidModel:
    return InvalidModel(f"{file}: field {name} {problem}; train or download the head again.")
