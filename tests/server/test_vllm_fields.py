"""Request fields that clients of vLLM send, with the meaning that they have there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "hello", "max_tokens": 60, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 60, **fields}


class TestGrammars:
    @pytest.fixture(autouse=True)
    def _needs_llguidance(self) -> None:
        pytest.importorskip("llguidance")

    @pytest.mark.parametrize(
        "fields",
        [
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        ],
    )
    def test_schemas(self, server: RunningServer, fields: dict[str, Any]) -> None:
        for path, request in ((COMPLETE, complete(**fields)), (CHAT, chat(**fields))):
            status, body = server.post(path, request)
            assert status == 200, body
            choice = body["choices"][0]
            text = choice["text"] if path == COMPLETE else choice["message"]["content"]
            assert json.loads(text) in ({"yes": True}, {"yes": False})

    @pytest.mark.parametrize("wrap", [lambda kind: f"guided_{kind}", lambda kind: None])
    def test_regular_expressions_and_choices(self, server: RunningServer, wrap: Any) -> None:
        for kind, value in (("regex", "(red|blue){2}"), ("choice", ["redred", "blueblue"])):
            fields = {wrap(kind): value} if wrap(kind) else {"structured_outputs": {kind: value}}
            status, body = server.post(COMPLETE, complete(**fields))
            assert status == 200, body
            text = body["choices"][0]["text"]
            assert text in {"redred", "redblue", "bluered", "blueblue"}
            assert kind == "regex" or text in {"redred", "blueblue"}

    @pytest.mark.parametrize("text", ['root ::= "red" root | "blue"', 'start: "red" start | "blue"'])
    def test_grammars(self, server: RunningServer, text: str) -> None:
        for fields in ({"grammar": text}, {"guided_grammar": text}, {"structured_outputs": {"grammar": text}}):
            status, body = server.post(COMPLETE, complete(**fields))
            assert status == 200, body
            assert re.fullmatch("(red)*(blue)?|(red)*(r|re|b|bl|blu)", body["choices"][0]["text"])
        status, body = server.post(COMPLETE, complete(grammar="root ::= missing"))
        assert status == 400
        assert body["error"]["message"] == "grammar cannot be used: the rule 'missing' is not defined."

    def test_any_object(self, server: RunningServer) -> None:
        status, body = server.post(COMPLETE, complete(structured_outputs={"json_object": True}))
        assert status == 200 and body["choices"][0]["text"].startswith("{"), body

    @pytest.mark.parametrize(
        "fields",
        [
            {"guided_regex": "a", "guided_choice": ["a"]},
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            {"grammar": {"regex": "a"}, "guided_json": SCHEMA},
        ],
    )
    def test_two_are_too_many(self, server: RunningServer, fields: dict[str, Any]) -> None:
        status, body = server.post(COMPLETE, complete(**fields))
        assert status == 400 and body["error"]["message"].startswith("Only one field can shape an answer"), body

    @pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 5000])
    def test_a_text_that_is_no_schema(self, server: RunningServer, text: str) -> None:
        status, body = server.post(COMPLETE, complete(guided_json=text))
        assert (status, body["error"]["param"]) == (400, "guided_json")


def test_min_tokens(server: RunningServer) -> None:
    (end, *_) = sorted(server.service.llm.engine.eos_token_ids)
    for path, request in ((COMPLETE, complete), (CHAT, chat)):
        status, body = server.post(path, request(min_tokens=7, logit_bias={str(end): 100}))
        assert status == 200, body
        assert body["usage"]["completion_tokens"] == 8 and body["choices"][0]["finish_reason"] == "stop"
    status, body = server.post(COMPLETE, complete(min_tokens=61))
    assert (status, body["error"]["param"]) == (400, "min_tokens")


class TestPromptLogprobs:
    def test_of_a_completion(self, server: RunningServer) -> None:
        tokens = server.post("/tokenize", {"prompt": "hello"})[1]["tokens"]
        status, body = server.post(COMPLETE, complete(prompt_logprobs=2, n=2))
        assert status == 200, body
        assert body["choices"][0]["prompt_logprobs"] == body["choices"][1]["prompt_logprobs"]
        first, *entries = body["choices"][0]["prompt_logprobs"]
        assert first is None and len(entries) == len(tokens) - 1
        for token, entry in zip(tokens[1:], entries, strict=True):
            own = entry[str(token)]
            assert len(entry) in (2, 3)
            better = [each for each in entry.values() if each["logprob"] > own["logprob"]]
            assert own["rank"] == 1 + len(better) or (own["rank"] > 2 and len(better) == 2)
            assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
            assert own["decoded_token"] == server.post("/detokenize", {"tokens": [token]})[1]["prompt"]

    def test_of_a_chat(self, server: RunningServer) -> None:
        status, body = server.post(CHAT, chat(prompt_logprobs=0, max_tokens=2))
        assert status == 200, body
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        assert body["prompt_logprobs"][0] is None and all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])
        assert "prompt_logprobs" not in server.post(CHAT, chat(max_tokens=2))[1]

    @pytest.mark.parametrize("fields", [{"prompt_logprobs": -1}, {"prompt_logprobs": 2, "stream": True}])
    def test_what_is_refused(self, server: RunningServer, fields: dict[str, Any]) -> None:
        status, body = server.post(COMPLETE, complete(**fields))
        assert (status, body["error"]["param"]) == (400, "prompt_logprobs")


class TestTemplates:
    """The template writes `<s>role: content` and a newline for every message."""

    def prompt(self, server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> str:
        status, body = server.post("/tokenize", {"messages": messages, **fields})
        assert status == 200, body
        return server.post("/detokenize", {"tokens": body["tokens"]})[1]["prompt"]

    def test_variables(self, server: RunningServer) -> None:
        given = {"chat_template_kwargs": {"mood": "calm <s>", "messages": [], "tools": 3}}
        plain = self.prompt(server, HELLO)
        assert self.prompt(server, HELLO, **given) == f"<s>mood: calm <s>\n{plain}"
        tokens = server.post("/tokenize", {"messages": HELLO, **given})[1]["tokens"]
        assert tokens.count(tokens[0]) == 3, "a control token in a variable is text"
        begun = server.post(CHAT, chat(max_tokens=1, **given))[1]
        assert begun["usage"]["prompt_tokens"] == len(tokens)

    def test_a_message_of_the_assistant_is_continued(self, server: RunningServer) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "once  "}]
        continued = "<s>user: hello\n<s>assistant: once  "
        assert self.prompt(server, messages) == continued
        assert self.prompt(server, messages, continue_final_message=True) == continued
        begun = f"{continued}\n<s>assistant: "
        assert self.prompt(server, messages, continue_final_message=False) == begun
        assert self.prompt(server, messages, add_generation_prompt=True) == begun
        assert self.prompt(server, HELLO, continue_final_message=True) == "<s>user: hello"
        assert self.prompt(server, HELLO, add_generation_prompt=False) == "<s>user: hello\n"

    @pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
    def test_every_api_continues(self, server: RunningServer, path: str) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "once"}]
        fields = {"model": NAME, "temperature": 0, "ignore_eos": True}
        prompt = server.post("/tokenize", {"messages": messages})[1]["tokens"]
        expected = server.post(COMPLETE, {**fields, "prompt": prompt, "max_tokens": 9})[1]["choices"][0]["text"]
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        conversation = {"input" if path == "/v1/responses" else "messages": messages}
        status, body = server.post(path, {**fields, **conversation, length: 9})
        assert status == 200, body
        answers = {
            CHAT: lambda: body["choices"][0]["message"]["content"],
            "/v1/messages": lambda: body["content"][0]["text"],
            "/v1/responses": lambda: body["output"][0]["content"][0]["text"],
        }
        assert answers[path]() == expected

    def test_both_cannot_be(self, server: RunningServer) -> None:
        status, body = server.post(CHAT, chat(continue_final_message=True, add_generation_prompt=True))
        assert (status, body["error"]["param"]) == (400, "continue_final_message")
