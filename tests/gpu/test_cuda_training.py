"""Training on a CUDA device: text by several processes, then every kind side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.train.kinds import parse_kind
from foredraft.train.run import TrainingRun, TrainOptions
from foredraft.train.text import TextPlan
from tests.toy_target import save_toy_target, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_kind_learns_beside_the_others(tmp_path: Path) -> None:
    options = TrainOptions(
        model=str(save_toy_target(tmp_path / "model")),
        out=tmp_path / "out",
        kinds=tuple(
            parse_kind(kind) for kind in ("eagle", "medusa", "mtp", "dflash", "dflash:correction=markov", "draft")
        ),
        plan=TextPlan((write_prompts(tmp_path / "prompts.jsonl", 300),), max_tokens=24),
        tokens=3000,
        steps=150,
        batch_tokens=1024,
        text_batch=32,
        rate=5.0,
        device="cuda",
    )
    run = TrainingRun(options)
    assert run.write_text(seconds=None) >= 3000
    for name, found in run.train(lambda _: None).items():
        assert found.acceptance[0] > 0.5, name
