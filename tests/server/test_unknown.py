"""What a request has too much of: the client hears of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running_server import CANARY, NAME, RunningServer, load_tiny_model, running

COMPLETE = "/v1/completions"
IGNORED = "x-foredraft-ignored"


@pytest.fixture(scope="module")
def strict(tiny_folder: Path) -> Iterator[RunningServer]:
    with running(load_tiny_model(tiny_folder), is_strict=True) as started:
        yield started


class TestFields:
    @pytest.mark.parametrize("stream", [False, True])
    def test_unknown_ones_are_named(self, server: RunningServer, stream: bool) -> None:
        fields: dict[str, Any] = {"top_a": 0.2, "mirostat": 2, "best_beams": None, "a\r\nset-cookie: b": 1}
        status, _, headers = server.request("POST", COMPLETE, {**CANARY, "stream": stream, **fields})
        assert status == 200
        assert headers[IGNORED] == "?, mirostat, top_a"
        assert "set-cookie" not in headers

    def test_known_ones_are_not(self, server: RunningServer) -> None:
        assert IGNORED not in server.request("POST", COMPLETE, CANARY)[2]

    def test_many_are_not_all_named(self, server: RunningServer) -> None:
        headers = server.request("POST", COMPLETE, {**CANARY, **{f"x{i:04}": 1 for i in range(5000)}})[2]
        assert headers[IGNORED].endswith("x0019, ...")

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
    def test_on_every_route(self, server: RunningServer, strict: RunningServer, path: str) -> None:
        conversation = {"input" if path == "/v1/responses" else "messages": [{"role": "user", "content": "x"}]}
        length = {} if path == "/tokenize" else {"max_output_tokens" if "input" in conversation else "max_tokens": 2}
        body = {"model": NAME, **conversation, **length, "mirostat": 2}
        status, data, headers = server.request("POST", path, body)
        assert (status, headers[IGNORED]) == (200, "mirostat"), data
        status, told = strict.post(path, body)
        assert status == 400
        assert "fields that this server does not know: mirostat" in told["error"]["message"]

    def test_a_strict_server_answers_what_it_knows(self, strict: RunningServer) -> None:
        assert strict.canary()
        assert strict.post(COMPLETE, {**CANARY, "mirostat": None})[0] == 200
        status, body = strict.post(COMPLETE, {**CANARY, "mirostat": 2})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "mirostat", "unknown_parameter")


class TestNestedFields:
    TEXT = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    SCHEMA = {"type": "object", "properties": {"mood": {"x": 1}}}  # what a schema holds is no field
    FUNCTION = {"name": "f", "parameters": SCHEMA, "mood": 1, "strict": None}
    BODIES: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [TEXT]}, {"role": "user", "content": "x", "refusal": None}],
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "response_format": {"type": "text", "mood": 1},
                "tools": [{"type": "function", "function": FUNCTION, "cache_control": {}}],
                "chat_template_kwargs": {"mood": 1},
            },
            "messages.content.cache_control, response_format.mood, stream_options.continuous_usage_stats, "
            "tools.cache_control, tools.function.mood",
        ),
        (
            "/v1/messages",
            {
                "system": [TEXT],
                "messages": [{"role": "user", "content": [TEXT, {**TEXT, "citations": []}]}],
                "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": {}}],
            },
            "messages.content.cache_control, messages.content.citations, system.cache_control, tools.cache_control",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"verbosity": "low", "format": {"type": "text", "mood": 1}}},
            "text.format.mood, text.verbosity",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"choice": ["a"], "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "mood": 1}], "options": {"num_ctx": 9, "num_predict": 2}},
            "messages.mood, options.num_ctx",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": [TEXT]}]}, "messages.content.cache_control"),
    ]

    @pytest.mark.parametrize(("path", "body", "names"), BODIES, ids=[path for path, _, _ in BODIES])
    def test_they_are_named(
        self, server: RunningServer, strict: RunningServer, path: str, body: dict[str, Any], names: str
    ) -> None:
        if path == COMPLETE:
            pytest.importorskip("llguidance")
        length = {"/v1/responses": "max_output_tokens", "/tokenize": "", "/api/chat": ""}.get(path, "max_tokens")
        body = {**body, **({length: 2} if length else {})}
        status, data, headers = server.request("POST", path, body)
        assert (status, headers[IGNORED]) == (200, names), data
        status, told = strict.post(path, body)
        assert status == 400 and f"fields that this server does not know: {names};" in str(told["error"])

    def test_what_the_server_answers_it_knows(self, strict: RunningServer) -> None:
        body: dict[str, Any] = {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 2}
        output = strict.post("/v1/responses", body)[1]["output"]
        status, told = strict.post("/v1/responses", {**body, "input": [*body["input"], *output, *body["input"]]})
        assert status == 200, told
        body = {"messages": body["input"], "max_tokens": 2}
        message = strict.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
        status, told = strict.post("/v1/chat/completions", {**body, "messages": [message, *body["messages"]]})
        assert status == 200, told
        content = strict.post("/v1/messages", body)[1]["content"]
        messages = [*body["messages"], {"role": "assistant", "content": content}, *body["messages"]]
        status, told = strict.post("/v1/messages", {**body, "messages": messages})
        assert status == 200, told


class TestTokens:
    NOTE = "x-foredraft-note"

    @pytest.mark.parametrize("wanted", [2047, 2048, 4096, 5000, 2**31 - 1])
    def test_more_than_there_is_room_for_is_cut(self, server: RunningServer, wanted: int) -> None:
        prompt = [5] * 2040  # the context has 2048
        body = {"prompt": prompt, "max_tokens": wanted, "ignore_eos": True}
        status, data, headers = server.request("POST", COMPLETE, body)
        assert status == 200, data
        assert headers[self.NOTE] == f"max_tokens={wanted} is cut to 8"
        assert json.loads(data)["usage"]["completion_tokens"] == 8

    def test_what_fits_has_no_note(self, server: RunningServer) -> None:
        chat = {"messages": [{"role": "user", "content": "x"}], "stop_token_ids": list(range(200))}
        for path, body in ((COMPLETE, {"prompt": [5] * 2040, "max_tokens": 8}), ("/v1/chat/completions", chat)):
            status, data, headers = server.request("POST", path, body)
            assert status == 200 and self.NOTE not in headers, data

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
    def test_on_every_route_and_in_streams(self, server: RunningServer, path: str) -> None:
        conversation = {"input" if path == "/v1/responses" else "messages": [{"role": "user", "content": "x" * 1900}]}
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        for stream in (False, True):
            body = {**conversation, length: 9000, "stream": stream, "stop_token_ids": list(range(200))}
            status, data, headers = server.request("POST", path, body)
            assert status == 200 and headers[self.NOTE].startswith("max_tokens=9000 is cut to "), data


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    status, body = server.post("/v1/embeddings", {"input": "x"})
    assert status == 404
    assert "/v1/chat/completions" in body["error"]["message"] and "/v1/models" in body["error"]["message"]
    status, body = server.get("/v1/completions")
    assert (status, body["error"]["message"]) == (405, "This path does not take this method; it takes POST.")
    assert server.request("GET", "/v1/completions")[2]["allow"] == "POST"
    assert server.post("/v1/chat/completions/", {})[0] == 404


class TestTheTableOfFields:
    """What docs/serving.md says of fields is so."""

    MESSAGES = [{"role": "user", "content": "x"}]
    BODIES: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/responses": {"input": "x", "max_output_tokens": 2},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
        "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}},
        "/api/generate": {"prompt": "x", "options": {"num_predict": 2}},
        "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 2},
    }
    REFUSED = {"best_of": 3, "priority": 2, "images": ["aGk="], "context": [1], "background": True, "echo": True}
    COLUMNS = ("supported", "refused", "inert", "ignored")

    PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")

    def fields(self, path: str) -> dict[str, list[str]]:
        page = self.PAGE
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{path}` | `")]
        return {
            name: re.findall(r"`([^`]+)`", cell)
            for name, cell in zip(self.COLUMNS, row.strip("| ").split(" | ")[1:], strict=True)
        }

    def common(self) -> list[str]:
        """The fields of every route."""
        told = self.PAGE.partition("\nEvery route that generates takes ")[2].partition("These are all others:")[0]
        return re.findall(r"`(\w+)`", told)

    @pytest.mark.parametrize("path", BODIES)
    def test_it_has_the_fields_of_the_schema_and_no_others(self, server: RunningServer, path: str) -> None:
        schema = server.get("/openapi.json")[1]
        name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        known = schema["components"]["schemas"][name.rpartition("/")[2]]["properties"]
        wanted = self.fields(path)
        assert sorted(known) == sorted(self.common() + wanted["supported"] + wanted["refused"] + wanted["inert"])
        assert wanted["ignored"] and not set(wanted["ignored"]) & set(known)

    @pytest.mark.parametrize("path", BODIES)
    def test_refused_fields_are_refused(self, server: RunningServer, path: str) -> None:
        for name in (*self.fields(path)["refused"], "priority", "chat_template"):
            status, told = server.post(path, {**self.BODIES[path], name: self.REFUSED.get(name, "x")})
            assert status == 400 and name in str(told["error"]), (name, told)

    @pytest.mark.parametrize("path", [path for path in BODIES if path != "/infill"])  # which this model refuses
    def test_ignored_fields_are_named(self, server: RunningServer, path: str) -> None:
        names = self.fields(path)["ignored"]
        body = json.loads(json.dumps(self.BODIES[path]))
        for name in names:
            if name.startswith("options."):
                body["options"][name.removeprefix("options.")] = 1
            else:
                body[name] = {}
        status, data, headers = server.request("POST", path, body)
        assert status == 200, data
        assert headers[IGNORED].split(", ") == sorted(names)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"n": 10**6}, "n"),
    ],
)
def test_errors_name_the_field_that_was_sent(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    status, body = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert (status, body["error"]["param"]) == (400, param)
