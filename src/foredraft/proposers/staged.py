"""Drafts in stages: a cheap proposer drafts for a draft model, and the draft model drafts for the target.
Costs one run of the draft model per accepted path of the stage before it, instead of one run per token.
Shines where the draft model's own time counts and its output can be predicted."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass

from foredraft.errors import InvalidSpec
from foredraft.proposers.base import Proposer
from foredraft.proposers.model.whole_model import DrafterOptions, ModelDrafter
from foredraft.proposers.registry import ProposerChoice, build_proposer, parse_spec, proposer_class, read_options
from foredraft.proposers.target import TargetModel

_MOST_STAGES = 4
_FORM = "NAME>NAME or NAME(option=value;option=value)>NAME"


@dataclass(frozen=True)
class StagedOptions(DrafterOptions):
    k: int = 8
    chain: str = "ngram>quantised"  # the first drafts for the second, that for the third, the last for the target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width != 1:
            raise InvalidSpec(f"staged: width={self.width} must be 1; its stages draft chains for each other.")
        _stages(self.chain)


class Staged(ModelDrafter):
    """The last stage's model with everything before it as its helper."""

    Options = StagedOptions

    def __init__(self, options: StagedOptions, target: TargetModel) -> None:
        helper, *models = _built(_stages(options.chain), target)
        for stage in models:
            assert isinstance(stage, ModelDrafter)
            stage.helper = helper
            last = helper = stage
        super().__init__("staged", last.runner, options, last.helper)


def _built(stages: list[ProposerChoice], target: TargetModel) -> list[Proposer]:
    """The proposers of all stages. If one cannot be built, those before it are closed, or their models would stay."""
    built: list[Proposer] = []
    with ExitStack() as closing:
        for stage in stages:
            built.append(build_proposer(stage, target))
            closing.callback(built[-1].close)
        closing.pop_all()
    return built


def _stages(chain: str) -> list[ProposerChoice]:
    """The stages of a chain. All but the first must be models that draft chains."""
    parts = chain.split(">")
    if len(parts) < 2:
        raise InvalidSpec(f"staged: chain={chain!r} needs two stages or more, as {_FORM}.")
    if len(parts) > _MOST_STAGES:
        raise InvalidSpec(f"staged: chain has {len(parts)} stages; it may have at most {_MOST_STAGES}.")
    first, *models = stages = [_stage(part) for part in parts]
    if proposer_class(first.name).wants_target_argmax:
        raise InvalidSpec(f"staged: {first.name} needs the target argmax and cannot draft for another stage.")
    for stage in models:
        if not issubclass(proposer_class(stage.name), ModelDrafter) or read_options(stage).width > 1:
            raise InvalidSpec(
                f"staged: {stage.name} must be a model that drafts a chain; only the first stage may be another one."
            )
    if "k" in models[-1].options:
        raise InvalidSpec(f"staged: {models[-1].name} is the last stage, so its k is that of staged: write staged:k=….")
    return stages


def _stage(part: str) -> ProposerChoice:
    """A stage as it is written in the chain."""
    form = re.fullmatch(r"(\w+)(?:\((.*)\))?", part)
    if form is None:
        raise InvalidSpec(f"staged: the stage {part!r} cannot be read; a chain is {_FORM}.")
    name, settings = form.group(1), (form.group(2) or "").replace(";", ",")
    spec = parse_spec(f"{name}:{settings}" if settings else name)
    if spec.adaptive or len(spec.choices) != 1:
        raise InvalidSpec(f"staged: the stage {part!r} is not one proposer; a chain is {_FORM}.")
    return spec.choices[0]
