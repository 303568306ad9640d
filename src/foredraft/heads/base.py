"""What a trained head is, whatever its kind: its config.json, checked when it is read, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from foredraft.config import ModelConfig, RopeScaling
from foredraft.errors import InvalidModel
from foredraft.heads.kinds import KINDS, part
from foredraft.models.fields import MAX_LAYERS, is_number, is_positive, is_whole, read_json, shown

CONFIG_FILE = "config.json"
CORRECTIONS = ("none", "markov", "refiner")
BLOCK_INPUTS = ("injected", "masked")
CONFIDENCES = ("none", "row", "row and code")
PROJECTIONS = {  # the matrices of a layer, by the module that has them
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
MAX_BLOCK = 64  # tokens of a draft: four times as many as any head has, and blocks of so many rows stay small
D2T, T2D = "d2t", "t2d"  # int64 [draft_vocab]: target id = i + d2t[i]; bool [target_vocab]
MAPPED, OUTPUT_MAP = "mapped", "output_map.weight"  # of a head with mapped tokens: bool [draft_vocab]
_MOST = 2**31 - 1  # of sizes, which the shapes of the tensors then confirm

Shapes = dict[str, tuple[int, ...]]
Problems = Iterator[tuple[str, str]]  # a field, and what is wrong with it


@dataclass(frozen=True)
class HeadConfig:
    """One trained head. It belongs to the target whose digest it names and reads that model's residual streams; only a
    distilled draft model, which counts as a head here, reads tokens alone. A head that others have published names no
    digest: its sizes say whether it fits.

    Tap k is the residual stream after k layers: `target_num_layers` is the one before the final norm.
    `block` is an EAGLE head's default depth, the number of a Medusa head's offsets, the tokens that a block drafts, or
    how deep a draft model was measured. The rows of a block are `injected`, so that each knows the anchor and the last
    feature, and taps are normed; or `masked`, as in other engines: the anchor's embedding, then that of
    `mask_token_id`, and taps as they are. An EAGLE head with masked rows (P-EAGLE) drafts a block too: behind the
    anchor's row come those of `mask_token_id`, with `mask_hidden` in place of taps.
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
    # What training here seldom makes otherwise, and heads of others may; Rules.variants says which kinds.
    shares_embedding: bool = True  # the target's; else embed_tokens is the head's own
    shares_output: bool = False  # the target's output head
    # Tokens of the draft vocabulary (those in `mapped`) whose rows of the output head are the target's × output_map.
    mapped_vocab_size: int = 0
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # of the layers in sliding_layers, in tokens
    sliding_layers: tuple[int, ...] = ()
    biases: tuple[str, ...] = ()  # of the PROJECTIONS, in every layer, and of fc
    qk_norm: bool = False  # norms of q and k; layers of a DFlash head have them always
    norm_before_fc: bool = False  # a norm over all taps side by side
    fc_norm: bool = False  # a norm of each tap, after that
    norm_before_residual: bool = False  # the residual stream starts with the feature after its norm
    norm_output: bool = False  # the output is fed back after the final norm
    # EAGLE-1: fc makes one row of the embedding and the target's last state; there is no norm before the first layer,
    # and none after the last.
    fuses_embedding: bool = False
    output_per_offset: bool = False  # of a Medusa head: lm_heads, one for each
    sample_from_anchor: bool = True  # else row k of a block predicts its own token, and there is one more, the anchor's
    causal_layers: tuple[int, ...] = ()  # in which the rows of a block see those before them only
    markov_gate: bool = False  # the Markov term is scaled by what the row and the previous token make of it
    # One of CONFIDENCES: whether an output tells how probably the token of a row is accepted, and what it reads: the
    # row, and maybe what the Markov term reads of the previous token.
    confidence: str = "none"
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
            if name not in raw and name not in _DEFAULTS:
                raise _error(file, name, "is missing")
        if unknown := sorted(raw.keys() - types.keys()):
            raise _error(file, unknown[0], "is not a field of a head that this version of Foredraft knows")
        values = {name: _typed(file, name, types[name], value) for name, value in raw.items()}
        config = cls(**values)
        if not config.target_digest:
            raise _error(file, "target_digest", "is empty, but a head that was trained here names its target")
        if problem := config.problem():
            raise _error(file, *problem)
        return config

    def problem(self) -> tuple[str, str] | None:
        """The first field that does not fit the others, and what is wrong with it."""
        return next(self._problems(), None)

    def _problems(self) -> Problems:
        """Fields, each possible by itself, that do not fit each other. Later ones rely on earlier ones."""
        yield from self._kind_problems()
        yield from self._input_problems()
        yield from self._width_problems()
        yield from self._layer_problems()
        yield from self._draft_problems()

    def _kind_problems(self) -> Problems:
        """What heads of this kind may have at all."""
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
        for name in sorted(_VARIANTS - rules.variants):
            if getattr(self, name) != _DEFAULTS[name]:
                yield name, f"is {shown(getattr(self, name))}, which {self.kind} heads do not know"

    def _input_problems(self) -> Problems:
        """What the head reads: rows of a block, and taps."""
        rules, is_as_wide = rules_of(self.kind), self._is_as_wide
        if self.block_input not in BLOCK_INPUTS:
            yield "block_input", f"is {shown(self.block_input)}, but {', '.join(BLOCK_INPUTS)} are known"
        if self.block_input not in rules.block_inputs or (self.block_input == "masked" and not is_as_wide):
            able = _able(lambda kind: self.block_input in kind.block_inputs)
            yield "block_input", f"is {self.block_input!r}, but only a {able} head as wide as its target may be"
        if self.block_input == "masked" and self.fuses_embedding:
            yield "fuses_embedding", "is true, which does not fit masked rows"
        if self.mask_token_id >= self.target_vocab_size:
            yield "mask_token_id", f"is {self.mask_token_id}, but the target has {self.target_vocab_size} tokens"
        taps, layers = shown(list(self.taps)), self.target_num_layers
        if not rules.reads_taps and self.taps:
            yield "taps", f"is {taps}, but a draft model reads none"
        if (rules.reads_taps and not self.taps) or any(not 0 <= tap <= layers for tap in self.taps):
            yield "taps", f"is {taps}, but numbers from 0 to {layers}, the target's layers, are needed"
        if len(set(self.taps)) < len(self.taps):
            yield "taps", f"is {taps}, but each may be named once"

    @property
    def _is_as_wide(self) -> bool:
        """Whether the embeddings that it reads are as wide as it is itself."""
        return self.hidden_size == self.target_hidden_size or not self.shares_embedding

    def _width_problems(self) -> Problems:
        """Widths that must be the target's."""
        if rules_of(self.kind).as_wide_as_target and not self._is_as_wide:
            width = f"{self.kind} heads are as wide as their target: {self.target_hidden_size}"
            yield "hidden_size", f"is {self.hidden_size}, but {width}"
        if self.shares_output and self.hidden_size != self.target_hidden_size:
            width = f"the target's output head, which it shares, reads {self.target_hidden_size}"
            yield "hidden_size", f"is {self.hidden_size}, but {width}"
        if self.shares_output and self.draft_vocab_size != self.target_vocab_size:
            width = f"the target's output head, which it shares, has {self.target_vocab_size} tokens"
            yield "draft_vocab_size", f"is {self.draft_vocab_size}, but {width}"

        if self.mapped_vocab_size and (self.shares_output or self.mapped_vocab_size >= self.draft_vocab_size):
            others = (
                "is 0 for a head that shares its output" if self.shares_output else "leaves some to the head itself"
            )
            yield "mapped_vocab_size", f"is {self.mapped_vocab_size} of {self.draft_vocab_size} tokens, but {others}"

    def _layer_problems(self) -> Problems:
        known = [*(name for names in PROJECTIONS.values() for name in names), "fc"]
        if not set(self.biases) <= set(known):
            yield "biases", f"is {shown(list(self.biases))}, but {', '.join(known)} are known"
        for name in ("sliding_layers", "causal_layers"):
            if any(not 0 <= layer < self.num_layers for layer in getattr(self, name)):
                yield name, f"is {shown(list(getattr(self, name)))}, but there are {self.num_layers} layers"
        if bool(self.sliding_window) != bool(self.sliding_layers):
            yield "sliding_window", f"is {self.sliding_window}, which does not fit {len(self.sliding_layers)} layers"
        if problem := self._rope_problem():
            yield "rope_scaling", problem
        if self.num_heads % self.num_kv_heads:
            yield "num_heads", f"is {self.num_heads}, no multiple of num_kv_heads={self.num_kv_heads}"
        if self.head_dim % 2:
            yield "head_dim", f"is {self.head_dim}, but an even number is needed"
        if self.num_layers > (most := rules_of(self.kind).max_layers):
            yield "num_layers", f"is {self.num_layers}, but {self.kind} heads have at most {most}"

    def _draft_problems(self) -> Problems:
        """What comes out, and how probable it is said to be."""
        if (most := MAX_BLOCK - (not self.sample_from_anchor)) < self.block:
            yield "block", f"is {self.block}, but at most {most} are supported"
        if self.markov_gate and self.correction != "markov":
            yield "markov_gate", f"is true, which does not fit correction {self.correction!r}"
        if self.confidence not in CONFIDENCES:
            yield "confidence", f"is {shown(self.confidence)}, but {', '.join(CONFIDENCES)} are known"
        if self.confidence == "row and code" and self.correction != "markov":
            yield "confidence", f"is {self.confidence!r}, which does not fit correction {self.correction!r}"
        if self.draft_vocab_size > self.target_vocab_size:
            more = f"more than the {self.target_vocab_size} tokens of the target"
            yield "draft_vocab_size", f"is {self.draft_vocab_size}, {more}"
        if len(self.acceptance) > MAX_BLOCK or any(not 0 <= rate <= 1 for rate in self.acceptance):
            rates = shown(list(self.acceptance))
            yield "acceptance", f"is {rates}, but at most {MAX_BLOCK} rates from 0 to 1 are needed"

    def _rope_problem(self) -> str | None:
        scaling, half = self.rope_scaling, self.head_dim // 2
        if scaling is None:
            return None
        if scaling.kind == "factors" and len(scaling.long_factor) != half:
            return f"has {len(scaling.long_factor)} factors, but {half} are needed"
        if scaling.kind in ("llama3", "yarn") and not scaling.original_max_position_embeddings:
            return f"is {scaling.kind}, which needs original_max_position_embeddings"
        if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            return f"has high_freq_factor {scaling.high_freq_factor}, which must be more than low_freq_factor"
        return "is yarn, which needs a rope_theta above 1" if scaling.kind == "yarn" and self.rope_theta <= 1 else None


