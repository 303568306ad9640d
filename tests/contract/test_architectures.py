"""Every architecture gives the logits of transformers, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.backends import BACKENDS
from tests.tiny_models import ARCHITECTURES, VOCAB, all_logits, random_model, save_model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = random_model(name)
    folder = save_model(model, tmp_path)
    for length in (1, 17, 300):
        prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            expected = model(prompt[None]).logits[0]
        difference = (all_logits(folder, prompt.tolist(), backend) - expected).abs().max().item()
        assert difference < 1e-4, f"{name}, {length} tokens"
        assert expected.std() > 0.1, "logits this flat would hide an error"


def test_a_forgotten_part_would_show(tmp_path: Path) -> None:
    """The comparison can fail: without its per-head norms, Qwen3 is far off."""
    model = random_model("qwen3")
    folder = save_model(model, tmp_path)
    prompt = list(range(17))
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(1.0)
        expected = model(torch.tensor([prompt])).logits[0]
    assert (all_logits(folder, prompt, "torch") - expected).abs().max() > 1e-2
