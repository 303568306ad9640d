"""Models that think: every API tells the thought apart from what is said, whole and streamed, and takes it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.answers import AnswerFormat
from tests.server.running_server import NAME, TEMPLATE, RunningServer, load_tiny_model, running, save_tiny_model

pytest.importorskip("llguidance", reason="a grammar writes the answers here")

# Thoughts of past turns are shown, those for gpt-oss with a plus; `enable_thinking` and `reasoning_effort` are told.
THINKING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.thinking %}+{% endif %}{% if message.reasoning_content %}"
    "{{ '</think>' and message.reasoning_content }};{% endif %}{{ message.content }}",
).replace("{% for tool", "{{ enable_thinking }}{{ reasoning_effort }}{% for tool", 1)
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TEXT = f"<think>\nWhy, yes.\n</think>\n\nIt is. {CALL}"
HARMONY = (
    "<|channel|>analysis<|message|>Why, yes.<|end|><|start|>assistant<|channel|>commentary<|message|>It is. <|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
)
WRITTEN = {"think": TEXT, "harmony": HARMONY}
THOUGHT, SAID = "Why, yes.", "It is. "


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("thinker"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": THINKING}))
    with running(load_tiny_model(Path(folder))) as started:
        yield started


@pytest.fixture(params=WRITTEN)
def written(request: pytest.FixtureRequest, thinker: RunningServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fields of a request whose answer is fixed."""
    if request.param == "harmony":
        told = AnswerFormat(is_harmony=True)
        monkeypatch.setattr(thinker.service.llm.tokenizer, "_answer_format", told)
    return {"model": NAME, "grammar": {"choice": [WRITTEN[request.param]]}}


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, data, _ = server.request("POST", path, {**body, "stream": True})
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chats(thinker: RunningServer, written: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai")
    grammar = {"grammar": written["grammar"]}
    wanted: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": [TOOL], "max_tokens": 500}
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(**wanted, extra_body=grammar).choices
        chunks = list(client.chat.completions.create(**wanted, extra_body=grammar, stream=True))
    assert (choice.message.reasoning_content, choice.message.content) == (THOUGHT, SAID)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert choice.finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == SAID
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function.name == "weather"


def test_chats_with_log_probabilities(thinker: RunningServer, written: dict[str, Any]) -> None:
    chunks = events(thinker, "/v1/chat/completions", {**written, "messages": HELLO, "tools": [TOOL], "logprobs": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID


def test_answers_without_a_thought_have_no_field_for_it(thinker: RunningServer) -> None:
    body = {"model": NAME, "messages": HELLO, "grammar": {"choice": ["It is."]}}
    (choice,) = thinker.post("/v1/chat/completions", body)[1]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is.", "refusal": None}


def test_responses(thinker: RunningServer, written: dict[str, Any]) -> None:
    openai = pytest.importorskip("openai")
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    wanted: dict[str, Any] = {"model": NAME, "input": "hello", "tools": [tool]}
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**wanted, extra_body={"grammar": written["grammar"]})
        with client.responses.stream(**wanted, extra_body={"grammar": written["grammar"]}) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thought, _, call = answer.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", THOUGHT, [])
        assert (answer.output_text, call.name) == (SAID, "weather")
        assert len({item.id for item in answer.output}) == 3
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    # The items are sent back as they came, with what the user says next.
    again = [item.model_dump(exclude_none=True) for item in whole.output]
    assert "assistant: Why, yes.;It is. " in prompt_of(thinker, "/v1/responses", {"input": [*again, *HELLO]})


def test_messages(thinker: RunningServer, written: dict[str, Any]) -> None:
    anthropic = pytest.importorskip("anthropic")
    wanted: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 500}
    wanted["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]
    wanted["extra_body"] = {"grammar": written["grammar"]}
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**wanted)
        with client.messages.stream(**wanted) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        thought, said, call = answer.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", THOUGHT, SAID)
        assert call.input == {"city": "Oslo"} and answer.stop_reason == "tool_use"
    assert "thinking" in kinds
    again = {"role": "assistant", "content": [block.model_dump() for block in whole.content[:2]]}
    body = {"messages": [*HELLO, again, *HELLO], "max_tokens": 1}
    assert "assistant: +Why, yes.;It is. " in prompt_of(thinker, "/v1/messages", body)


def test_nothing_but_a_thought(thinker: RunningServer) -> None:
    """An answer that is cut while the model thinks has an empty text, in every shape."""
    body = {"model": NAME, "messages": HELLO, "grammar": {"choice": ["<think>Why"]}, "max_tokens": 500}
    (choice,) = thinker.post("/v1/chat/completions", body)[1]["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Why", "")
    assert [block["type"] for block in thinker.post("/v1/messages", body)[1]["content"]] == ["thinking", "text"]
    begun = [each["content_block"]["type"] for each in events(thinker, "/v1/messages", body) if "content_block" in each]
    assert begun == ["thinking", "text"]
    asked = {"model": NAME, "input": "hello", "grammar": body["grammar"]}
    last = events(thinker, "/v1/responses", asked)[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize("think", [None, True, False])
def test_ollama(thinker: RunningServer, written: dict[str, Any], think: bool | None) -> None:
    chat = {**written, "messages": HELLO, "tools": [TOOL], "think": think, "options": {"num_predict": 500}}
    whole = thinker.post("/api/chat", {**chat, "stream": False})[1]["message"]
    parts = [part["message"] for part in events(thinker, "/api/chat", chat)]
    wanted = None if think is False else THOUGHT
    assert whole.get("thinking") == ("".join(part.get("thinking", "") for part in parts) or None) == wanted
    assert whole["content"] == "".join(part["content"] for part in parts) == SAID
    asked = {**written, "prompt": "hello", "think": think, "options": {"num_predict": 500}, "stream": False}
    answer = thinker.post("/api/generate", asked)[1]
    assert answer.get("thinking") == wanted and answer["response"].startswith(SAID)
    raw = thinker.post("/api/generate", {**asked, "raw": True})[1]
    assert raw["response"] == written["grammar"]["choice"][0] and "thinking" not in raw


def prompt_of(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    """The prompt that a request makes, read off the request that the engine gets."""
    engine, prompts = server.service.llm.engine, list[list[int]]()
    add = engine.add

    def recorded(request_id: str, prompt: list[int], *others: Any, **named: Any) -> Any:
        prompts.append(prompt)
        return add(request_id, prompt, *others, **named)

    engine.add = recorded  # type: ignore[method-assign]
    try:
        status, answer = server.post(path, {"model": NAME, **body})
    finally:
        del engine.add
    assert status == 200, answer
    return server.service.llm.tokenizer.decode(prompts[0])


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "low"),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 1}, "False"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1}, "True"),
        ("/api/chat", {"think": False, "stream": False}, "False"),
        ("/api/chat", {"think": "high", "stream": False}, "Truehigh"),
    ],
)
def test_whether_and_how_long_to_think(thinker: RunningServer, path: str, fields: dict[str, Any], told: str) -> None:
    assert prompt_of(thinker, path, {"messages": HELLO, **fields}).startswith(told)


