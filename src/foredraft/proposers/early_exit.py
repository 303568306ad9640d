"""Drafts with the target's own first layers and its head: nothing to load, nothing to train.
Costs a fraction of a run per draft token; K and V of those layers are the target's own, so no prompt is run twice.
Shines with models that were trained to exit early; others rarely agree with their own middle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foredraft.errors import InvalidSpec
from foredraft.proposers.model.whole_model import DrafterOptions, ModelDrafter, WholeModel
from foredraft.proposers.target import TargetModel
from foredraft.runtime.runner import Runner


@dataclass(frozen=True)
class EarlyExitOptions(DrafterOptions):
    layers: int = 0  # how many of the target's layers draft; 0: two thirds of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 0:
            raise InvalidSpec(f"early_exit: layers={self.layers} must be at least 0, which means two thirds of them.")


class EarlyExit(ModelDrafter):
    """See the module. A draft writes K and V of the first layers where the target's run will write the same again."""

    Options = EarlyExitOptions

    def __init__(self, options: EarlyExitOptions, target: TargetModel) -> None:
        decoder = target.runner.decoder
        layers = options.layers or max(1, 2 * len(decoder.layers) // 3)
        if layers > len(decoder.layers):
            raise InvalidSpec(f"early_exit: layers={layers} must be from 1 to {len(decoder.layers)}.")
        shallow = replace(decoder, layers=decoder.layers[:layers])
        runner = Runner(shallow, target.runner.backend, target.runner.kv[:layers])
        model = WholeModel(runner, target.kv.block_size, decoder.config.vocab_size, computed=None, close=lambda: None)
        super().__init__("early_exit", model, options)
