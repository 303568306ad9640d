"""Heads in 8 and 4 bits: what is read is what was written, up to the step of a code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.errors import InvalidModel
from foredraft.heads.coding import MINIMUMS, SCALES, coded, decoded, encoded
from foredraft.heads.files import read_tensors, write_head
from tests.tiny_heads import random_head, tiny_config
from tests.tiny_models import random_model, save_model


@pytest.mark.parametrize(("bits", "step"), [(8, 1 / 127), (4, 2 / 15)])
def test_matrices_are_read_up_to_a_step(bits: int, step: float) -> None:
    tensors = {
        "w": torch.randn((6, 96), generator=torch.Generator().manual_seed(bits)).bfloat16(),
        "norm": torch.ones(96).bfloat16(),
        "d2t": torch.arange(5),
        "narrow": torch.randn(4, 20).bfloat16(),  # no whole groups
    }
    written = encoded(tensors, dict.fromkeys(tensors, bits))
    assert written["w"].shape[1] == 96 * bits // 8
    assert set(written) - set(tensors) == {"w" + SCALES} | ({"w" + MINIMUMS} if bits == 4 else set())
    read = {name: decoded(tensor) for name, tensor in coded(written).items()}
    assert set(read) == set(tensors)
    for name in ("norm", "d2t", "narrow"):
        assert torch.equal(read[name], tensors[name])
    largest = tensors["w"].float().abs().max()
    error = (read["w"].float() - tensors["w"].float()).abs().max()
    assert 0 < error <= (0.52 * step + 2**-8) * largest  # half a step, and bfloat16


def test_a_head_is_written_and_read_in_fewer_bits(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path / "model")
    head = random_head(tiny_config("eagle", folder, "none"))
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in head.state_dict().items()}
    sizes = []
    for bits in (16, 8, 4):
        place = tmp_path / str(bits)
        write_head(place, head.config, tensors, dict.fromkeys(tensors, bits))
        read = read_tensors(place, head.config)
        assert {name: t.shape for name, t in read.items()} == {name: t.shape for name, t in tensors.items()}
        sizes.append(sum(file.stat().st_size for file in place.glob("*.safetensors")))
    assert sizes[0] > 1.5 * sizes[1] > 2 * sizes[2]


def test_scales_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(random_model("llama"), tmp_path / "model")
    head = random_head(tiny_config("eagle", folder, "none"))
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in head.state_dict().items()}
    write_head(tmp_path / "head", head.config, tensors, dict.fromkeys(tensors, 8))
    (file,) = (tmp_path / "head").glob("*.safetensors")
    stored = load_file(file)
    stored["fc.weight" + SCALES] = stored["fc.weight" + SCALES][:-1].contiguous()
    save_file(stored, file)
    with pytest.raises(InvalidModel, match=r"fc\.weight"):
        read_tensors(tmp_path / "head", head.config)
