"""Ollama's API as its clients use it: lines of JSON that end with figures."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.server.running_server import NAME, RunningServer

HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = {"num_predict": 12, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def lines(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    status, data, headers = server.request("POST", path, {"model": NAME, "options": OPTIONS, **body})
    assert status == 200 and headers["content-type"] == "application/x-ndjson", data
    return [json.loads(line) for line in data.splitlines()]


def test_a_chat_streams_unless_it_shall_not(server: RunningServer, offline: LLM) -> None:
    expected = offline.chat(HELLO, SamplingParams(max_tokens=12, temperature=0))[0]
    *parts, last = lines(server, "/api/chat", messages=HELLO, model=f"{NAME}:latest")
    assert "".join(part["message"]["content"] for part in parts) == expected.text and len(parts) > 1
    assert all(part["done"] is False and part["message"]["role"] == "assistant" for part in parts)
    assert last["done"] is True and last["done_reason"] == ("length" if expected.finish_reason == "length" else "stop")
    assert last["eval_count"] == len(expected.token_ids)
    assert last["prompt_eval_count"] == len(expected.prompt_token_ids)
    assert last["total_duration"] >= last["eval_duration"] >= 0
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None

    status, whole = server.post("/api/chat", {"model": NAME, "messages": HELLO, "options": OPTIONS, "stream": False})
    assert status == 200 and whole["message"] == {"role": "assistant", "content": expected.text} and whole["done"]


def test_generate_answers_a_prompt_or_continues_it(server: RunningServer, offline: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    conversation = [{"role": "system", "content": "Sing."}, *HELLO]
    *parts, last = lines(server, "/api/generate", prompt="hello", system="Sing.")
    assert "".join(part["response"] for part in parts) == offline.chat(conversation, params)[0].text
    assert last["response"] == "" and last["done"]
    *parts, _ = lines(server, "/api/generate", prompt="hello", raw=True)
    assert "".join(part["response"] for part in parts) == offline.generate("hello", params)[0].text


def test_options_are_sampling_parameters(server: RunningServer, offline: LLM) -> None:
    options = {"num_predict": 9, "temperature": 0.9, "top_k": 5, "seed": 7, "repeat_penalty": 1.3, "stop": ["\x00"]}
    *parts, last = lines(server, "/api/generate", prompt="hello", raw=True, options=options)
    given: Any = {"max_tokens": 9, "temperature": 0.9, "top_k": 5, "seed": 7, "repetition_penalty": 1.3, "stop": "\x00"}
    assert "".join(part["response"] for part in parts) == offline.generate("hello", SamplingParams(**given))[0].text
    assert last["seed"] == 7


def test_unknown_options_are_told(server: RunningServer) -> None:
    body = {"model": NAME, "prompt": "x", "options": {**OPTIONS, "num_ctx": 4096}, "mood": 1}
    _, _, headers = server.request("POST", "/api/generate", body)
    assert headers["x-foredraft-ignored"] == "mood, options.num_ctx"


class TestForms:
    @pytest.fixture(autouse=True)
    def grammars(self) -> None:
        pytest.importorskip("llguidance")

    def test_json(self, server: RunningServer) -> None:
        *parts, _ = lines(server, "/api/chat", messages=HELLO, format="json")
        assert "".join(part["message"]["content"] for part in parts).startswith("{")

    def test_a_schema(self, server: RunningServer) -> None:
        options = {**OPTIONS, "num_predict": 100}
        *parts, _ = lines(server, "/api/generate", prompt="x", format={"enum": ["red", "blue"]}, options=options)
        assert json.loads("".join(part["response"] for part in parts)) in ("red", "blue")

    def test_a_call(self, server: RunningServer) -> None:
        text = 'Well: <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        fields = {"messages": HELLO, "tools": [TOOL], "grammar": {"choice": [text]}, "options": {"num_predict": 200}}
        parts = lines(server, "/api/chat", **fields)
        assert "".join(part["message"]["content"] for part in parts) == "Well: "
        (call,) = [call for part in parts for call in part["message"].get("tool_calls", ())]
        assert call == {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}

    def test_what_came_of_a_call(self, server: RunningServer) -> None:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
        result = {"role": "tool", "tool_name": "f", "content": "rain"}
        last = lines(server, "/api/chat", messages=[*HELLO, call, result])[-1]
        written = "<s>user: hello\n<s>assistant: \n<s>tool: rain\n<s>assistant: "
        tokens = server.post("/tokenize", {"prompt": written, "add_special_tokens": False})[1]["tokens"]
        assert last["prompt_eval_count"] == len(tokens)


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")])
@pytest.mark.parametrize("stream", [False, True, None])
def test_what_asks_for_nothing_is_answered_at_once(
    server: RunningServer, keep_alive: Any, reason: str, stream: bool | None
) -> None:
    runs = server.metric("vllm:prompt_tokens_total")
    for path, fields, empty in (
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "system": "Sing."}, {"response": ""}),
    ):
        status, answer = server.post(path, {"model": NAME, "keep_alive": keep_alive, "stream": stream, **fields})
        assert status == 200 and answer == {
            **{"model": NAME, "created_at": answer["created_at"], "done": True, "done_reason": reason},
            **empty,
        }
    assert server.metric("vllm:prompt_tokens_total") == runs


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_compute_the_prompt(server: RunningServer, stream: bool) -> None:
    last = lines_or_one(server, "/api/generate", {"prompt": "hello", "options": {"num_predict": 0}, "stream": stream})
    assert [part["response"] for part in last] == [""]
    assert last[-1]["done"] and last[-1]["eval_count"] == 0 and last[-1]["prompt_eval_count"] > 5


@pytest.mark.parametrize("wanted", [-1, -2])
def test_tokens_without_a_limit(server: RunningServer, wanted: int) -> None:
    options = {**OPTIONS, "num_predict": wanted, "stop": list("aeiou <>")}
    answer = lines_or_one(server, "/api/generate", {"prompt": "hello", "options": options, "stream": False})[0]
    assert answer["done"]
    ended = {"prompt": [5] * 2040, "max_tokens": wanted, "ignore_eos": True}
    status, data, headers = server.request("POST", "/v1/completions", ended)
    assert status == 200 and json.loads(data)["usage"]["completion_tokens"] == 8  # the context has 2048
    assert "x-foredraft-note" not in headers


def lines_or_one(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, data, _ = server.request("POST", path, {"model": NAME, **body})
    assert status == 200, data
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/api/chat", {"messages": HELLO * 3000}, "messages has 3000 entries"),
        ("/api/chat", {"model": "other", "messages": HELLO}, "The model 'other' is not served here"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images in messages"),
        ("/api/generate", {"prompt": "x", "format": "xml"}, "format must be json or a JSON schema."),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported here"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported here; this model has no tokens"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": -1}}, "temperature=-1"),
        ("/api/nothing", {}, "There is nothing at this path"),
    ],
)
def test_errors_have_ollamas_shape(server: RunningServer, path: str, body: dict[str, Any], told: str) -> None:
    status, answer = server.post(path, body)
    assert status in (400, 404) and set(answer) == {"error"} and told in answer["error"], answer


@pytest.mark.parametrize("content_type", ["", "application/x-www-form-urlencoded"])
def test_json_that_is_not_said_to_be_json(server: RunningServer, content_type: str) -> None:
    """As `curl -d` and litellm send it; pages of others are refused all the same."""
    body = json.dumps({"model": NAME, "prompt": "x", "stream": False, "options": OPTIONS}).encode()
    headers = {"content-type": content_type}
    status, data, _ = server.request("POST", "/api/generate", body, headers)
    assert status == 200 and json.loads(data)["done"], data
    assert server.request("POST", "/api/generate", body, {**headers, "origin": "https://evil.example"})[0] == 403
    assert server.request("POST", "/v1/completions", body, headers)[0] == 400
