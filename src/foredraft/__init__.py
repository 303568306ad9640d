"""Foredraft: lossless speculative decoding. Several tokens per run of the model, and never a different text.

Importing this package is cheap: PyTorch is loaded when `LLM` is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError, InvalidModel, InvalidParameter, InvalidPrompt, InvalidSpec
from foredraft.params import SamplingParams
from foredraft.types import RequestOutput, TokenEvent

if TYPE_CHECKING:
    from foredraft.llm import LLM

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


def __getattr__(name: str) -> Any:
    if name != "LLM":
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return import_module("foredraft.llm").LLM


def __dir__() -> list[str]:
    return sorted(__all__)
