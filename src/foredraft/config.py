"""What a model is and how an engine runs it: plain frozen data, no torch."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from foredraft.errors import InvalidParameter

DTYPES = ("float32", "bfloat16", "int8", "int4")  # fewer bits last
ACTIVATIONS = ("int8", "int16")  # what quantised weights are multiplied by on a CPU
MAX_THREADS = 256  # as in kernels/pool.h
MAX_INTEGER = 2**31 - 1  # sizes and positions are 32-bit integers in the kernels
QUANT_GROUP = 32  # weights of int8 and int4 share one scale (and minimum) per 32 inputs


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `kind` is "linear", "llama3", "yarn", "longrope", or "factors": each frequency is divided by its `long_factor` at
    every length. Fields that a kind does not use keep their defaults.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the ramp of yarn begins and ends at whole dimensions
    original_max_position_embeddings: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None

    def reach(self, stated: int) -> int:
        """How many positions a model knows whose file states so many. With yarn the file may state those before they
        are stretched, as the instructions for Qwen do."""
        if self.kind != "yarn":
            return stated
        return max(stated, min(int(self.original_max_position_embeddings * self.factor), MAX_INTEGER))


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model's layers, and how a row's are chosen and weighted (see backends.layers.Experts)."""

    count: int
    num_chosen: int
    intermediate_size: int  # of each
    normalised: bool
    dense_layers: tuple[int, ...] = ()  # layers that have one MLP instead


@dataclass(frozen=True)
class KvBytes:
    """What a token takes of a KV cache: always, and in layers with a window while these keep it."""

    per_token: int
    per_token_in_windows: int
    window: int  # 0: there is none

    @property
    def per_window(self) -> int:
        """What a sequence takes in layers with a window, however long it becomes."""
        return self.per_token_in_windows * self.window


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family; every relative is a setting of these fields."""

    architecture: str
    vocab_size: int  # width of the logits, which may exceed what the tokenizer knows
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_dim: int = 0  # how many of head_dim are rotated; 0 means all
    rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] = ()  # layers that see no positions (SmolLM3)
    qk_norm: bool = False  # RMS norm over each head of q and k before rope (Qwen3)
    sliding_window: int | None = None  # a key is visible while position - key_position < sliding_window
    sliding_layers: tuple[int, ...] | None = None  # layers with the window; None: all, when there is a window
    window_rope_theta: float | None = None  # of layers with the window, which are not scaled then (Gemma 3)
    activation: str = "silu"  # of the MLP's gate: one of backends.layers.ACTIVATIONS
    experts: ExpertsConfig | None = None
    attention_sinks: bool = False  # a score of each head that takes its share of attention (gpt-oss)
    update_norms: bool = False  # norms of what attention and the MLP add to the residual stream (Gemma 3)
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0  # Granite's four multipliers
    attention_multiplier: float | None = None  # None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    num_mtp_layers: int = 0  # layers behind those of the model, which predict further tokens and do not run with it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def window_of_layer(self, layer: int) -> int:
        """The sliding window of a layer in tokens, 0 where it sees everything."""
        windowed = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if self.sliding_window is not None and windowed else 0

    @property
    def windows(self) -> list[int]:
        """`window_of_layer` of all layers."""
        return [self.window_of_layer(layer) for layer in range(self.num_layers)]

    def kv_bytes(self, itemsize: int) -> KvBytes:
        """Of K and V, with so many bytes for a number."""
        of_layer = 2 * self.num_kv_heads * self.head_dim * itemsize
        num_windowed = sum(window > 0 for window in self.windows)
        return KvBytes(
            (self.num_layers - num_windowed) * of_layer, num_windowed * of_layer, max(self.windows, default=0)
        )


def _is_whole(value: object) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_threads(threads: int) -> None:
    if not _is_whole(threads) or threads > MAX_THREADS:
        raise InvalidParameter(f"threads={threads!r} must be a whole number from 1 to {MAX_THREADS}.")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model. `None` means: chosen from the model and the machine."""

    dtype: str = "auto"
    activations: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    exact: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    # Waiting requests start once this many places are free; more gives a GPU more steps without prompts.
    refill: int = 1
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    max_chunk_s: float = 0.1  # about the longest wait of a running stream for a chunk of another request's prompt
    block_size: int = 16
    prefix_caching: bool = True
    prefix_salt: str = ""
    threads: int | None = None
    head: str | None = "auto"  # trained heads: those that come with Foredraft, None, or where they are

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in ("auto", *known):
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not known; use auto, {', '.join(known)}.")
        sizes = ("max_num_seqs", "max_num_batched_tokens", "refill", "max_model_len", "kv_cache_tokens", "block_size")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise InvalidParameter(f"{name}={value!r} must be a whole number of at least 1.")
        if self.threads is not None:
            check_threads(self.threads)
        seconds = self.max_chunk_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidParameter(f"max_chunk_s={seconds!r} must be a number of seconds above 0.")
        if isinstance(seconds, int) and seconds > sys.float_info.max:
            raise InvalidParameter("max_chunk_s is too large a whole number; use float('inf') to set no limit.")
        for name in ("exact", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name}={getattr(self, name)!r} must be True or False.")
        if not isinstance(self.device, str):
            raise InvalidParameter(f"device={self.device!r} must be a text: auto, cpu or cuda.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InvalidParameter(f"device={self.device!r} is not known; use auto, cpu or cuda.")
        if self.head is not None and not (isinstance(self.head, str) and self.head):
            raise InvalidParameter(f"head={self.head!r} must be auto, None, a folder, a GGUF file or a hub id.")
        if not isinstance(self.prefix_salt, str):
            raise InvalidParameter(f"prefix_salt={self.prefix_salt!r} must be a text.")
        if self.refill > self.max_num_seqs:
            raise InvalidParameter(f"refill={self.refill} must be at most max_num_seqs={self.max_num_seqs}.")
        if self.rows_per_step < self.max_num_seqs:
            raise InvalidParameter(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running sequence needs one row per step; raise the first or lower the second."
            )

    @property
    def rows_per_step(self) -> int:
        """max_num_batched_tokens, where None means enough for a prompt's chunk and for every sequence."""
        return max(512, self.max_num_seqs) if self.max_num_batched_tokens is None else self.max_num_batched_tokens
