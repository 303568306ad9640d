"""How much memory becomes which KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.config import EngineConfig, KvBytes, ModelConfig
from foredraft.engine import capacity
from foredraft.engine.capacity import Capacity, bytes_of, capacity_of, most_tokens
from foredraft.errors import InvalidParameter

CPU = torch.device("cpu")
SIZES = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}


def model(num_layers: int = 6, **fields: Any) -> ModelConfig:
    return ModelConfig("test", num_layers=num_layers, max_position_embeddings=100_000, **SIZES, **fields)


WINDOWED = model(sliding_window=20, sliding_layers=(0, 1, 2, 3))


def with_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(capacity, "spare_bytes", lambda device: num_bytes)


def test_bytes_of_a_token() -> None:
    """Two heads of four numbers, for K and for V, of two bytes."""
    assert (model().kv_bytes(2).per_token, model().kv_bytes(2).per_window) == (6 * 32, 0)
    kv = WINDOWED.kv_bytes(2)
    assert (kv.per_token, kv.per_token_in_windows, kv.per_window) == (2 * 32, 4 * 32, 4 * 32 * 20)
    assert model(sliding_window=20).kv_bytes(2).per_token == 0


@pytest.mark.parametrize("memory", [0, 1, 2999, 3000, 3001, 6_000, 123_456])
@pytest.mark.parametrize("num_in_windows", [0, 10, 100])
def test_the_most_tokens_that_fit(memory: int, num_in_windows: int) -> None:
    token = KvBytes(20, 10, 4) if num_in_windows else KvBytes(20, 0, 0)
    most = most_tokens(token, num_in_windows, memory)
    assert bytes_of(token, num_in_windows, most) <= memory < bytes_of(token, num_in_windows, most + 1)


def test_there_are_window_blocks_for_all_sequences_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10**9)
    options, token = EngineConfig(max_num_seqs=8, max_num_batched_tokens=100), KvBytes(64, 128, 20)
    assert capacity_of(options, WINDOWED, token, CPU) == Capacity(100_000, 6250, 8 * (2 + 2) + 7)
    assert capacity_of(options, model(), KvBytes(192, 0, 0), CPU) == Capacity(100_000, 6250, 0)


def test_a_cache_that_is_smaller_than_all_windows_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10**9)
    options = EngineConfig(max_num_seqs=8, max_num_batched_tokens=100, kv_cache_tokens=39 * 16)
    assert capacity_of(options, WINDOWED, KvBytes(64, 128, 20), CPU) == Capacity(39 * 16, 39, 0)


def test_windows_get_half_of_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is enough for one sequence; the rest is for tokens."""
    options, token = EngineConfig(max_num_seqs=1000, max_num_batched_tokens=1000), KvBytes(64, 128, 20)
    with_memory(monkeypatch, 4_000_000)
    num_window_blocks = 2_000_000 // 128 // 16
    found = capacity_of(options, WINDOWED, token, CPU)
    assert found.num_window_blocks == num_window_blocks
    assert found.max_model_len == (4_000_000 - num_window_blocks * 16 * 128) // 64
    with_memory(monkeypatch, 240_000)
    assert capacity_of(options, WINDOWED, token, CPU).num_window_blocks == 2 + 2 + 63


def test_a_gpu_that_has_no_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 200_000)
    options = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, kv_cache_tokens=2000)
    with pytest.raises(
        InvalidParameter, match=r"2000 tokens needs .* has memory for 1837 tokens left; set kv_cache_to"
    ):
        capacity_of(options, WINDOWED, KvBytes(100, 113, 20), torch.device("cuda"))
