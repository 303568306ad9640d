"""What `vllm bench serve` asks a server, in its order: the model, how a prompt is tokenised, streams with their usage,
and the counters of speculation before and after."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
LENGTH = 64
PROMPT = "one two three one two three one two three"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
COMPLETION = {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": LENGTH, "logprobs": None, **STREAMED}
CHAT = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    "max_completion_tokens": LENGTH,
    **STREAMED,
}


def counters(server: RunningServer) -> dict[str, float]:
    """A line is a name with labels, one space and a number; names end in _total."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in server.request("GET", "/metrics")[1].decode().splitlines():
        name, _, value = line.partition(" ")
        bare = name.partition("{")[0]
        if bare.startswith("vllm:spec_decode_") and bare.endswith("_total"):
            found[bare.removeprefix("vllm:spec_decode_").removesuffix("_total")] += float(value)
    return found


def test_the_model_and_its_tokenizer(server: RunningServer) -> None:
    (model,) = server.get("/v1/models")[1]["data"]
    assert model["id"] == NAME and model["root"]
    body = {"model": NAME, "prompt": PROMPT, "add_special_tokens": False}
    tokens = server.post("/tokenize", body)[1]["tokens"]
    assert server.post("/detokenize", {"model": NAME, "tokens": tokens})[1]["prompt"] == PROMPT


@pytest.mark.parametrize("path, body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_stream_with_its_usage(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    before = counters(server)
    status, data, headers = server.request("POST", path, {"model": NAME, **body}, {"x-request-id": "bench-0"})
    assert status == 200 and "x-foredraft-ignored" not in headers, data
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(event.startswith("data: ") for event in events)
    timed = [chunk for chunk in chunks if chunk["choices"]]
    (usage,) = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    assert usage["completion_tokens"] == LENGTH and usage["prompt_tokens"] > 0
    choices = [chunk["choices"][0] for chunk in timed]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert sum(bool(text) for text in texts) > 1, "a time between tokens needs two of them"
    server.until_idle()
    gained = {name: value - before[name] for name, value in counters(server).items()}
    assert 0 < gained["num_drafts"] <= gained["num_draft_tokens"]
    assert gained["num_accepted_tokens"] <= gained["num_draft_tokens"]
    assert gained["num_accepted_tokens_per_pos"] == gained["num_accepted_tokens"]
