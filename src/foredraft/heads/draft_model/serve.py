"""A distilled draft model as it is served: a small decoder that knows the most frequent tokens of its target.

Its logits have a column for each of those. It reads all tokens: the embeddings of the others are made from the
target's, by one matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.backends.base import Backend
from foredraft.backends.weight import Weight
from foredraft.heads.weights import HeadWeights, layer_config, layer_shape
from foredraft.models.decoder import Decoder, DraftVocabulary
from foredraft.models.rope import rope_table

_PIECE = 4096  # rows of the target's embedding that are dense at once


def load_draft_model(weights: HeadWeights, embedding: Weight, max_positions: int, backend: Backend) -> Decoder:
    """`embedding` is the target's."""
    config, shape = weights.config, layer_shape(weights.config)
    token_ids = weights.token_ids
    known = torch.zeros(config.target_vocab_size, dtype=torch.bool)
    known[token_ids.cpu()] = True
    # Rows of the embedding: known tokens, which are columns of the logits too, then the others.
    rows = torch.where(known, known.cumsum(0) - 1, len(token_ids) + (~known).cumsum(0) - 1)
    others = projected(embedding, ~known, weights.matrix("unknown_proj.weight"))
    return Decoder(
        config=replace(layer_config(config), vocab_size=config.target_vocab_size),  # of the tokens that it reads
        embedding=weights.extended("embed_tokens.weight", others),
        layers=tuple(weights.layer(f"layers.{index}", shape) for index in range(config.num_layers)),
        norm=weights.vector("norm.weight"),
        head=weights.linear("embed_tokens.weight", is_head=True),
        rope=rope_table(layer_config(config), max_positions).to(backend.device),
        vocabulary=DraftVocabulary(token_ids, rows.to(backend.device)),
    )


def projected(table: Weight, wanted: Tensor, projection: Tensor) -> Tensor:
    """Rows of `table` in another width: [wanted rows, hidden] float32."""
    starts = range(0, len(wanted), _PIECE)
    pieces = ((table.rows(at, at + _PIECE).dense(), wanted[at : at + _PIECE]) for at in starts)
    return torch.cat([dense[some] @ projection.T for dense, some in pieces])
