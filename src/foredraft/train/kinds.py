"""From `dflash:layers=3` to a drafter: the kinds that can be trained, their options and defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from foredraft.errors import InvalidParameter
from foredraft.models.fields import MAX_LAYERS, shown
from foredraft.models.heads.config import BLOCK_INPUTS, CORRECTIONS, MAX_BLOCK, HeadConfig
from foredraft.models.tokenizer import Tokenizer
from foredraft.train.dflash import DFlashDrafter
from foredraft.train.draft import DraftDrafter
from foredraft.train.drafter import Drafter
from foredraft.train.eagle import EagleDrafter
from foredraft.train.features import FrozenTarget
from foredraft.train.medusa import MedusaDrafter
from foredraft.train.modules.dflash import DFlashHead
from foredraft.train.modules.eagle import EagleHead
from foredraft.train.modules.medusa import MedusaHead

_WIDEST = 1 << 20
_MOST = {
    **dict.fromkeys(("depth", "offsets", "block"), MAX_BLOCK),
    **{"layers": MAX_LAYERS, "hidden": _WIDEST, "inner": _WIDEST},
}
_CHOICES = {"correction": CORRECTIONS, "input": BLOCK_INPUTS}
_RANK = {"none": 0, "markov": 256, "refiner": 256}


@dataclass(frozen=True)
class EagleOptions:
    depth: int = 5
    inner: int = 0  # width of its feed-forward layer; 0: the target's


@dataclass(frozen=True)
class MedusaOptions:
    offsets: int = 4
    layers: int = 1  # of each offset


@dataclass(frozen=True)
class DFlashOptions:
    layers: int = 2
    block: int = 8
    correction: str = "refiner"
    input: str = "injected"


@dataclass(frozen=True)
class DraftOptions:
    layers: int = 4
    hidden: int = 0  # 0: two thirds of the target's, in whole attention heads
    depth: int = 4


KindOptions = EagleOptions | MedusaOptions | DFlashOptions | DraftOptions
KINDS: dict[str, type[KindOptions]] = {
    "eagle": EagleOptions,
    "medusa": MedusaOptions,
    "dflash": DFlashOptions,
    "draft": DraftOptions,
}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter with its options, as the command line names it."""

    text: str
    name: str
    options: KindOptions

    @property
    def folder(self) -> str:
        """A name that a file may have."""
        return re.sub(r"[^\w]+", "-", self.text)


def parse_kind(text: str) -> Kind:
    """`eagle`, or `dflash:layers=3,correction=markov`."""
    name, _, listed = text.partition(":")
    if name not in KINDS:
        raise InvalidParameter(f"{name!r} cannot be trained; use {', '.join(KINDS)}.")
    known = {each.name: each for each in fields(KINDS[name])}
    values: dict[str, int | str] = {}
    for item in filter(None, listed.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise InvalidParameter(f"{name} has no option {key!r}; it has {', '.join(known)}.")
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                raise InvalidParameter(f"{name}: {key}={value!r} is not known; use {', '.join(_CHOICES[key])}.")
            values[key] = value
        elif not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= _MOST[key]:
            raise InvalidParameter(f"{name}: {key}={shown(value)} must be a whole number from 1 to {_MOST[key]}.")
        else:
            values[key] = int(value)
    return Kind(text, name, KINDS[name](**values))  # type: ignore[arg-type]


def build_drafter(
    kind: Kind, target: FrozenTarget, token_ids: Tensor, tokenizer: Tokenizer, name: str, digest: str, seed: int
) -> Drafter:
    """A drafter at the start of its training; `name` and `digest` are the target's."""
    torch.manual_seed(seed)
    shape, options = _shape(target, len(token_ids), name, digest), kind.options
    layers = shape.target_num_layers
    match options:
        case EagleOptions():
            inner = options.inner or shape.intermediate_size
            taps = _spread(layers, (0.1, 0.5, 0.9))
            config = replace(shape, kind="eagle", taps=taps, block=options.depth, intermediate_size=inner)
            return EagleDrafter(kind.folder, EagleHead(config), target, token_ids, options.depth)
        case MedusaOptions():
            config = replace(shape, kind="medusa", taps=(layers,), block=options.offsets, num_layers=options.layers)
            return MedusaDrafter(kind.folder, MedusaHead(config), target, token_ids, options.offsets)
        case DFlashOptions():
            config = replace(
                shape,
                kind="dflash",
                taps=_spread(layers, (0.1, 0.3, 0.5, 0.7, 0.9)),
                num_layers=options.layers,
                block=options.block,
                correction=options.correction,
                rank=_RANK[options.correction],
                block_input=options.input,
                mask_token_id=_mask_token(token_ids, shape.target_vocab_size) if options.input == "masked" else 0,
            )
            return DFlashDrafter(kind.folder, DFlashHead(config), target, token_ids, min(7, options.block))
        case DraftOptions():
            config = _draft_shape(replace(shape, num_layers=options.layers), options.hidden)
            return DraftDrafter(kind.folder, config, target, tokenizer, options.depth)


def _shape(target: FrozenTarget, draft_vocab_size: int, name: str, digest: str) -> HeadConfig:
    """A head with the sizes of the target's own layers."""
    config = target.config
    return HeadConfig(
        kind="eagle",
        target_name=name,
        target_digest=digest,
        target_hidden_size=config.hidden_size,
        target_vocab_size=config.vocab_size,
        target_num_layers=config.num_layers,
        taps=(config.num_layers,),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=1,
        rope_theta=config.rope_theta,
        norm_eps=config.rms_norm_eps,
        draft_vocab_size=draft_vocab_size,
        block=1,
    )


def _mask_token(token_ids: Tensor, vocab_size: int) -> int:
    """The last token outside the draft vocabulary, which holds the most frequent ones: hardly ever an anchor."""
    outside = torch.ones(vocab_size, dtype=torch.bool)
    outside[token_ids.cpu()] = False
    return int(outside.nonzero()[-1]) if outside.any() else vocab_size - 1


def _draft_shape(shape: HeadConfig, hidden: int) -> HeadConfig:
    """The layers of a narrower model: as many heads as fit, two of them to each key."""
    if hidden % shape.head_dim:
        raise InvalidParameter(f"draft: hidden={hidden} must be a multiple of the target's head size {shape.head_dim}.")
    heads = hidden // shape.head_dim or max(1, round(shape.hidden_size * 2 / 3 / shape.head_dim))
    hidden = heads * shape.head_dim
    inner = -(-shape.intermediate_size * hidden // shape.hidden_size // 32) * 32
    kv_heads = heads // 2 if heads % 2 == 0 else heads
    return replace(shape, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)


def _spread(layers: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Taps at these shares of the layers; small models have fewer of them."""
    return tuple(sorted({max(1, round(layers * share)) for share in shares}))