@dataclass(frozen=True)
class Rules:
    """What sets the heads of one kind apart on disk."""

    tensors: Callable[[HeadConfig], Shapes]  # all but the vocabulary's; the names are those that vLLM reads
    reads_taps: bool = True
    as_wide_as_target: bool = False
    max_layers: int = MAX_LAYERS
    corrections: tuple[str, ...] = CORRECTIONS[:1]
    block_inputs: tuple[str, ...] = BLOCK_INPUTS[:1]
    variants: frozenset[str] = frozenset()  # fields that heads of others may have otherwise than those trained here


def rules_of(kind: str) -> Rules:
    rules: Rules = part(kind, "config").RULES
    return rules


def _able(fits: Callable[[Rules], bool]) -> str:
    """The kinds whose rules fit, for a sentence."""
    return " or ".join(kind for kind in KINDS if fits(rules_of(kind)))


def tensor_shapes(config: HeadConfig) -> Shapes:
    """Every tensor of a head, nothing else."""
    rules, hidden = rules_of(config.kind), config.hidden_size
    shapes = rules.tensors(config)
    if rules.reads_taps and not config.shares_output:
        offsets = [f"lm_heads.{offset}.weight" for offset in range(config.block)]
        names = offsets if config.output_per_offset else ["lm_head.weight"]
        shapes |= dict.fromkeys(names, (config.draft_vocab_size - config.mapped_vocab_size, hidden))
    if config.mapped_vocab_size:
        shapes |= {MAPPED: (config.draft_vocab_size,), OUTPUT_MAP: (hidden, config.target_hidden_size)}
    if not config.shares_embedding:
        shapes["embed_tokens.weight"] = (config.target_vocab_size, hidden)
    return shapes | {D2T: (config.draft_vocab_size,), T2D: (config.target_vocab_size,)}