def test_effort_of_responses(thinker: RunningServer) -> None:
    assert prompt_of(thinker, "/v1/responses", {"input": "x", "reasoning": {"effort": "low"}}).startswith("low")


def test_thoughts_of_chats_go_back(thinker: RunningServer) -> None:
    past = {"role": "assistant", "content": "It is.", "reasoning_content": "Why, yes."}
    body = {"messages": [*HELLO, past, *HELLO], "max_tokens": 1}
    assert "assistant: +Why, yes.;It is." in prompt_of(thinker, "/v1/chat/completions", body)
    mine = {"role": "assistant", "content": "It is.", "thinking": "Why, yes."}
    body = {"messages": [*HELLO, mine, *HELLO], "stream": False, "options": {"num_predict": 1}}
    assert "assistant: +Why, yes.;It is." in prompt_of(thinker, "/api/chat", body)


def test_a_thought_that_the_prompt_has_begun(thinker: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grammar the answer is all thought, since this model does not end it."""
    tokenizer = thinker.service.llm.tokenizer
    begun = replace(AnswerFormat(thinks=True), begun="<think>")
    monkeypatch.setattr(tokenizer, "answer_format", lambda prompt, has_grammar: begun)
    body = {"model": NAME, "messages": HELLO, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    (choice,) = thinker.post("/v1/chat/completions", body)[1]["choices"]
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"]
