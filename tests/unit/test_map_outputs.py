"""A head with more tokens: own rows stay, and those of other tokens are the target's times a matrix."""

from __future__ import annotations

import torch
from tools.map_outputs import widened


def test_frequent_tokens_keep_their_rows_and_others_follow_the_same_matrix() -> None:
    torch.manual_seed(0)
    rows, matrix = torch.randn(60, 8), torch.randn(8, 8)
    known = torch.randperm(60)[:20].sort().values
    t2d = torch.zeros(60, dtype=torch.bool)
    t2d[known] = True
    weight = rows[known] @ matrix
    counts = torch.randperm(60)
    made = widened({"t2d": t2d, "lm_head.weight": weight}, rows, counts, own=12, size=30)
    ids = made["d2t"] + torch.arange(30)
    assert torch.equal(made["t2d"].nonzero()[:, 0], ids) and set(ids.tolist()) == set(
        (counts >= 30).nonzero()[:, 0].tolist()
    )
    own = ids[~made["mapped"]]
    assert set(own.tolist()) == set((counts >= 48).nonzero()[:, 0].tolist()), "the most frequent ones"
    assert torch.allclose(made["output_map.weight"].float(), matrix.T, atol=0.02)
    assert torch.allclose(made["lm_head.weight"].float(), rows[own] @ matrix, atol=0.1)
    for place, token in enumerate(own.tolist()):
        if token in known:
            row = weight[known.tolist().index(token)].bfloat16()
            assert torch.equal(made["lm_head.weight"][place], row), "as it was trained"