def layer_tensors(prefix: str, config: HeadConfig, inputs: int, qk_norm: bool = False) -> Shapes:
    """Those of a decoder layer whose q, k and v read rows of `inputs`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention: Shapes = {
        "q_proj": (queries, inputs),
        "k_proj": (keys, inputs),
        "v_proj": (keys, inputs),
        "o_proj": (hidden, queries),
    }
    mlp: Shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    for module, matrices in (("self_attn", attention), ("mlp", mlp)):
        for name, shape in matrices.items():
            shapes[f"{prefix}.{module}.{name}.weight"] = shape
            if name in config.biases:
                shapes[f"{prefix}.{module}.{name}.bias"] = shape[:1]
    if qk_norm:
        shapes |= {f"{prefix}.self_attn.{side}_norm.weight": (config.head_dim,) for side in "qk"}
    return shapes


_DEFAULTS = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(HeadConfig)
    if each.default is not MISSING or each.default_factory is not MISSING
}
_OURS = {"correction", "rank", "block_input", "mask_token_id", "acceptance", "provenance"}
_VARIANTS = _DEFAULTS.keys() - _OURS
_ROPE_KINDS = ("linear", "llama3", "yarn", "factors")
_MAY_BE_0 = ("rank", "mask_token_id", "sliding_window", "mapped_vocab_size")


def _typed(file: Path, name: str, kind: str, value: Any) -> Any:
    """The value as its field's type, or InvalidModel."""
    if kind in ("str", "bool") and isinstance(value, str if kind == "str" else bool):
        return value
    if kind.endswith("None") and (value is None or (scaling := _rope_scaling(value)) is not None):
        return None if value is None else scaling
    if kind == "int" and is_whole(value) and (name in _MAY_BE_0 or value >= 1) and 0 <= value <= _MOST:
        return value
    if kind == "float" and is_positive(value):
        return float(value)
    if kind.startswith("tuple[int") and isinstance(value, list) and all(map(is_whole, value)):
        return tuple(value)
    if kind.startswith("tuple[float") and isinstance(value, list) and all(map(is_number, value)):
        return tuple(float(item) for item in value)
    if kind.startswith("tuple[str") and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind.startswith("dict") and isinstance(value, dict):
        return value
    needed = {
        "str": "a text",
        "bool": "true or false",
        "RopeScaling | None": f"null or an object of one of the kinds {', '.join(_ROPE_KINDS)}",
        "tuple[str, ...]": "a list of texts",
        "int": f"a whole number from 1 to {_MOST}",
        "float": "a positive number that float32 holds",
    }.get(kind, "an object" if kind.startswith("dict") else "a list of numbers")
    raise _error(file, name, f"is {shown(value)}, but {needed} is needed")


def _rope_scaling(value: Any) -> RopeScaling | None:
    """What `write` has made of it; None where it is something else."""

    def typed(name: str, item: Any) -> bool:
        if name in ("short_factor", "long_factor"):
            return isinstance(item, list) and all(map(is_positive, item))
        if name == "original_max_position_embeddings":
            return is_whole(item) and 0 <= item <= _MOST
        if name in ("kind", "truncate"):
            return item in _ROPE_KINDS if name == "kind" else isinstance(item, bool)
        return is_positive(item) or (name == "attention_factor" and item is None)

    known = {each.name for each in fields(RopeScaling)}
    if not isinstance(value, dict) or value.keys() != known or not all(typed(*pair) for pair in value.items()):
        return None
    values: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return RopeScaling(**values)


def _error(file: Path, name: str, problem: str) -> InvalidModel:
    return InvalidModel(f"{file}: field {name} {problem}; train or download the head again.")
