"""The speculators package computes our logits from exported heads. It lives in an environment of its own, .peers/
speculators, which `make check-speculators` makes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.export.engine import Engine
from foredraft.export.export import export
from foredraft.models.catalog import open_checkpoint
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.heads.catalog import SHIPPED
from foredraft.models.heads.config import CONFIG_FILE, HeadConfig
from foredraft.models.heads.files import read_tensors
from foredraft.train.eagle import chain_mask
from foredraft.train.modules.build import build_head
from foredraft.train.modules.eagle import EagleHead
from foredraft.train.modules.layers import KeysValues
from tests.tiny_heads import random_head, save_head, tiny_config
from tests.tiny_models import random_model, save_model

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".peers" / "speculators" / "bin" / "python"
STEPS = 3
LENGTH = 24


def loaded(folder: Path) -> EagleHead:
    config = HeadConfig.read(folder)
    head = build_head(config)
    head.load_state_dict(read_tensors(folder, config))
    assert isinstance(head, EagleHead)
    return head.eval()


def verifier(target: Checkpoint, folder: Path) -> Path:
    """As much of the target as the package looks at, as transformers writes it."""
    config = target.config
    folder.mkdir()
    fields = {"model_type": "llama", "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers}
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, "vocab_size": config.vocab_size}))
    tensors = {"model.norm.weight": target.vector("model.norm.weight")}
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & target.names():
        tensors[name] = target.weight(name).dense().contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def our_logits(head: EagleHead, taps: Tensor, embeddings: Tensor) -> list[Tensor]:
    """Of chains that start at every position, step by step; embeddings [1, length, hidden] of the tokens that follow
    each position, and zeros behind the last."""
    h, past, found = head.features(taps), list[KeysValues](), []
    positions = torch.arange(h.shape[1])[None]
    for step in range(STEPS):
        ahead = torch.nn.functional.pad(embeddings[:, step:], (0, 0, 0, step))
        h, own = head.step(ahead, h, positions + step, past, chain_mask(h.shape[1], step, h.device) if step else None)
        past.append(own)
        found.append(head.logits(h))
    return found


def compare(folder: Path, model: Path, place: Path) -> None:
    """Export the head of a model and compare the logits of both sides, in float32 from equal weights."""
    if not PYTHON.exists():
        pytest.skip(f"needs the speculators package in {PYTHON.parents[1]}; `make check-speculators` makes it")
    target = open_checkpoint(model)
    export(folder, Engine.speculators, place / "out", target, str(verifier(target, place / "verifier")))
    dtype = read_tensors(folder, HeadConfig.read(folder))["fc.weight"].dtype
    head, config = loaded(folder), target.config
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, LENGTH, len(head.config.taps) * config.hidden_size, generator=generator)
    tokens = torch.randint(config.vocab_size, (1, LENGTH), generator=generator)
    save_file({"taps": taps, "tokens": tokens}, place / "inputs.safetensors")
    files = [place / "out", place / "inputs.safetensors", place / "logits.safetensors"]
    run = subprocess.run([PYTHON, HERE / "speculators_logits.py", *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = load_file(place / "logits.safetensors")
    with torch.no_grad():
        table = target.weight("model.embed_tokens.weight").dense().to(dtype)
        ours = our_logits(head, taps, table[tokens].float())
    for step, expected in enumerate(ours):
        known = slice(0, LENGTH - step)  # behind the end the two sides feed different tokens
        difference = (theirs[f"logits.{step}"][:, known] - expected[:, known]).abs().max()
        assert difference < 1e-4 * expected.std(), f"step {step}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("taps", [(1, 2, 3), (0, 2)])
def test_eagle_logits_are_ours(taps: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    head = random_head(replace(tiny_config("eagle", model), taps=taps))
    compare(save_head(head, tmp_path / "head"), model, tmp_path)


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("*/eagle")), ids=lambda folder: f"{folder.parent.name}")
def test_logits_of_heads_that_come_with_foredraft_are_ours(folder: Path, default_model: Path, tmp_path: Path) -> None:
    compare(folder, default_model, tmp_path)
