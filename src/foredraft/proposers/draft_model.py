"""Drafts with a smaller model of the same vocabulary: a smaller sibling, or one distilled from the target.
Costs a run of that model per draft token, its memory, and its own pass over the prompt.
Shines on open text, where nothing can be copied, if the smaller model is several times faster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from foredraft.backends.choose import choose_backend
from foredraft.config import DTYPES
from foredraft.errors import InvalidSpec
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.models.tokenizer import Tokenizer
from foredraft.proposers.base import TargetModel
from foredraft.proposers.computed_tokens import ComputedTokens
from foredraft.proposers.draft_runner import DraftRunner
from foredraft.proposers.drafting import DrafterOptions, ModelDrafter
from foredraft.runtime.runner import Runner


@dataclass(frozen=True)
class DraftModelOptions(DrafterOptions):
    model: str = ""  # a catalogue name, file, folder or hub id
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise InvalidSpec("draft_model needs a model: write draft_model:model=NAME_OR_PATH.")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidSpec(f"draft_model: dtype={self.dtype!r} is not known; use auto, {', '.join(DTYPES)}.")


class DraftModel(ModelDrafter):
    """See the module."""

    Options = DraftModelOptions

    def __init__(self, options: DraftModelOptions, target: TargetModel) -> None:
        checkpoint = open_checkpoint(resolve(options.model))
        check_same_vocabulary(options.model, checkpoint.tokenizer(), target.tokenizer)
        if checkpoint.config.max_position_embeddings < target.max_model_len:
            positions = checkpoint.config.max_position_embeddings
            raise InvalidSpec(
                f"draft_model: {options.model} knows {positions} positions, the target uses {target.max_model_len}; "
                f"start with max_model_len={positions} or take another draft model."
            )
        dtype = checkpoint.precision if options.dtype == "auto" else options.dtype
        model = second_model(f"draft_model {options.model} {dtype}", checkpoint, dtype, target)
        super().__init__("draft_model", model, options)


def second_model(name: str, checkpoint: Checkpoint, dtype: str, target: TargetModel) -> DraftRunner:
    """A model beside the target, with a layer group of its own; loaded once under its name."""

    def load() -> DraftRunner:
        backend = choose_backend(target.runner.backend.name, dtype, target.runner.backend.device, target.threads)
        decoder = load_decoder(checkpoint, dtype, target.max_model_len, backend)
        runner = Runner(decoder, backend, target.kv.add_group(name, checkpoint.config, backend))
        runner.warm(target.kv.block_size, target.max_model_len)
        return DraftRunner(
            runner,
            target.kv.block_size,
            target.checkpoint.config.vocab_size,
            ComputedTokens(target.kv.block_size),
            close=partial(target.draft_models.release, name),
        )

    return target.draft_models.acquire(name, load)


def check_same_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise InvalidSpec with the first tokens that differ, unless both models mean the same by every id."""
    left, right = draft.vocabulary(), target.vocabulary()
    different = [token for token in left.keys() | right.keys() if left.get(token) != right.get(token)]
    if different:
        shown = ", ".join(
            f"{token!r} ({left.get(token, 'absent')} there, {right.get(token, 'absent')} here)"
            for token in sorted(different)[:3]
        )
        raise InvalidSpec(
            f"draft_model: {name} has another vocabulary than the target, {len(different)} tokens differ: {shown}; "
            "a draft model must share the target's tokenizer."
        )
