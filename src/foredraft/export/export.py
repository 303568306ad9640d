"""From a folder that `foredraft train` wrote to one that another engine loads."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import InvalidModel, InvalidParameter
from foredraft.export.dflash import dflash_layout
from foredraft.export.eagle import eagle_layout
from foredraft.export.engine import Engine
from foredraft.export.layout import Head, Layout
from foredraft.export.medusa import medusa_layout
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.heads.config import CONFIG_FILE, HeadConfig
from foredraft.models.heads.files import check_target, read_tensors
from foredraft.models.json_file import read_json

_LAYOUTS = {"eagle": eagle_layout, "medusa": medusa_layout, "dflash": dflash_layout}
_DRAFT_TOKENS = 4  # of a draft model, which has no length of its own
_DRAFT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json")


@dataclass(frozen=True)
class Exported:
    """What was written, and the command that uses it."""

    kind: str
    engine: Engine
    folder: Path
    command: str


def export(folder: Path, engine: Engine, out: Path, target: Checkpoint, verifier: str) -> Exported:
    """Write the head or draft model in `folder` to `out`, in the engine's layout. `verifier` is the name by which the
    engine finds the target. Raises InvalidModel where its layout has no place for a part of the head."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameter(f"{out} is there already; name a folder that is new or empty.")
    if _is_draft_model(folder):
        return _copied(folder, engine, out, verifier)
    config = HeadConfig.read(folder)
    check_target(folder, config, target)
    if config.kind not in _LAYOUTS:
        raise InvalidModel(
            f"{folder} is a draft model that knows a part of its target's tokens, which other engines do not load; "
            "export the folder that `foredraft train draft` has written."
        )
    if list(config.taps) != sorted(set(config.taps)):
        raise InvalidModel(f"{folder}: the taps {list(config.taps)} do not rise, as other engines deliver them.")
    layout = _LAYOUTS[config.kind](Head(config, read_tensors(folder, config), target, verifier), engine)
    layout.write(out)
    return Exported(config.kind, engine, out, start_command(engine, layout, out, verifier))


def start_command(engine: Engine, layout: Layout, folder: Path, verifier: str) -> str:
    """How the engine is started with an exported head."""
    if engine is Engine.speculators:
        return shlex.join(["vllm", "serve", str(folder)])  # which finds the target by the head's config
    if engine is Engine.vllm:
        return _vllm_command(verifier, layout.method, folder, layout.tokens, layout.options)
    return _sglang_command(verifier, layout.method.upper(), folder, layout.tokens)


def _vllm_command(verifier: str, method: str, folder: Path, tokens: int, options: tuple[str, ...] = ()) -> str:
    chosen = {"method": method, "model": str(folder), "num_speculative_tokens": tokens}
    return shlex.join(["vllm", "serve", verifier, "--speculative-config", json.dumps(chosen), *options])


def _sglang_command(verifier: str, algorithm: str, folder: Path, tokens: int) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", verifier]
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)]
    words += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(tokens + 1)])


def _is_draft_model(folder: Path) -> bool:
    file = folder / CONFIG_FILE
    return file.is_file() and read_json(file).get("model_type") == "llama"


def _copied(folder: Path, engine: Engine, out: Path, verifier: str) -> Exported:
    """A distilled draft model is a Llama as transformers writes it, which both engines load as it is."""
    if engine is Engine.speculators:
        raise InvalidModel(
            f"{folder} is a draft model, a Llama of its own, and the speculators format has none; export it to vllm or "
            "sglang, or train a head with `foredraft train eagle`."
        )
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _DRAFT_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, out / file.name)
    command = (
        _vllm_command(verifier, "draft_model", out, _DRAFT_TOKENS)
        if engine is Engine.vllm
        else _sglang_command(verifier, "STANDALONE", out, _DRAFT_TOKENS)
    )
    return Exported("draft", engine, out, command)
