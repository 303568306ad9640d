"""Layers with a window that keep only what their windows reach, on a GPU: what lies before a window is NaN.

Without a device, TRITON_INTERPRET=1 runs what does not need one, slowly, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.batch import pack
from foredraft.engine.blocks import BlockPool
from foredraft.engine.window_blocks import WindowBlocks
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import load_decoder
from foredraft.runtime.kv import TARGET_GROUP, WINDOWS_GROUP, KVCache
from foredraft.runtime.runner import Runner
from foredraft.types import Draft, Work
from tests.contract import test_windows as contract
from tests.gpu.kernel_device import INTERPRETED, needs_kernels
from tests.gpu.test_cuda_kernels import attended, backend, planned
from tests.native.scene import Scene, attention_shape
from tests.native.weights import error
from tests.tiny_models import VOCAB, random_model, save_model
from tests.unit.unit_helpers import make_sequence

pytestmark = needs_kernels
WINDOW, SIZE = 6, 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_no_row_sees_are_not_read(dtype: str) -> None:
    """By few rows, by rows on paths of their own, and by many rows of a prompt."""
    scene = Scene(attention_shape(3, 64, window=100), [300, 400], backend(dtype).kv_dtype)
    scene.rows = [(0, prefix, []) for prefix in range(250, 300)]
    scene.rows += [(1, 380, [385, 390]), (1, 380, [386]), (1, 381, []), (1, 381, [395])]
    for sequence, first_seen in ((0, 150), (1, 281)):
        for side in (scene.cache.k, scene.cache.v):
            side[scene.slots(sequence, torch.arange(first_seen))] = torch.nan
    plan = planned(scene)
    assert plan.whole is not None and plan.split is not None
    q = torch.randn(len(scene.rows), 9 * 64).to(backend(dtype).kv_dtype).float()
    found = attended(scene, q, dtype=dtype)
    assert error(found, scene.reference(q)) < (1e-5 if dtype == "float32" else 4e-3)


def logits_of_pieces(folder: Path, tokens: list[int], pieces: list[int], num_window_blocks: int) -> Tensor:
    """Of all tokens in pieces, and of a small tree behind them; free window blocks are NaN."""
    checkpoint, kernels = open_checkpoint(folder), backend("float32")
    decoder = load_decoder(checkpoint, "float32", 512, kernels)
    kv = KVCache(64, SIZE, num_window_blocks)
    runner = Runner(decoder, kernels, kv.add_group(TARGET_GROUP, checkpoint.config, kernels))
    windows = WindowBlocks(WINDOW, SIZE, num_window_blocks, kv.window_blocks) if num_window_blocks else None
    pool = BlockPool(kv.num_blocks, SIZE, windows=windows)
    sequence = make_sequence(tokens, prompt_logprobs=0)
    found = []
    for index, piece in enumerate([*pieces, 0]):
        if windows is not None:
            held = {windows.of_block[block] for block in sequence.block_table}
            memory = kv.groups[WINDOWS_GROUP].memory
            for free in set(range(num_window_blocks)) - held:
                memory[:, free * SIZE : (free + 1) * SIZE] = torch.nan
        if not piece:
            break
        draft = Draft((5, 6, 7), (-1, -1, 0), (1.0,) * 3, ("",) * 3) if index == len(pieces) - 1 else Draft()
        assert pool.reserve(sequence, sequence.num_computed_tokens + piece + len(draft))
        found.append(runner.forward(pack([Work(sequence, piece, len(draft), draft)], SIZE)).logits.cpu())
        sequence.num_computed_tokens += piece
        pool.register(sequence)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["gemma3-scaled"] if INTERPRETED else ["gemma3-scaled", "gpt-oss"])
def test_window_blocks_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    folder = save_model(random_model(name, sliding_window=WINDOW), tmp_path)
    tokens = [(11 * place * place + 3) % VOCAB for place in range(24 if INTERPRETED else 60)]
    pieces = [18, 5, 1] if INTERPRETED else [37, 8, 9, 1, 1, 1, 1, 1, 1]
    few = logits_of_pieces(folder, tokens, pieces, num_window_blocks=13)
    assert len(few) == len(tokens) + 3 and few.isfinite().all()
    assert torch.equal(few, logits_of_pieces(folder, tokens, pieces, num_window_blocks=0))


@pytest.fixture(scope="module", params=contract.ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model(request.param), tmp_path_factory.mktemp("tiny"))


@pytest.mark.skipif(INTERPRETED, reason="runs whole models on a device")
@pytest.mark.parametrize(
    "promise",
    [
        contract.test_a_model_that_keeps_windows_says_what_one_says_that_keeps_everything,
        contract.test_a_conversation_goes_on_where_it_was,
        contract.test_a_prefix_is_found_where_all_of_its_window_is_left,
        contract.test_who_is_set_aside_comes_back_with_the_same_text,
        contract.test_trees_see_windows_along_their_own_paths,
    ],
)
def test_whole_models(
    folder: Path, promise: Callable[[Path, str, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    promise(folder, "cuda", monkeypatch)
