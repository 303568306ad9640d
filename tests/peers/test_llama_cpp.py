"""llama.cpp writes the same greedy text from the same GGUF file. It lives in an environment of its own, .peers/llama,
which `make check-llama` makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.gguf_files import convert_to_gguf
from tests.tiny_models import VOCAB, random_model

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".peers" / "llama" / "bin" / "python"
PROMPT = [(11 * place * place + 3) % VOCAB for place in range(90)]
COUNT = 64
# llama.cpp cuts the ramp of yarn to whole dimensions, which gpt-oss does not: here it spans all of them.
ROUND_YARN = {
    "rope_type": "yarn",
    "rope_theta": 6.0,
    "factor": 4.0,
    "original_max_position_embeddings": 200,
    "truncate": False,
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3-moe", "gpt-oss"])
def test_the_same_file_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"needs llama.cpp in {PYTHON.parents[1]}; `make check-llama` makes it")
    changes = {"rope_parameters": ROUND_YARN} if name == "gpt-oss" else {}
    path = convert_to_gguf(random_model(name, **changes), tmp_path / "model.gguf", num_tokens=VOCAB)
    command = [PYTHON, HERE / "llama_cpp_tokens.py", path, json.dumps(PROMPT), str(COUNT)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = json.loads(run.stdout)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    for backend in ("native", "torch"):
        llm = LLM(str(path), dtype="float32", backend=backend, device="cpu", threads=2)
        assert llm.generate([PROMPT], params)[0].token_ids == theirs, backend
    assert len(set(theirs)) > 8, "a text this dull would hide an error"
