"""Soft cross-entropy between a head's logits and the target's distribution, a piece of the rows at a time.

Logits over a vocabulary are by far the largest tensors of training. They exist for one piece only: its gradients are
computed at once, beside the loss, and kept instead of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_PIECE_LOGITS = 1 << 26  # logits that exist at once


@torch.no_grad()
def distributions(normed: Tensor, head: Tensor, divisor: float = 1.0) -> Tensor:
    """What the target expects after rows that have passed its final norm [rows, hidden], over the vocabulary of `head`
    [vocab, hidden]: [rows, vocab], the sum of each row is 1."""
    found = normed.new_empty(len(normed), len(head))
    for piece in _pieces(normed, head):
        logits = functional.linear(normed[piece], head).float()
        found[piece] = torch.softmax(logits / divisor, dim=-1)
    return found


@torch.no_grad()
def best(rows: Tensor, weight: Tensor) -> Tensor:
    """The likeliest output of each row: int64 [rows]."""
    narrow = weight.to(rows.dtype)
    parts = [functional.linear(rows[piece], narrow).argmax(-1) for piece in _pieces(rows, weight)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=rows.device)


def soft_cross_entropy(rows: Tensor, weight: Tensor, wanted: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Σ scale · (cross-entropy of softmax(rows · weight^T) with the distributions wanted[index]). rows [n, width],
    weight [vocab, width], index and scale [n]."""
    loss: Tensor = _SoftCrossEntropy.apply(rows, weight, wanted, index, scale)  # type: ignore[no-untyped-call]
    return loss


def masked_loss(rows: Tensor, weight: Tensor, labels: Tensor, index: Tensor, scale: Tensor | None = None) -> Tensor:
    """The mean cross-entropy of those rows [..., width] whose `index` [...] into the labels is not negative, weighed by
    `scale` [...]."""
    valid = index >= 0
    weights = torch.ones_like(index[valid], dtype=torch.float32) if scale is None else scale[valid]
    return soft_cross_entropy(rows[valid], weight, labels, index[valid], weights / weights.sum().clamp(min=1e-6))


def best_tokens(rows: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """The target's ids of the likeliest tokens of rows [..., width]: int64 [...]."""
    found = best(rows.flatten(0, -2), weight)
    return token_ids[found].view(rows.shape[:-1])


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, wanted: Tensor, index: Tensor, scale: Tensor) -> Tensor:
        narrow = weight.to(rows.dtype)
        row_gradients = torch.empty_like(rows)
        # A weight that is not trained, such as the target's own, has none.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=rows.device)
        loss_and_gradient = _for_device(rows.device.type)
        for piece in _pieces(rows, weight):
            logits = functional.linear(rows[piece], narrow)
            losses, gradient = loss_and_gradient(logits, wanted[index[piece]], scale[piece])
            loss += losses.sum()
            row_gradients[piece] = gradient @ narrow
            if weight_gradient is not None:
                weight_gradient += gradient.T @ rows[piece]
        ctx.save_for_backward(row_gradients, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        row_gradients, weight_gradient = ctx.saved_tensors
        grad = grads[0]
        of_weight = None if weight_gradient is None else weight_gradient * grad
        return row_gradients * grad.to(row_gradients.dtype), of_weight, None, None, None


LossAndGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _loss_and_gradient(logits: Tensor, wanted: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of rows [n] and their gradients by the logits, in the dtype of those [n, vocab]."""
    wide, expected = logits.float(), wanted.float()
    log_sum = torch.logsumexp(wide, dim=-1)
    losses = (log_sum - (expected * wide).sum(-1)) * scale
    gradient = (torch.exp(wide - log_sum[:, None]) - expected) * scale[:, None]
    return losses, gradient.to(logits.dtype)


@cache
def _for_device(device_type: str) -> LossAndGradient:
    """On a GPU the dozen passes over the logits become two. A compiler that fails there leaves the plain function."""
    if device_type != "cuda":
        return _loss_and_gradient
    torch._dynamo.config.suppress_errors = True
    return torch.compile(_loss_and_gradient)


def _pieces(rows: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _PIECE_LOGITS // len(weight))
    return [slice(start, start + size) for start in range(0, len(rows), size)]
