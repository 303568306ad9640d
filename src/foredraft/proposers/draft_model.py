"""Guesses with a smaller model of the same vocabulary: a smaller sibling, or one distilled from the target.
Costs a run of that model per guessed token, its memory, and its own pass over the prompt.
Shines on open text, where nothing can be copied, if the smaller model is several times faster."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.backends.choose import choose_backend
from foredraft.engine.runner import Runner
from foredraft.errors import InvalidSpec
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.models.decoder import load_decoder
from foredraft.models.tokenizer import Tokenizer
from foredraft.proposers.base import TargetModel
from foredraft.proposers.drafting import AccountingDrafter


@dataclass(frozen=True)
class DraftModelOptions:
    model: str = ""  # a catalogue name, file, folder or hub id
    k: int = 4  # tokens guessed
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidSpec("draft_model needs a model: write draft_model:model=NAME_OR_PATH.")
        if not 1 <= self.k <= 32:
            raise InvalidSpec(f"draft_model: k={self.k} must be from 1 to 32.")


class DraftModel(AccountingDrafter):
    """See the module."""

    Options = DraftModelOptions

    def __init__(self, options: DraftModelOptions, target: TargetModel) -> None:
        checkpoint = open_checkpoint(resolve(options.model))
        check_same_vocabulary(options.model, checkpoint.tokenizer(), target.tokenizer)
        dtype = checkpoint.precision if options.dtype == "auto" else options.dtype
        backend = choose_backend(target.runner.backend.name, dtype, target.runner.backend.device, target.threads)
        positions = min(target.max_model_len, checkpoint.config.max_position_embeddings)
        if positions < target.max_model_len:
            raise InvalidSpec(
                f"draft_model: {options.model} knows {positions} positions, the target uses {target.max_model_len}; "
                f"start with max_model_len={positions} or take another draft model."
            )
        decoder = load_decoder(checkpoint, dtype, positions, backend)
        layers = target.kv.add_group(f"draft_model {options.model} {dtype}", checkpoint.config, backend)
        runner = Runner(decoder, backend, layers)
        vocab_size = min(checkpoint.config.vocab_size, target.checkpoint.config.vocab_size)
        super().__init__("draft_model", runner, target.kv.block_size, options.k, vocab_size)


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
