"""The self-test behind exact=True proves what it says: kernels whose rows depend on their neighbours are found out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.backends.base import ROW_COUNTS, Backend
from foredraft.backends.choose import choose_backend
from foredraft.backends.layers import AttentionShape, Experts, LayerKV, Linear
from foredraft.backends.row_tiles import agreeing_row_counts
from foredraft.backends.torch import TorchBackend
from foredraft.batch import ForwardBatch
from foredraft.engine import disk_cache, exactness
from foredraft.engine.exactness import ExactReport, ensure_exact, layers_agree
from foredraft.errors import InvalidParameter
from foredraft.models.catalog import open_checkpoint
from foredraft.models.decoder import Decoder, load_decoder
from tests.backends import BACKENDS, needs_native
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


def load(folder: Path, backend: Backend) -> Decoder:
    return load_decoder(open_checkpoint(folder), "float32", 64, backend)


class NeighbourSums(TorchBackend):
    """Adds a trace of the other rows to every row: never exact."""

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        y = super().linear(x, weight)
        return y + y.sum(0) * 1e-6


class OddCountsDiffer(TorchBackend):
    """Runs of fewer than 4 rows take another route, like a matrix-vector kernel."""

    def _tiled(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.row_tiles is None:
            y = x.double() @ weight.double().T
            return y.float() if len(x) >= 4 else y.float() * (1 + 1e-6)
        return super()._tiled(x, weight)


class BatchedAttentionDiffers(TorchBackend):
    """Attention that depends on how many rows are in the run."""

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        return super().attend(q, kv, shape, batch, sinks) * (1 + 1e-6 * (len(q) > 1))


class RoutesByTheRun(TorchBackend):
    """A router that sees how many rows there are: which experts a row gets depends on its neighbours."""

    def mix_experts(self, x: Tensor, experts: Experts, activation: str) -> Tensor:
        each = experts.each if len(x) < 16 else tuple(reversed(experts.each))
        return super().mix_experts(x, replace(experts, each=each), activation)


def test_routed_layers_are_part_of_the_proof(tmp_path: Path) -> None:
    moe = save_model(random_model("qwen3-moe"), tmp_path / "moe")
    for kind, agree in ((TorchBackend, True), (RoutesByTheRun, False)):
        backend = kind("float32", torch.device("cpu"))
        decoder = load(moe, backend)
        backend.row_tiles = agreeing_row_counts(backend, decoder.linears)
        assert layers_agree(backend, decoder) == agree


class OneRowSeesMore(TorchBackend):
    """Where a run has one row, windows are a key longer."""

    def attend(
        self, q: Tensor, kv: LayerKV, shape: AttentionShape, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        longer = shape.window + (shape.window > 0 and batch.num_rows == 1)
        return super().attend(q, kv, replace(shape, window=longer), batch, sinks)


def test_long_windows_are_part_of_the_proof(tmp_path: Path) -> None:
    windowed = save_model(random_model("mistral-sliding", sliding_window=512), tmp_path / "windowed")
    backend = OneRowSeesMore("float32", torch.device("cpu"))
    decoder = load(windowed, backend)
    backend.row_tiles = agreeing_row_counts(backend, decoder.linears)
    assert not layers_agree(backend, decoder)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backends_are_exact_and_the_proof_is_kept(folder: Path, name: str, tmp_path: Path) -> None:
    backend = choose_backend(name, "float32", torch.device("cpu"), threads=2)
    decoder = load(folder, backend)
    first = ensure_exact(backend, decoder, "float32", tmp_path / "cache" / "exact.json")
    second = ensure_exact(backend, decoder, "float32", tmp_path / "cache" / "exact.json")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.row_counts == second.row_counts
    if name == "native":
        assert first.row_counts == ROW_COUNTS
    (tmp_path / "cache" / "exact.json").write_text("not json")
    assert not ensure_exact(backend, decoder, "float32", tmp_path / "cache" / "exact.json").from_cache


DAMAGED = [
    5,
    None,
    True,
    "1, 2",
    {},
    [],
    [0],
    [-1, 2],
    [1, 1],
    [2, 1],
    [1.0, 2.0],
    [True, 2],
    [1, 3],
    [[1, 2]],
    [1e999],
]


def test_a_damaged_proof_is_found_out_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = choose_backend("torch", "float32", torch.device("cpu"), threads=1)
    decoder, file = load(folder, backend), tmp_path / "exact.json"
    key = disk_cache.machine_key(backend, decoder, "float32")
    monkeypatch.setattr(exactness, "agreeing_row_counts", lambda *arguments: (4, 8))
    monkeypatch.setattr(exactness, "layers_agree", lambda *arguments: True)
    for value in DAMAGED:
        file.write_text(json.dumps({key: value}))
        assert ensure_exact(backend, decoder, "float32", file) == ExactReport((4, 8), from_cache=False), value
        assert json.loads(file.read_text()) == {key: [4, 8]}
        assert backend.row_tiles == (4, 8)
    assert ensure_exact(backend, decoder, "float32", file) == ExactReport((4, 8), from_cache=True)


@needs_native
def test_a_proof_of_some_row_counts_is_none_for_kernels_without_tiles(folder: Path, tmp_path: Path) -> None:
    backend = choose_backend("native", "float32", torch.device("cpu"), threads=2)
    decoder, file = load(folder, backend), tmp_path / "exact.json"
    disk_cache.write(file, disk_cache.machine_key(backend, decoder, "float32"), [1, 2])
    assert ensure_exact(backend, decoder, "float32", file).row_counts == ROW_COUNTS


def test_rows_that_depend_on_neighbours_are_refused(folder: Path, tmp_path: Path) -> None:
    backend = NeighbourSums("float32", torch.device("cpu"))
    with pytest.raises(InvalidParameter, match="exact=True cannot be kept with backend 'torch' on cpu"):
        ensure_exact(backend, load(folder, backend), "float32", tmp_path / "exact.json")
    assert not (tmp_path / "exact.json").exists()


def test_tiles_leave_out_the_row_counts_that_differ(folder: Path) -> None:
    backend = OddCountsDiffer("float32", torch.device("cpu"))
    assert agreeing_row_counts(backend, load(folder, backend).linears) == (4, 8, 16, 32, 64)


def test_attention_that_depends_on_the_run_is_refused(folder: Path, tmp_path: Path) -> None:
    backend = BatchedAttentionDiffers("float32", torch.device("cpu"))
    decoder = load(folder, backend)
    backend.row_tiles = agreeing_row_counts(backend, decoder.linears)
    assert not layers_agree(backend, decoder)
    with pytest.raises(InvalidParameter, match="use exact=False"):
        ensure_exact(backend, decoder, "float32", tmp_path / "exact.json")


def test_a_context_shorter_than_the_proof_can_be_proved(folder: Path, tmp_path: Path) -> None:
    backend = choose_backend("auto", "float32", torch.device("cpu"), threads=2)
    decoder = load_decoder(open_checkpoint(folder), "float32", 2, backend)
    assert ensure_exact(backend, decoder, "float32", tmp_path / "exact.json").row_counts
