"""The portable backend: every verb in plain torch, on CPU and CUDA with the same code, readable first.

Weights are widened to the activation dtype (bfloat16 where the device computes in it, else float32), so quantised
models keep their values but save no memory here. Exactness: rows run through linear layers in tiles of the sizes in
`row_tiles`, for which a self-test has shown that a row's bits depend on that row alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.backends.base import Backend, HeadNorms, run_mlp
from foredraft.backends.layers import AttentionShape, Experts, LayerKV, Linear
from foredraft.backends.weight import Weight
from foredraft.batch import ForwardBatch

KEY_BLOCK = 128  # keys are reduced in blocks of this many, added in text order
_ROWS = 32  # rows that are reduced at once: CUDA chooses how to add by the shape of the whole


class TorchBackend(Backend):
    """See `Backend`. `row_tiles` is None until a self-test has chosen it, and stays so with exact=False."""

    name = "torch"
    build = str(torch.__version__)

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.device = device
        self.runs_ahead = device.type == "cuda"
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        computes_bfloat16 = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.activation_dtype = self.kv_dtype if computes_bfloat16 else torch.float32
        self.row_tiles: tuple[int, ...] | None = None
        if device.type == "cuda":  # sums of bfloat16 products stay in float32 to their end
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def pack(self, weight: Weight) -> Tensor:
        return weight.dense().to(self.device, self.activation_dtype).contiguous()

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        outputs = [self._tiled(x, part) for part in weight.parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return y if weight.bias is None else y + weight.bias.to(y.dtype)

    def embed(self, token_ids: Tensor, weight: Linear) -> Tensor:
        return functional.embedding(token_ids, weight.parts[0])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        squares = (wide * wide).view(-1, x.shape[-1])
        means = [squares[self._at_once(rows)].mean(-1, keepdim=True)[: len(rows)] for rows in _pieces(squares)]
        scale = torch.rsqrt(torch.cat([squares[:0, :1], *means]) + eps).view(*x.shape[:-1], 1)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y = x + (update if multiplier == 1 else update * multiplier)
        return y, self.rms_norm(y, weight, eps)

    def rope_and_store(
        self, qkv: Tensor, norms: HeadNorms, rope: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch
    ) -> Tensor:
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        q, k = (
            part if norm is None else self.rms_norm(part, norm, shape.norm_eps)
            for part, norm in zip((q, k), norms, strict=True)
        )
        if shape.rotary_dim:
            cos, sin = rope[batch.positions, :, None, :].unbind(1)  # each [rows, 1, rotary_dim / 2]
            q, k = (_rotate(part, cos, sin, shape.rotary_dim) for part in (q, k))
        kv.k[batch.slots] = k.to(kv.k.dtype)
        kv.v[batch.slots] = v.to(kv.v.dtype)
        rotated: Tensor = q.reshape(len(qkv), heads * head_dim)
        return rotated

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        if not len(q):
            return q
        pieces = [_attend_rows(q, kv, shape, batch, sinks, self._at_once(rows)) for rows in _pieces(q)]
        return torch.cat(pieces)[: len(q)]

    def gated(self, gate_up: Tensor, activation: str = "silu") -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        if activation == "clamped":
            return _clamped(gate, up)
        return (self.silu(gate) if activation == "silu" else _gelu_tanh(gate)) * up

    def mix_experts(self, x: Tensor, experts: Experts, activation: str) -> Tensor:
        """Expert by expert, for the rows that chose it; what a row gets of its experts is added best first."""
        scores = self.linear(x, experts.router).float()
        best, chosen = self.top(scores, experts.num_chosen)
        weights = (best - best[:, :1]).exp()
        total = _sum_halves(weights if experts.normalised else (scores - best[:, :1]).exp())
        updates = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            updates[rows, ranks] = run_mlp(self, x[rows], experts.each[expert], activation)
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for rank in range(experts.num_chosen):
            mixed = mixed + (weights[:, rank] / total)[:, None] * updates[:, rank].float()
        return mixed.to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        """Not torch's own: on a CPU its bits depend on where an element stands among all of them."""
        wide = x.float()
        return (wide / (1 + (-wide).exp())).to(x.dtype)

    def dots(self, vectors: Tensor, lanes: Tensor, x: Tensor) -> Tensor:
        return _sum_halves(vectors[lanes].float() * x.float()[:, None])

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best = logits.sort(dim=1, descending=True, stable=True)
        return best.values[:, :count], best.indices[:, :count]

    def _at_once(self, rows: range) -> list[int]:
        """The rows of one reduction. In exact mode there are always equally many: the last one stands in for missing
        ones, so that a row's sums are added in the same order however many are asked for."""
        missing = 0 if self.row_tiles is None else _ROWS - len(rows)
        return [*rows, *[rows[-1]] * missing]

    def _tiled(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T in tiles of proved sizes; the last one is padded with zero rows."""
        if self.row_tiles is None:
            return functional.linear(x, weight)
        tiles: list[Tensor] = []
        for rows in x.split(self.row_tiles[-1]):
            size = next(size for size in self.row_tiles if size >= len(rows))
            padded = functional.pad(rows, (0, 0, 0, size - len(rows)))
            tiles.append(functional.linear(padded, weight)[: len(rows)])
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _sum_halves(values: Tensor) -> Tensor:
    """Over the last dimension: the halves are added until one number is left, an order that no shape of a batch
    changes."""
    while (width := values.shape[-1]) > 1:
        values = functional.pad(values, (0, width % 2))
        left, right = values.chunk(2, dim=-1)
        values = left + right
    return values[..., 0]


def _gelu_tanh(x: Tensor) -> Tensor:
    """x * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (x + 0.044715 * x**3), which is x / (1 + exp(-2 * z)). Not torch's
    own, see `silu`."""
    wide = x.float()
    return (wide / (1 + (-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)).exp())).to(x.dtype)


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float().clamp(max=7)
    return (wide / (1 + (-1.702 * wide).exp()) * (up.float().clamp(-7, 7) + 1)).to(gate.dtype)


def _pieces(x: Tensor) -> list[range]:
    return [range(start, min(start + _ROWS, len(x))) for start in range(0, len(x), _ROWS)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Rotate the pairs (i, i + rotary_dim / 2) of every head; dimensions beyond rotary_dim pass through."""
    left, right, rest = x.float().split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1).to(x.dtype)


