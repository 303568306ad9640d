"""litellm talks to the server as to OpenAI, to vLLM, to Ollama and to Anthropic. It lives in an environment of its own,
.peers/litellm, which `make check-litellm` makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.server.running_server import NAME, load_tiny_model, running, save_tiny_model

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".peers" / "litellm" / "bin" / "python"


def test_conversations(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"needs litellm in {PYTHON.parents[1]}; `make check-litellm` makes it")
    folder = save_tiny_model(tmp_path)
    offline = LLM(str(folder), spec="off", threads=1)
    messages = [{"role": "user", "content": "hello there"}]
    expected = offline.chat(messages, SamplingParams(max_tokens=10, temperature=0))[0]
    with running(load_tiny_model(folder)) as server:
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch a price list
        command = [PYTHON, HERE / "litellm_talks.py", server.url, NAME]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    answer = {"whole": expected.text, "streamed": expected.text, "tokens": len(expected.token_ids)}
    assert {name: told[name] for name in ("openai", "hosted_vllm", "ollama_chat")} == dict.fromkeys(
        ("openai", "hosted_vllm", "ollama_chat"), answer
    )
    assert told["anthropic"]["whole"] == expected.text
    assert told["call"] == "now"
    assert "another" in told["refused"]
