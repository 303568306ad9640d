"""How long a text may become, and how many blocks the KV cache has: what was asked for, else what the memory allows
that the weights have left."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from foredraft.backends.base import Backend
from foredraft.config import EngineConfig, ModelConfig
from foredraft.errors import InvalidParameter

_FEWEST_KV_TOKENS = 1024
_DEFAULT_KV_TOKENS = 65536  # a pool is no larger than this unless one context needs it or the user asks


@dataclass(frozen=True)
class Capacity:
    max_model_len: int
    num_blocks: int
    num_window_blocks: int  # that layers with a window have; 0: all blocks


@dataclass(frozen=True)
class TokenBytes:
    """What tokens take of a KV cache."""

    always: int  # each of them: in layers that see everything, and beside the layers
    in_windows: int  # those that layers with a window have room for

    def of(self, num_tokens: int, num_in_windows: int) -> int:
        return self.always * num_tokens + self.in_windows * min(num_tokens, num_in_windows)

    def affordable(self, memory: int, num_in_windows: int) -> int:
        """The most tokens whose `of` is at most `memory`."""
        everywhere = memory // (self.always + self.in_windows)
        if everywhere <= num_in_windows:
            return everywhere
        return (memory - self.in_windows * num_in_windows) // self.always


def check_length(options: EngineConfig, config: ModelConfig) -> None:
    """Whether the model knows as many positions as are asked for."""
    trained = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > trained:
        raise InvalidParameter(
            f"max_model_len={options.max_model_len} is beyond the {trained} positions that the model knows."
        )


def token_bytes(config: ModelConfig, backend: Backend, num_taps: int) -> TokenBytes:
    """`num_taps` are the layers after which the residual stream is kept."""
    num_ropes = 1 if config.window_rope_theta is None else 2
    rotations = num_ropes * config.rotary_dim * torch.float32.itemsize
    taps = num_taps * config.hidden_size * backend.kv_dtype.itemsize
    kv = config.kv_bytes(backend.kv_dtype.itemsize)
    return TokenBytes(kv.per_token + taps + rotations, kv.per_token_in_windows)


def capacity_of(options: EngineConfig, config: ModelConfig, needs: TokenBytes, device: torch.device) -> Capacity:
    memory, size = _memory_for_kv(device), options.block_size
    num_in_windows = _tokens_in_windows(options, config, needs, memory)
    affordable = needs.affordable(memory, num_in_windows)
    least = options.kv_cache_tokens or _FEWEST_KV_TOKENS
    if device.type == "cuda" and affordable < least:
        raise InvalidParameter(
            f"A KV cache of {least} tokens needs {needs.of(least, num_in_windows) / 2**30:.1f} GiB beside the weights, "
            f"but {device} has memory for {affordable} tokens left; set kv_cache_tokens to fewer, use a smaller "
            "dtype, or device='cpu'."
        )
    wanted_len = options.max_model_len or config.max_position_embeddings
    kv_tokens = options.kv_cache_tokens
    if kv_tokens is None:
        kv_tokens = min(max(_FEWEST_KV_TOKENS, affordable), max(wanted_len, _DEFAULT_KV_TOKENS))
    num_blocks, num_window_blocks = -(-kv_tokens // size), num_in_windows // size
    return Capacity(min(wanted_len, kv_tokens), num_blocks, num_window_blocks if num_window_blocks < num_blocks else 0)


def _tokens_in_windows(options: EngineConfig, config: ModelConfig, needs: TokenBytes, memory: int) -> int:
    """For how many tokens layers with a window have room: all that the windows of all sequences reach, and the rows of
    a step. Where memory is short, they get half of it, if that is enough for one sequence. A sequence's windows reach
    into two blocks more than they fill, at either end."""
    if not needs.in_windows:
        return 0
    size = options.block_size
    of_sequence = (-(-max(config.windows) // size) + 2) * size
    of_step = -(-options.rows_per_step // size) * size
    shared = memory // 2 // needs.in_windows // size * size
    return min(options.max_num_seqs * of_sequence + of_step, max(of_sequence + of_step, shared))


def _memory_for_kv(device: torch.device) -> int:
    """Bytes that a KV cache may take. The rest of a GPU's free memory is for graphs and runs; memory that this process
    holds without using it counts as free. A CPU touches the pages of its cache only when tokens are written."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (int(torch.cuda.mem_get_info(device)[0]) + unused) * 3 // 4
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
