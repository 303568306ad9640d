"""The compiled kernels as ctypes sees them: structures, functions, what their error codes mean, and which library of
several serves."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

from foredraft.kernels.build import sources_digest, usable_levels

OUT_OF_MEMORY = 5
ERRORS = {
    1: "a tensor is missing",
    2: "the shapes do not fit together",
    3: "the kind of weight is unknown",
    4: "an index (token, slot, position or block) points outside its table",
    OUT_OF_MEMORY: "there was not enough memory",
    6: "the system does not let this process use these instructions",
}


class StaleLibrary(Exception):
    """A library was built from other sources than those beside it."""


class WeightDescription(Structure):
    _fields_ = [("data", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("kind", c_int32), ("planes", c_int32)]


class PlainDescription(Structure):
    _fields_ = [(name, c_void_p) for name in ("values", "scales", "minimums", "block_scales", "block_minimums")]


class AttentionDescription(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "window", "first_key")),
        *((name, c_float) for name in ("scale", "norm_eps")),
    ]


class ProjectionDescription(Structure):
    _fields_ = [
        ("parts", POINTER(c_void_p)),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("num_parts", "outputs", "inputs")),
    ]


class LayerDescription(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, ProjectionDescription) for name in ("qkv", "output", "gate_up", "down")),
        ("shape", AttentionDescription),
    ]


class EntryDescription(Structure):
    _fields_ = [("embedding", ProjectionDescription), ("norm", c_void_p)]


class StackDescription(Structure):
    _fields_ = [
        ("layers", POINTER(LayerDescription)),
        *((name, c_void_p) for name in ("norm", "rope")),
        ("entry", POINTER(EntryDescription)),
        *((name, c_int64) for name in ("count", "width", "rope_positions", "rotary_dim")),
        *((name, c_float) for name in ("multiplier", "eps")),
    ]


class TapsDescription(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("layers", POINTER(c_int64)),
        *((name, c_int64) for name in ("count", "slots")),
        ("is_bf16", c_int32),
    ]


class BatchDescription(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "sequences", "block_tables")),
        *((name, c_void_p) for name in ("prefix_lens", "paths", "path_lens")),
        *((name, c_int64) for name in ("rows", "num_sequences", "table_width", "depth", "block_size")),
    ]


class KVDescription(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("slots", "kv_heads", "head_dim")),
        ("is_bf16", c_int32),
    ]


class CacheDescription(Structure):
    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("slots", "parts", "width")),
        ("is_bf16", c_int32),
    ]


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "fd_ready": (),
    "fd_set_threads": (c_int,),
    "fd_pack": (c_int, c_int64, c_int64, POINTER(PlainDescription), c_void_p),
    "fd_linear": (POINTER(WeightDescription), c_void_p, c_int64, c_void_p, c_void_p, c_int64),
    "fd_embed": (POINTER(WeightDescription), c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "fd_rms_norm": (c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "fd_add_rms_norm": (c_void_p, c_void_p, c_float, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "fd_gated": (c_void_p, c_int64, c_int64, c_void_p),
    "fd_silu": (c_void_p, c_int64, c_void_p),
    "fd_dots": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p),
    "fd_rope_and_store": (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
        *(POINTER(KVDescription), POINTER(AttentionDescription), POINTER(BatchDescription), c_void_p),
    ),
    "fd_attend": (c_void_p, POINTER(KVDescription), POINTER(AttentionDescription), POINTER(BatchDescription), c_void_p),
    "fd_run_layers": (
        *(POINTER(StackDescription), POINTER(c_void_p), POINTER(BatchDescription), POINTER(TapsDescription)),
        *(c_void_p, c_void_p),
    ),
    "fd_read": (POINTER(CacheDescription), c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "fd_read_previous": (POINTER(CacheDescription), c_void_p, c_int64, POINTER(BatchDescription), c_void_p),
    "fd_top": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load one compiled library and declare its functions; raises OSError where the system refuses its level, and
    StaleLibrary."""
    library = ctypes.CDLL(str(path))
    library.fd_sources.restype = library.fd_build.restype = c_char_p
    if library.fd_sources() != sources_digest().encode():
        raise StaleLibrary(f"{path.name} was built from other sources; run: python -m foredraft.kernels.build")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.fd_draw.argtypes, library.fd_draw.restype = (c_void_p, c_int64, c_float, c_double, c_uint64), c_int64
    library.fd_packed_bytes.argtypes, library.fd_packed_bytes.restype = (c_int, c_int64, c_int64), c_int64
    if code := library.fd_ready():
        raise OSError(f"{path.name} cannot run here: {ERRORS[code]}.")
    return library


def library_build(library: ctypes.CDLL) -> str:
    """Names the code of a library: its sources, its level and its compiler, whatever their files are called."""
    return f"{library.fd_sources().decode()} {library.fd_build().decode()}"


def load_library() -> ctypes.CDLL | None:
    """The best library that was built and that this processor can run; None where there is none."""
    for level in usable_levels():
        try:
            return open_library(level.library)
        except (OSError, AttributeError, StaleLibrary):  # built for another system, or refused by this one
            continue
    return None
