"""Draft models for other engines: a Llama as transformers writes it, which vLLM and SGLang load as it is."""

from __future__ import annotations

from pathlib import Path

from foredraft.errors import InvalidModel
from foredraft.heads.engines import Engine
from foredraft.heads.export import Head, Layout

_TOKENS = 4  # of a draft: the model has no length of its own
_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json")


def model_layout(folder: Path, engine: Engine) -> Layout:
    """Of the folder that training has written."""
    if engine is Engine.speculators:
        raise InvalidModel(
            f"{folder} is a draft model, a Llama of its own, and the speculators format has none; export it to vllm or "
            "sglang, or train a head with `foredraft train eagle`."
        )
    files = tuple(file for pattern in _FILES for file in folder.glob(pattern))
    return Layout({}, {}, "draft_model" if engine is Engine.vllm else "standalone", _TOKENS, files=files)


def layout(head: Head, engine: Engine) -> Layout:
    raise InvalidModel(
        f"{head.folder} is a draft model that knows a part of its target's tokens, which other engines do not load; "
        "export the folder that `foredraft train draft` has written."
    )
