"""benchmarks/widen.py: a wide model says what the small one says."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from benchmarks.widen import Shape, widen
from benchmarks.widen_head import widen_head
from torch import Tensor
from torch.nn import functional

from foredraft.heads.base import HeadConfig
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.files import read_tensors
from tests.gguf_files import convert_to_gguf
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import all_logits, random_model

PROMPT = [1, 5, 2, 4, 3, 3, 0, 5]


@pytest.mark.parametrize("architecture", ["llama-tied", "qwen2"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (12, 4)])
def test_a_wide_model_says_what_the_small_one_says(
    architecture: str, heads: int, kv_heads: int, tmp_path: Path
) -> None:
    """Also where a KV head has to be copied, and with more layers."""
    model = random_model(architecture, vocab_size=6)
    config = model.config
    small = convert_to_gguf(model, tmp_path / "small.gguf")
    wide = Shape(
        heads * config.hidden_size // config.num_attention_heads, heads, kv_heads, 3 * config.intermediate_size // 2, 5
    )
    widen(str(small), str(tmp_path / "wide.gguf"), wide, gguf.GGMLQuantizationType.F32)
    expected = all_logits(small, PROMPT, "torch")
    found = all_logits(tmp_path / "wide.gguf", PROMPT, "torch")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_shape_that_is_too_small_is_refused(tmp_path: Path) -> None:
    small = convert_to_gguf(random_model("qwen2", vocab_size=6), tmp_path / "small.gguf")
    with pytest.raises(SystemExit, match="does not fit"):
        widen(str(small), str(tmp_path / "wide.gguf"), Shape(8, 8, 4, 512, 5), gguf.GGMLQuantizationType.F32)


def head_logits(folder: Path, taps: list[Tensor], embeddings: Tensor) -> Tensor:
    """Behind every row, where taps and embeddings [1, rows, hidden] have zeros up to the head's width."""
    config = HeadConfig.read(folder)
    head = EagleModule(config)
    head.load_state_dict(read_tensors(folder, config))
    *wide, own = (functional.pad(each, (0, config.hidden_size - each.shape[-1])) for each in (*taps, embeddings))
    y, _ = head.midlayer(own, head.fc(torch.cat(wide, -1)), torch.arange(own.shape[1])[None], [], None)
    return head.lm_head(head.norm(y))


@torch.no_grad()
def test_a_wide_head_drafts_what_the_small_one_drafts(tmp_path: Path) -> None:
    small = convert_to_gguf(random_model("qwen2", vocab_size=300), tmp_path / "small.gguf")
    config = tiny_config("eagle", small)
    size = config.hidden_size // config.num_heads
    widen(str(small), str(tmp_path / "wide.gguf"), Shape(12 * size, 12, 4, 256, 5), gguf.GGMLQuantizationType.F32)
    save_head(random_head(config), tmp_path / "head")
    widen_head(tmp_path / "head", tmp_path / "wide", tmp_path / "wide.gguf")
    assert HeadConfig.read(tmp_path / "wide").hidden_size == 12 * size > config.hidden_size
    seen = [torch.randn(1, 7, config.hidden_size) for _ in range(len(config.taps) + 1)]
    expected = head_logits(tmp_path / "head", seen[:-1], seen[-1])
    found = head_logits(tmp_path / "wide", seen[:-1], seen[-1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
