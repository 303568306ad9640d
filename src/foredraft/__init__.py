"""Foredraft: lossless speculative decoding. Several tokens per run of the model, and never a different text.

Importing this package is cheap: PyTorch is loaded when `LLM` is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.errors import ForedraftError, InvalidModel, InvalidParameter, InvalidPrompt, InvalidSpec
    from foredraft.llm import LLM
    from foredraft.params import SamplingParams
    from foredraft.types import RequestOutput, TokenEvent

__version__ = "0.2.0.dev0"

__all__ = [
    "LLM",
    "ForedraftError",
    "InvalidModel",
    "InvalidParameter",
    "InvalidPrompt",
    "InvalidSpec",
    "RequestOutput",
    "SamplingParams",
    "TokenEvent",
    "__version__",
]

_HOME = {
    "LLM": "foredraft.llm",
    "ForedraftError": "foredraft.errors",
    "InvalidModel": "foredraft.errors",
    "InvalidParameter": "foredraft.errors",
    "InvalidPrompt": "foredraft.errors",
    "InvalidSpec": "foredraft.errors",
    "RequestOutput": "foredraft.types",
    "SamplingParams": "foredraft.params",
    "TokenEvent": "foredraft.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
