"""Tools in /v1/messages and /v1/responses, with the clients of those who made these APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TEXT = f"Well: <tool_call>{CALL}</tool_call>"
SAYS = {"grammar": {"choice": [TEXT]}}  # has the model write this
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class TestAnthropic:
    TOOL: Any = {"name": "weather", "description": "It tells.", "input_schema": SCHEMA, "strict": True}

    @pytest.fixture(scope="module")
    def client(self, server: RunningServer) -> Any:
        anthropic = pytest.importorskip("anthropic", reason="the client is tested where it is installed")
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
            yield made

    def ask(self, client: Any, **fields: Any) -> Any:
        return client.messages.create(
            **{"model": NAME, "max_tokens": 200, "messages": HELLO, "tools": [self.TOOL], **fields}
        )

    def test_a_call_beside_a_text(self, client: Any) -> None:
        answer = self.ask(client, extra_body=SAYS)
        text, call = answer.content
        assert (text.type, text.text) == ("text", "Well: ")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"})
        assert answer.stop_reason == "tool_use"

    def test_in_a_stream(self, client: Any) -> None:
        with client.messages.stream(
            model=NAME, max_tokens=200, messages=HELLO, tools=[self.TOOL], extra_body=SAYS
        ) as stream:
            kinds = [event.type for event in stream if event.type.startswith("content_block_st")]
            final = stream.get_final_message()
        assert kinds == ["content_block_start", "content_block_stop"] * 2
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].input == {"city": "Oslo"} and final.stop_reason == "tool_use"

    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
    def test_a_call_can_be_required(self, client: Any, choice: Any) -> None:
        answer = self.ask(client, tool_choice=choice)
        (call,) = answer.content
        assert call.name == "weather" and call.input["city"] in ("Oslo", "Rome")
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(
            model=NAME, max_tokens=200, messages=HELLO, tools=[self.TOOL], tool_choice=choice
        ) as stream:
            (call,) = stream.get_final_message().content
        assert call.input["city"] in ("Oslo", "Rome")

    def test_the_model_is_told_of_tools_unless_it_shall_call_none(self, client: Any) -> None:
        count = {
            kind: client.messages.count_tokens(
                model=NAME, messages=HELLO, tools=[self.TOOL], tool_choice={"type": kind}
            ).input_tokens
            for kind in ("auto", "none")
        }
        assert count["auto"] - count["none"] == len("<tool>weather</tool>")
        assert self.ask(client, tool_choice={"type": "none"}, extra_body=SAYS).content[0].text == TEXT

    def test_results_go_back(self, client: Any, server: RunningServer) -> None:
        use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
        messages = [
            *HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        count = client.messages.count_tokens(model=NAME, messages=messages).input_tokens
        written = "<s>user: hello\n<s>assistant: Let me see.\n<s>tool: rain\n<s>user: And?\n<s>assistant: "
        tokens = server.post("/tokenize", {"prompt": written, "add_special_tokens": False})[1]["tokens"]
        assert count == len(tokens)

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tool type 'web_search_20250305'"),
            ({"tool_choice": {"type": "tool", "name": "f"}}, "names 'f', which is not among the tools"),
            ({"tool_choice": {"type": "tool"}}, "needs a name"),
            ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]}, "has no name"),
        ],
    )
    def test_what_is_refused(self, client: Any, fields: dict[str, Any], told: str) -> None:
        anthropic = pytest.importorskip("anthropic")
        with pytest.raises(anthropic.BadRequestError, match=told):
            self.ask(client, **fields)


class TestResponses:
    TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}

    @pytest.fixture(scope="module")
    def client(self, server: RunningServer) -> Any:
        openai = pytest.importorskip("openai", reason="the client is tested where it is installed")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made

    def ask(self, client: Any, **fields: Any) -> Any:
        return client.responses.create(
            **{"model": NAME, "input": "hello", "max_output_tokens": 200, "tools": [self.TOOL], **fields}
        )

    def test_a_call_beside_a_text(self, client: Any) -> None:
        answer = self.ask(client, extra_body=SAYS)
        message, call = answer.output
        assert message.content[0].text == "Well: " and answer.status == "completed"
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})

    def test_in_a_stream(self, client: Any) -> None:
        with client.responses.stream(
            model=NAME, input="hello", max_output_tokens=200, tools=[self.TOOL], extra_body=SAYS
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
        assert kinds.count("response.function_call_arguments.done") == 1 and kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["message", "function_call"]

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
    def test_a_call_can_be_required(self, client: Any, choice: Any) -> None:
        (call,) = self.ask(client, tool_choice=choice).output
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")

    def test_functions_are_strict_unless_they_say_otherwise(self, client: Any) -> None:
        optional = {"type": "object", "properties": {"city": {"const": "Oslo"}}}
        tool = {**self.TOOL, "parameters": optional}
        for _ in range(3):
            (call,) = self.ask(client, tools=[tool], tool_choice="required", temperature=1.5).output
            assert json.loads(call.arguments).keys() <= {"city"}

    def test_results_go_back(self, client: Any, server: RunningServer) -> None:
        call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
        items = [*HELLO, call, {"type": "function_call_output", "call_id": "call_1", "output": "rain"}]
        used = self.ask(client, input=items, tools=[], max_output_tokens=1).usage.input_tokens
        written = "<s>user: hello\n<s>assistant: \n<s>tool: rain\n<s>assistant: "
        tokens = server.post("/tokenize", {"prompt": written, "add_special_tokens": False})[1]["tokens"]
        assert used == len(tokens)

    def test_other_tools_are_refused(self, client: Any) -> None:
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.BadRequestError, match="web_search"):
            self.ask(client, tools=[{"type": "web_search", "name": "x"}])
