"""What a proposer may know of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only draft models need, and what would bring torch along
    from foredraft.heads.files import HeadFiles
    from foredraft.models.checkpoint import Checkpoint
    from foredraft.models.tokenizer import Tokenizer
    from foredraft.proposers.model.shared_models import SharedModels
    from foredraft.runtime.kv import KVCache
    from foredraft.runtime.runner import Runner


@dataclass(frozen=True)
class TargetModel:
    """The model that a proposer drafts for, as far as a proposer may use it."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    runner: Runner
    kv: KVCache
    max_model_len: int
    max_num_seqs: int
    dtype: str  # of its weights
    threads: int | None
    draft_models: SharedModels
    heads: Mapping[str, HeadFiles]  # that were loaded with it, by kind; its runner writes the taps that they read
