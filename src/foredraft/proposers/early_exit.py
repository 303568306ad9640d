"""Guesses with the target's own first layers and its head: nothing to load, nothing to train.
Costs a fraction of a run per guessed token; K and V of those layers are the target's own, so no prompt is run twice.
Shines with models that were trained to exit early; others rarely agree with their own middle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foredraft.engine.runner import Runner
from foredraft.errors import InvalidSpec
from foredraft.proposers.base import TargetModel
from foredraft.proposers.drafting import ModelDrafter
from foredraft.types import Sequence


@dataclass(frozen=True)
class EarlyExitOptions:
    k: int = 4  # tokens guessed
    layers: int = 0  # how many of the target's layers guess; 0: two thirds of them

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 32:
            raise InvalidSpec(f"early_exit: k={self.k} must be from 1 to 32.")


class EarlyExit(ModelDrafter):
    """See the module. A guess writes K and V of the first layers where the target's run will write the same again."""

    Options = EarlyExitOptions

    def __init__(self, options: EarlyExitOptions, target: TargetModel) -> None:
        decoder = target.runner.decoder
        layers = options.layers or max(1, 2 * len(decoder.layers) // 3)
        if not 1 <= layers <= len(decoder.layers):
            raise InvalidSpec(f"early_exit: layers={layers} must be from 1 to {len(decoder.layers)}.")
        shallow = replace(decoder, layers=decoder.layers[:layers])
        runner = Runner(shallow, target.runner.backend, target.runner.kv[:layers])
        super().__init__("early_exit", runner, target.kv.block_size, options.k, decoder.config.vocab_size)

    def known_tokens(self, sequence: Sequence) -> int:
        """What the target has computed."""
        return sequence.num_computed_tokens
