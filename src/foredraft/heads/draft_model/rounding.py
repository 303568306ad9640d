"""The layers of a draft model in 4 bits, rounded so that what they put out changes least (GPTQ).

Plain rounding treats every weight alone. Here the inputs of a layer are known, from text: what the rounding of one
input's weights does to the outputs, the weights of the inputs after it take back as far as they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.backends.weight import Weight
from foredraft.config import QUANT_GROUP
from foredraft.heads.base import T2D, HeadConfig
from foredraft.heads.draft_model.module import Llama
from foredraft.heads.draft_model.serve import projected
from foredraft.train.batches import Batch

_DAMPING = 0.01  # of the mean square of the inputs: inputs that hardly vary must not be trusted with corrections
_TABLE = "embed_tokens.weight"
_SHARED_INPUTS = (  # the matrices of a layer by what they read
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@torch.no_grad()
def rounded_layers(
    config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Weight, batches: Sequence[Batch]
) -> dict[str, Weight]:
    """The matrices of its layers in 4 bits, by name. `tensors` are as train.py cuts them, `embedding` is the
    target's, and `batches` are text that the model is made for. Layers are rounded in order, so that each makes up for
    those before it."""
    model = _whole(config, tensors, embedding)
    codes: dict[str, Weight] = {}
    for index, layer in enumerate(model.model.layers):
        readers = [layer.get_submodule(names[0]) for names in _SHARED_INPUTS]
        for names, squares in zip(_SHARED_INPUTS, _squares(model, readers, batches)):
            for name in names:
                weight = layer.get_parameter(f"{name}.weight")
                codes[f"layers.{index}.{name}.weight"] = one = rounded(weight, squares)
                weight.copy_(one.dense())
    return codes


def _whole(config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Weight) -> Llama:
    """The model with the embeddings of all tokens."""
    known = tensors[T2D]
    table = torch.empty(len(known), config.hidden_size)
    table[known] = tensors[_TABLE].float()
    table[~known] = projected(embedding, ~known, tensors["unknown_proj.weight"].float())
    model = Llama(config)
    names = model.model.state_dict().keys() - {_TABLE}
    model.model.load_state_dict({name: tensors[name].float() for name in names} | {_TABLE: table})
    return model


def rounded(weight: Tensor, squares: Tensor) -> Weight:
    """`weight` [outputs, inputs] in 4 bits; `squares` is the sum of x·xᵀ over rows x that it is multiplied with."""
    damped = squares.double() + _DAMPING * squares.diagonal().mean() * torch.eye(len(squares))
    influence = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
    left = weight.float().clone()  # what is still to be rounded, corrected for what has been
    groups = range(0, left.shape[1], QUANT_GROUP)
    codes = torch.empty_like(left, dtype=torch.uint8)
    scales, minimums = (torch.empty(len(left), len(groups), dtype=torch.float16) for _ in range(2))
    for group, start in enumerate(groups):
        own = left[:, start : start + QUANT_GROUP]
        minimums[:, group] = own.amin(1)
        least = minimums[:, group].float()
        scales[:, group] = (own.amax(1) - least) / 15
        scale = scales[:, group].float()
        divisor = torch.where(scale == 0, 1.0, scale)
        for column in range(start, start + own.shape[1]):
            code = ((left[:, column] - least) / divisor).round().clamp(0, 15)
            codes[:, column] = code.byte()
            error = (left[:, column] - (code * scale + least)) / influence[column, column]
            left[:, column:] -= error[:, None] * influence[column, column:]
    return Weight("q4", codes, scales, minimums)


def _squares(model: Llama, modules: Sequence[torch.nn.Module], batches: Sequence[Batch]) -> list[Tensor]:
    """The sum of x·xᵀ over all rows that each module reads."""
    sums = [torch.zeros(())] * len(modules)
    is_text = torch.zeros(())

    def add(place: int, x: Tensor) -> None:
        rows = x.flatten(0, 1)[is_text]
        sums[place] = sums[place] + rows.T @ rows

    hooks = [
        module.register_forward_pre_hook(lambda _, given, at=at: add(at, given[0])) for at, module in enumerate(modules)
    ]
    for batch in batches:
        places = torch.arange(batch.tokens.shape[1])[None]
        is_text = (places < batch.lengths[:, None]).flatten()
        model(batch.tokens, places, model.output_weight)
    for hook in hooks:
        hook.remove()
    return sums
