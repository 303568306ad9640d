"""Soft cross-entropy between a head's logits and the target's distribution, a piece of the rows at a time.

Logits over a vocabulary are by far the largest tensors of training. They exist for one piece only: its gradients are
computed at once, beside the loss, and kept instead of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_PIECE_LOGITS = 1 << 26  # logits that exist at once


@dataclass(frozen=True)
class Labels:
    """The target's distribution over a draft vocabulary after each of some positions."""

    probabilities: Tensor  # [rows, draft_vocab], each row's sum is 1
    argmax: Tensor  # int64 [rows]: the target argmax in the draft vocabulary, -1 where that does not have it


@torch.no_grad()
def labels(normed: Tensor, head: Tensor, argmax: Tensor, divisor: float = 1.0) -> Labels:
    """From rows after the final norm [rows, hidden], the target's output head over the draft vocabulary, and the place
    of the target argmax in it."""
    probabilities = normed.new_empty(len(normed), len(head))
    for piece in _pieces(normed, head):
        logits = functional.linear(normed[piece], head).float()
        probabilities[piece] = torch.softmax(logits / divisor, dim=-1)
    return Labels(probabilities, argmax)


@torch.no_grad()
def target_argmax(normed: Tensor, head: Tensor) -> Tensor:
    """The likeliest output of each row: int64 [rows]."""
    parts = [functional.linear(normed[piece], head).argmax(-1) for piece in _pieces(normed, head)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=normed.device)


def soft_cross_entropy(rows: Tensor, weight: Tensor, wanted: Labels, index: Tensor, scale: Tensor) -> Tensor:
    """Σ scale · (cross-entropy of softmax(rows · weight^T) with the labels `index`). rows [n, width], weight
    [draft_vocab, width], index and scale [n]."""
    loss: Tensor = _SoftCrossEntropy.apply(rows, weight, wanted.probabilities, index, scale)  # type: ignore[no-untyped-call]
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, probabilities: Tensor, index: Tensor, scale: Tensor) -> Tensor:
        narrow = weight.to(rows.dtype)
        row_gradients = torch.empty_like(rows)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros((), device=rows.device)
        for piece in _pieces(rows, weight):
            logits = functional.linear(rows[piece], narrow).float()
            wanted = probabilities[index[piece]]
            log_sum = torch.logsumexp(logits, dim=-1)
            # Σ p · logits in the precision of the sums, without a third tensor of this size.
            product = torch.linalg.vecdot(wanted.float(), logits)
            loss += ((log_sum - product) * scale[piece]).sum()
            gradient = torch.exp_(logits.sub_(log_sum[:, None])).sub_(wanted).mul_(scale[piece, None]).to(rows.dtype)
            row_gradients[piece] = gradient @ narrow
            weight_gradient += gradient.T @ rows[piece]
        ctx.save_for_backward(row_gradients, weight_gradient.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        row_gradients, weight_gradient = ctx.saved_tensors
        grad = grads[0]
        return row_gradients * grad.to(row_gradients.dtype), weight_gradient * grad, None, None, None


def _pieces(rows: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _PIECE_LOGITS // len(weight))
    return [slice(start, start + size) for start in range(0, len(rows), size)]
