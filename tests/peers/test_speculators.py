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

from foredraft.heads.base import CONFIG_FILE, HeadConfig
from foredraft.heads.dflash.module import DFlashModule
from foredraft.heads.eagle.module import EagleModule
from foredraft.heads.eagle.train import chain_mask
from foredraft.heads.engines import Engine
from foredraft.heads.export import export
from foredraft.heads.files import read_tensors
from foredraft.heads.kinds import SHIPPED
from foredraft.heads.module import KeysValues
from foredraft.models.catalog import open_checkpoint
from foredraft.models.checkpoint import Checkpoint
from tests.tiny_heads import build_head, random_head, save_head, tiny_config
from tests.tiny_models import random_model, save_model

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".peers" / "speculators" / "bin" / "python"
STEPS = 3
LENGTH = 24
ANCHOR = 10


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


def eagle_logits(head: EagleModule, taps: Tensor, embeddings: Tensor, tokens: Tensor) -> list[Tensor]:
    """Of chains that start at every position, step by step; row t of the embeddings [1, length, hidden] is that of the
    token which follows position t. Behind the end the two sides feed different tokens."""
    h, past, found = head.fc(taps), list[KeysValues](), []
    positions = torch.arange(LENGTH)[None]
    for step in range(STEPS):
        ahead = torch.nn.functional.pad(embeddings[:, step:], (0, 0, 0, step))
        h, own = head.midlayer(ahead, h, positions + step, past, chain_mask(LENGTH, step, h.device) if step else None)
        past.append(own)
        found.append(head.lm_head(head.norm(h))[:, : LENGTH - step])
    return found


def dflash_logits(head: DFlashModule, taps: Tensor, embeddings: Tensor, tokens: Tensor) -> list[Tensor]:
    """Of the block behind one anchor; the tokens inside the block are the given ones."""
    features, block = head.features(taps[:, :ANCHOR]), head.config.block
    places = torch.arange(ANCHOR, ANCHOR + block)[None]
    x = head.rows(embeddings[:, ANCHOR : ANCHOR + 1], features[:, -1:])
    y = head.blocks(x, places, head.context(features, torch.arange(ANCHOR)[None]), torch.ones(1, 1, 1, 1).bool())
    rows, weight = head.output(y, tokens[:, ANCHOR : ANCHOR + block])
    return [rows @ weight.T]


def compare(folder: Path, model: Path, place: Path) -> None:
    """Export the head of a model and compare the logits of both sides, in float32 from equal weights."""
    if not PYTHON.exists():
        pytest.skip(f"needs the speculators package in {PYTHON.parents[1]}; `make check-speculators` makes it")
    target, config = open_checkpoint(model), HeadConfig.read(folder)
    export(folder, Engine.speculators, place / "out", target, str(verifier(target, place / "verifier")))
    stored = read_tensors(folder, config)
    head = build_head(config).eval()
    head.load_state_dict(stored)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, LENGTH, len(config.taps) * config.target_hidden_size, generator=generator)
    tokens = torch.randint(config.target_vocab_size, (1, LENGTH), generator=generator)
    inputs = {"taps": taps, "tokens": tokens}
    if config.kind == "dflash":
        inputs["anchor"] = torch.tensor([ANCHOR])
    save_file(inputs, place / "inputs.safetensors")
    files = [place / "out", place / "inputs.safetensors", place / "logits.safetensors"]
    run = subprocess.run([PYTHON, HERE / "speculators_logits.py", *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = load_file(place / "logits.safetensors")
    # The package of block drafters takes the target's own embeddings, that of EAGLE heads those of the export.
    table = target.weight("model.embed_tokens.weight").dense()
    table = table.to(stored["fc.weight"].dtype).float() if config.kind == "eagle" else table
    with torch.no_grad():
        logits = eagle_logits if isinstance(head, EagleModule) else dflash_logits
        ours = logits(head, taps, table[tokens], tokens)  # type: ignore[arg-type]
    for step, expected in enumerate(ours):
        found = theirs[f"logits.{step}"][:, : expected.shape[1]]
        assert (found - expected).abs().max() < 1e-4 * expected.std(), f"step {step}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("taps", [(1, 2, 3), (0, 2)])
def test_eagle_logits_are_ours(taps: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    head = random_head(replace(tiny_config("eagle", model), taps=taps))
    compare(save_head(head, tmp_path / "head"), model, tmp_path)


@pytest.mark.parametrize("correction", ["none", "markov"])
def test_dflash_logits_are_ours(correction: str, model: Path, tmp_path: Path) -> None:
    config = tiny_config("dflash", model, correction, block_input="masked", mask_token_id=9)
    head = random_head(config)
    assert isinstance(head, DFlashModule)
    head.mask_embedding.weight.copy_(open_checkpoint(model).weight("model.embed_tokens.weight").dense()[9])
    compare(save_head(head, tmp_path / "head"), model, tmp_path)


def test_logits_of_the_head_of_the_default_model_are_ours(default_model: Path, tmp_path: Path) -> None:
    compare(SHIPPED / "smollm2-135m" / "eagle", default_model, tmp_path)
