"""The compiled kernels: what their error codes mean, and which library of several serves."""

from __future__ import annotations

from ctypes import CDLL, c_char_p
from pathlib import Path

from foredraft.backends.native.header import FUNCTIONS
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


def open_library(path: Path, kind: type[CDLL] = CDLL) -> CDLL:
    """Load one compiled library and declare its functions; raises OSError where the system refuses its level, or it was
    built from other sources than those beside it."""
    library = kind(str(path))
    library.fd_sources.restype = c_char_p
    if library.fd_sources() != sources_digest().encode():
        raise OSError(f"{path.name} was built from other sources; run: python -m foredraft.kernels.build")
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if code := library.fd_ready():
        raise OSError(f"{path.name} cannot run here: {ERRORS[code]}.")
    return library


def load_library(kind: type[CDLL] = CDLL) -> CDLL | None:
    """The best library that was built and that this processor can run; None where there is none. Of the kind `PyDLL` it
    keeps other threads of Python from running meanwhile."""
    for level in usable_levels():
        try:
            return open_library(level.library, kind)
        except (OSError, AttributeError):  # built for another system or of other sources, or refused by this one
            continue
    return None
