"""gpt-oss: experts in MXFP4, which stay 4-bit codes, and every way in which their tensors can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.backends.weight import MX4_VALUES, Weight
from foredraft.errors import InvalidModel
from foredraft.models.decoder import load_decoder
from foredraft.models.quantise import convert
from foredraft.models.safetensors.checkpoint import SafetensorsCheckpoint
from tests.backends import BACKENDS
from tests.tiny_models import VOCAB, all_logits, random_model, save_model

EXPERTS = "model.layers.1.mlp.experts"


def mxfp4(folder: Path) -> Any:
    """Write the experts of a random model in MXFP4, as OpenAI publishes them; returns the model with their values."""
    model = random_model("gpt-oss")
    save_model(model, folder)
    tensors, state = load_file(folder / "model.safetensors"), model.state_dict()
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        values = torch.tensor(MX4_VALUES)[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(3).int()]
        dense = torch.ldexp(values, scales[..., None].int() - 128).flatten(2)
        state[name].copy_(dense.transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_the_values(backend: str, tmp_path: Path) -> None:
    model = mxfp4(tmp_path)
    prompt = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(prompt[None]).logits[0]
    assert expected.std() > 0.1
    assert (all_logits(tmp_path, prompt.tolist(), backend) - expected).abs().max() < 1e-4


def test_codes_are_kept(tmp_path: Path) -> None:
    mxfp4(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    blocks, scales = (stored[f"{EXPERTS}.gate_up_proj_{part}"][4] for part in ("blocks", "scales"))
    up = checkpoint.weight(f"{EXPERTS}.4.up_proj.weight")
    assert checkpoint.precision == "int4"
    assert (up.kind, tuple(up.values.shape)) == ("mx4", (96, 64))
    assert torch.equal(up.values[:, 0::2], blocks[1::2].flatten(1) & 15)
    assert torch.equal(up.values[:, 1::2], blocks[1::2].flatten(1) >> 4)
    assert up.scales is not None and torch.equal(up.scales, scales[1::2])
    assert convert(up, "int4") is up
    assert torch.equal(convert(up, "bfloat16").dense(), up.dense()), "bfloat16 holds every value"
    bias = checkpoint.vector(f"{EXPERTS}.4.gate_proj.bias")
    assert torch.equal(bias, stored[f"{EXPERTS}.gate_up_proj_bias"][4, 0::2])


def test_values_of_all_codes() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    weight = Weight("mx4", torch.arange(32, dtype=torch.uint8)[None] % 16, torch.tensor([[130]], dtype=torch.uint8))
    assert weight.dense()[0, :16].tolist() == [8 * value for value in (*values, *(-value for value in values))]


def changed(**tensors: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        for name, edit in tensors.items():
            new = edit(stored.pop(f"{EXPERTS}.{name}"))
            if new is not None:
                stored[f"{EXPERTS}.{name}"] = new.contiguous()

    return change


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scales": (changed(down_proj_scales=lambda t: None), r"down_proj_blocks' does not fit .*scales', or that is"),
    "fewer scales": (changed(down_proj_scales=lambda t: t[:, :, :2]), r"down_proj_blocks' does not fit"),
    "no codes": (changed(down_proj_blocks=lambda t: None), r"experts\.0\.down_proj\.weight' is missing"),
    "an expert less": (changed(down_proj_blocks=lambda t: t[:5]), r"holds 5 experts, but num_local_experts is 6"),
    "floats": (changed(down_proj_blocks=lambda t: t.float()), r"is F32 with shape .*no experts of gpt-oss have"),
    "flat": (changed(gate_up_proj_bias=lambda t: t.flatten()), r"is F32 with shape \[1152\], which no experts"),
    "narrow": (changed(gate_up_proj_bias=lambda t: t[:, :100]), r"gate_proj\.bias' has shape \[50\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_experts_are_named(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=message):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 8.0}, r"swiglu_limit is 8\.0, but only 7\.0 is supported"),
        ({"sliding_window": 0}, r"sliding_window is 0, but a whole number from 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is set"),
        ({"num_local_experts": 7}, r"holds 6 experts, but num_local_experts is 7"),
        ({"num_experts_per_tok": 7}, r"7 experts of a token are to be chosen of 6"),
    ],
)
def test_wrong_configurations_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    mxfp4(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InvalidModel, match=message):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_reach_the_backend(backend: str, tmp_path: Path) -> None:
    from foredraft.backends.choose import choose_backend

    mxfp4(tmp_path)
    chosen = choose_backend(backend, "int4", torch.device("cpu"), threads=2)
    decoder = load_decoder(SafetensorsCheckpoint(tmp_path), "int4", 8, chosen)
    kinds = {linear.kinds for layer in decoder.layers for linear in layer.linears[3:]}
    assert kinds == {("mx4",)}, "behind q, k and v, the output and the router come the experts"
