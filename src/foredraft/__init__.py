"""Foredraft: lossless speculative decoding. Several tokens per run of the model, and never a different text.

Importing this package is cheap: a name is loaded when it is first asked for, and PyTorch with `LLM` or `AsyncEngine`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError, InvalidModel, InvalidParameter, InvalidPrompt, InvalidSpec, Overloaded

if TYPE_CHECKING:
    from foredraft.engine.async_engine import AsyncEngine
    from foredraft.llm import LLM
    from foredraft.outputs import RequestOutput, TokenEvent
    from foredraft.params import SamplingParams
    from foredraft.proposers.registry import register_proposer
    from foredraft.tool_calls import ToolCall

__version__ = "0.3.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "ForedraftError",
    "InvalidModel",
    "InvalidParameter",
    "InvalidPrompt",
    "InvalidSpec",
    "Overloaded",
    "RequestOutput",
    "SamplingParams",
    "TokenEvent",
    "ToolCall",
    "__version__",
    "register_proposer",
]
_LATER = {
    "LLM": "foredraft.llm",
    "AsyncEngine": "foredraft.engine.async_engine",
    "RequestOutput": "foredraft.outputs",
    "TokenEvent": "foredraft.outputs",
    "SamplingParams": "foredraft.params",
    "ToolCall": "foredraft.tool_calls",
    "register_proposer": "foredraft.proposers.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