def _attend_rows(
    q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None, rows: list[int]
) -> Tensor:
    """Attention of a few rows, each over its own gathered keys. Every product has the shape of one row's key block, and
    the partial sums are added in text order; a block that is masked whole adds exact zeros."""
    counts = batch.key_counts[rows]
    count, kv_heads, head_dim = len(rows), shape.num_kv_heads, shape.head_dim
    queries = q[rows].float().view(count, kv_heads, -1, head_dim)  # [rows, kv_heads, group, head_dim]
    blocks = -(-int(counts.max()) // KEY_BLOCK)
    slots = functional.pad(batch.key_slots[rows], (0, max(0, blocks * KEY_BLOCK - batch.max_keys)))[
        :, : blocks * KEY_BLOCK
    ]
    order = torch.arange(blocks * KEY_BLOCK, device=q.device)[None, :]
    hidden = (order >= counts[:, None]) | (order < shape.first_key)
    if shape.window:
        hidden = hidden | (order < counts[:, None] - shape.window)
    # Instead of a key that the row does not see, which may be anything, its own last one.
    slots = torch.where(hidden, slots.gather(1, (counts[:, None] - 1).long()), slots)

    def gathered(cache: Tensor, block: int) -> Tensor:
        """[rows, kv_heads, KEY_BLOCK, head_dim]"""
        return cache[slots[:, block * KEY_BLOCK : (block + 1) * KEY_BLOCK]].float().transpose(1, 2)

    scores = torch.cat([queries @ gathered(kv.k, block).transpose(2, 3) for block in range(blocks)], dim=-1)
    scores = (scores * shape.scale).masked_fill(hidden[:, None, None, :], -torch.inf)
    best = scores.amax(-1, keepdim=True)
    total = torch.zeros_like(queries[..., :1])
    if sinks is not None:
        of_heads = sinks.view(1, kv_heads, -1, 1)
        best = torch.maximum(best, of_heads)
        total = (of_heads - best).exp()
    weights = (scores - best).exp().split(KEY_BLOCK, dim=-1)
    mixed = torch.zeros_like(queries)
    for block, weight in enumerate(weights):
        weight = weight.contiguous()
        total = total + weight.sum(-1, keepdim=True)
        mixed = mixed + weight @ gathered(kv.v, block)
    return (mixed / total).view(count, -1).to(q.dtype)
