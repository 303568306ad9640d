"""Drafts with the target's own weights in fewer bits: agrees with it nearly always, and reads a fraction of the bytes.
Costs a run of the smaller copy per draft token, and its memory.
Shines where the target is large and held in high precision."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.model.whole_model import DrafterOptions, ModelDrafter, second_model
from foredraft.proposers.target import TargetModel


@dataclass(frozen=True)
class QuantisedOptions(DrafterOptions):
    bits: int = 4  # of the copy's weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise InvalidSpec(f"quantised: bits={self.bits} must be 4 or 8.")


class Quantised(ModelDrafter):
    Options = QuantisedOptions

    def __init__(self, options: QuantisedOptions, target: TargetModel) -> None:
        dtype = f"int{options.bits}"
        model = second_model("quantised", target.checkpoint, dtype, target, rounds_all=False)  # it lives on agreeing
        super().__init__("quantised", model, options)
