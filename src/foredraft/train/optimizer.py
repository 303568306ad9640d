"""Muon for the matrices of a head's trunk, AdamW for everything else, both on float32 masters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_RATE = 2.5e-3
ADAM_RATE = 1.5e-3
WARM_UP_STEPS = 100
WARM_UP_SHARE = 0.05  # of training: the warm-up of short runs
CLIP = 1.0
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-8
# Newton-Schulz coefficients that bring singular values near 1 in five steps (K. Jordan's Muon).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def learning_rate(step: int, progress: float) -> float:
    """The factor on both rates: up over the first steps, then down with the cosine of the share of training done."""
    warm = min(1.0, max((step + 1) / WARM_UP_STEPS, progress / WARM_UP_SHARE))
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))


class Optimizer:
    """The optimiser of one head. Its state is tensors by name, so that it can be saved beside the weights."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], trunk: Iterable[str]) -> None:
        named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        chosen = set(trunk)
        self._muon = {name: each for name, each in named.items() if name in chosen}
        self._adam = {name: each for name, each in named.items() if name not in chosen}
        self._momentum = {name: torch.zeros_like(each) for name, each in self._muon.items()}
        self._first = {name: torch.zeros_like(each) for name, each in self._adam.items()}
        self._second = {name: torch.zeros_like(each) for name, each in self._adam.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step with the gradients that the parameters have, clipped together; they have none afterwards."""
        every = [each for each in (*self._muon.values(), *self._adam.values()) if each.grad is not None]
        torch.nn.utils.clip_grad_norm_(every, CLIP)
        self.steps += 1
        self._step_muon(MUON_RATE * factor)
        self._step_adam(ADAM_RATE * factor)
        for each in every:
            each.grad = None

    def state(self) -> dict[str, Tensor]:
        parts = {"momentum": self._momentum, "first": self._first, "second": self._second}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load_state(self, state: dict[str, Tensor], steps: int) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.steps = steps

    def _step_muon(self, rate: float) -> None:
        gradients = _gradients(self._muon)
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name, gradient in gradients.items():
            self._momentum[name].lerp_(gradient, 1 - _MOMENTUM)
            by_shape[gradient.shape].append(name)
        for shape, names in by_shape.items():
            # Nesterov: the gradient once more, weighed like a step ahead.
            ahead = [torch.lerp(gradients[name], self._momentum[name], _MOMENTUM) for name in names]
            updates = orthogonal(torch.stack(ahead))
            length = 0.2 * math.sqrt(max(shape)) * rate
            for name, update in zip(names, updates):
                self._muon[name].sub_(update.to(self._muon[name].dtype), alpha=length)

    def _step_adam(self, rate: float) -> None:
        found = _gradients(self._adam)
        if not found:
            return
        names, gradients = list(found), list(found.values())
        first, second = [self._first[name] for name in names], [self._second[name] for name in names]
        torch._foreach_lerp_(first, gradients, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - _BETAS[1])
        bias = [1 - beta**self.steps for beta in _BETAS]
        scales = torch._foreach_sqrt(second)
        torch._foreach_div_(scales, math.sqrt(bias[1]))
        torch._foreach_add_(scales, _EPS)
        torch._foreach_addcdiv_([self._adam[name] for name in names], first, scales, -rate / bias[0])


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, about, of a stack [n, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    nearest: Tensor = x.mT if tall else x
    return nearest


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}
