"""Guesses with a model that is guessed for in turn: a cheap proposer drafts for a draft model, that for the target.
Costs a run of the draft model per guesses that it accepts, instead of one per token.
Shines where the draft model's own time counts, and its text can be guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer, TargetModel
from foredraft.proposers.drafting import DrafterOptions, ModelDrafter
from foredraft.proposers.registry import build_proposer, parse_spec

_FORM = "NAME>NAME or NAME(option=value;option=value)>NAME"


@dataclass(frozen=True)
class StagedOptions(DrafterOptions):
    k: int = 8
    chain: str = "ngram>quantised"  # the first drafts for the second, that for the third, the last for the target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width != 1:
            raise InvalidSpec(f"staged: width={self.width} must be 1; its stages guess chains for each other.")


class Staged(ModelDrafter):
    """The last stage's model with everything before it as its helper."""

    Options = StagedOptions

    def __init__(self, options: StagedOptions, target: TargetModel) -> None:
        parts = options.chain.split(">")
        if len(parts) < 2:
            raise InvalidSpec(f"staged: chain={options.chain!r} needs two stages or more, as {_FORM}.")
        first, *models = (_stage(part, target) for part in parts)
        if first.wants_said:
            raise InvalidSpec(f"staged: {first.name} listens to the target itself and cannot draft for another stage.")
        helper = first
        for stage in models:
            if not isinstance(stage, ModelDrafter) or stage.width > 1:
                raise InvalidSpec(f"staged: {stage.name} is no model that guesses a chain; only the first may be none.")
            stage.helper = helper
            last = helper = stage
        super().__init__("staged", last.model, options, last.helper)


def _stage(part: str, target: TargetModel) -> Proposer:
    """A stage as it is written in the chain."""
    form = re.fullmatch(r"(\w+)(?:\((.*)\))?", part)
    if form is None:
        raise InvalidSpec(f"staged: the stage {part!r} cannot be read; a chain is {_FORM}.")
    name, settings = form.group(1), (form.group(2) or "").replace(";", ",")
    (choice,) = parse_spec(f"{name}:{settings}" if settings else name).choices
    return build_proposer(choice, target)
