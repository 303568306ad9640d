"""Drafts with a smaller model of the same vocabulary: a smaller sibling, or one distilled from the target.
Costs a run of that model per draft token, its memory, and its own pass over the prompt.
Shines on open text, where nothing can be copied, if the smaller model is several times faster."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.backends.base import Backend
from foredraft.config import DTYPES
from foredraft.errors import InvalidSpec
from foredraft.heads.draft_model.serve import load_draft_model
from foredraft.heads.files import HeadFiles
from foredraft.heads.weights import HeadWeights
from foredraft.models.catalog import open_checkpoint, resolve
from foredraft.models.decoder import Decoder
from foredraft.models.tokenizer import Tokenizer
from foredraft.proposers.model.whole_model import DrafterOptions, ModelDrafter, WholeModel, beside, second_model
from foredraft.proposers.target import TargetModel


@dataclass(frozen=True)
class DraftModelOptions(DrafterOptions):
    model: str = ""  # a catalogue name, file, folder or hub id; none: the one that was distilled from the target
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidSpec(f"draft_model: dtype={self.dtype!r} is not known; use auto, {', '.join(DTYPES)}.")


class DraftModel(ModelDrafter):
    Options = DraftModelOptions

    def __init__(self, options: DraftModelOptions, target: TargetModel) -> None:
        if options.model:
            super().__init__("draft_model", _named(options.model, options.dtype, target), options)
            return
        if "draft_model" not in target.heads:
            raise InvalidSpec(
                "draft_model needs a model, because none was loaded with the target: write "
                "draft_model:model=NAME_OR_PATH, or train one: foredraft train draft --out PATH."
            )
        files = target.heads["draft_model"]
        super().__init__("draft_model", _distilled(files, options.dtype, target), options)
        self.acceptance = files.config.acceptance


def _named(name: str, dtype: str, target: TargetModel) -> WholeModel:
    """A model of the user's choice."""
    checkpoint = open_checkpoint(resolve(name))
    check_same_vocabulary(name, checkpoint.tokenizer(), target.tokenizer)
    positions = checkpoint.config.max_position_embeddings
    if positions < target.max_model_len:
        raise InvalidSpec(
            f"draft_model: {name} knows {positions} positions, the target uses {target.max_model_len}; "
            f"start with max_model_len={positions} or take another draft model."
        )
    if dtype == "auto":  # more bits than the target's would take time, and hardly agree with it more often
        dtype = max(checkpoint.precision, target.dtype, key=DTYPES.index)
    return second_model(f"draft_model {name}", checkpoint, dtype, target, rounds_all=True)


def _distilled(files: HeadFiles, dtype: str, target: TargetModel) -> WholeModel:
    """The model that was distilled from the target, in the bits of its file unless told."""
    is_auto = dtype == "auto"
    weights_dtype = target.dtype if is_auto else dtype

    def load(backend: Backend) -> Decoder:
        weights = HeadWeights(files.config, files.read(), weights_dtype, is_auto, backend)
        embedding = target.checkpoint.weight("model.embed_tokens.weight")
        return load_draft_model(weights, embedding, target.max_model_len, backend)

    return beside(f"draft_model {dtype}", weights_dtype, target, load)


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
