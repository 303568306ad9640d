"""How long a text may become, and how many blocks the KV cache has: what was asked for, else what the memory allows
that the weights have left."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from foredraft.backends.base import Backend
from foredraft.config import EngineConfig, KvBytes, ModelConfig
from foredraft.errors import InvalidParameter

_FEWEST_KV_TOKENS = 1024
_DEFAULT_KV_TOKENS = 65536  # a pool is no larger than this unless one context needs it or the user asks


@dataclass(frozen=True)
class Capacity:
    max_model_len: int
    num_blocks: int
    num_window_blocks: int  # that layers with a window have; 0: all blocks


def check_length(options: EngineConfig, config: ModelConfig) -> None:
    """Whether the model knows as many positions as are asked for."""
    trained = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > trained:
        raise InvalidParameter(
            f"max_model_len={options.max_model_len} is beyond the {trained} positions that the model knows."
        )


def token_bytes(config: ModelConfig, backend: Backend, num_taps: int) -> KvBytes:
    """Of K and V, of the residual stream after `num_taps` layers, and of rotations."""
    num_ropes = 1 if config.window_rope_theta is None else 2
    rotations = num_ropes * config.rotary_dim * torch.float32.itemsize
    taps = num_taps * config.hidden_size * backend.kv_dtype.itemsize
    kv = config.kv_bytes(backend.kv_dtype.itemsize)
    return replace(kv, per_token=kv.per_token + taps + rotations)


def capacity_of(options: EngineConfig, config: ModelConfig, token: KvBytes, device: torch.device) -> Capacity:
    """What fits into the memory of a device, if a token takes so much."""
    memory, size = spare_bytes(device), options.block_size
    in_windows = _tokens_in_windows(options, token, memory)
    affordable = most_tokens(token, in_windows, memory)
    least = options.kv_cache_tokens or _FEWEST_KV_TOKENS
    if device.type == "cuda" and affordable < least:
        raise InvalidParameter(
            f"A KV cache of {least} tokens needs {bytes_of(token, in_windows, least) / 2**30:.1f} GiB beside the "
            f"weights, but {device} has memory for {affordable} tokens left; set kv_cache_tokens to fewer, use a "
            "smaller dtype, or device='cpu'."
        )
    wanted_len = options.max_model_len or config.max_position_embeddings
    kv_tokens = options.kv_cache_tokens
    if kv_tokens is None:
        kv_tokens = min(max(_FEWEST_KV_TOKENS, affordable), max(wanted_len, _DEFAULT_KV_TOKENS))
    num_blocks, num_window_blocks = -(-kv_tokens // size), in_windows // size
    return Capacity(min(wanted_len, kv_tokens), num_blocks, num_window_blocks if num_window_blocks < num_blocks else 0)


def bytes_of(token: KvBytes, in_windows: int, num_tokens: int) -> int:
    """What a cache of so many tokens takes, `in_windows` of which layers with a window keep."""
    return token.per_token * num_tokens + token.per_token_in_windows * min(num_tokens, in_windows)


def most_tokens(token: KvBytes, in_windows: int, memory: int) -> int:
    """The most tokens whose `bytes_of` are at most `memory`."""
    everywhere = memory // (token.per_token + token.per_token_in_windows)
    if everywhere <= in_windows:
        return everywhere
    return (memory - token.per_token_in_windows * in_windows) // token.per_token


def _tokens_in_windows(options: EngineConfig, token: KvBytes, memory: int) -> int:
    """How many tokens layers with a window keep: all that the windows of all sequences reach, and the rows of a step;
    or, where memory is short, as many as half of it holds, but enough for one sequence. Windows of one sequence reach
    into at most two blocks more than they would fill."""
    if not token.window:
        return 0
    size = options.block_size
    of_sequence = (-(-token.window // size) + 2) * size
    of_step = -(-options.rows_per_step // size) * size
    half = memory // 2 // token.per_token_in_windows // size * size
    return min(options.max_num_seqs * of_sequence + of_step, max(of_sequence + of_step, half))


def spare_bytes(device: torch.device) -> int:
    """Bytes that a cache may take. The rest of a GPU's free memory is for graphs and runs; memory that this process
    holds without using it counts as free. A CPU touches the pages of a cache only when they are written."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (int(torch.cuda.mem_get_info(device)[0]) + unused) * 3 // 4
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
