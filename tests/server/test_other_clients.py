"""Clients beside OpenAI's own: Anthropic's, LangChain's, the `llm` command, and schemathesis on the schema."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.server.running_server import NAME, RunningServer

pytestmark = pytest.mark.filterwarnings("ignore")

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


def greedy(offline: LLM, messages: list[Any], max_tokens: int = 10) -> str:
    return offline.chat(messages, SamplingParams(max_tokens=max_tokens, temperature=0))[0].text


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the client is tested where it is installed")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


class TestAnthropic:
    def test_a_streaming_conversation(self, client: Any, offline: LLM) -> None:
        messages = list(HELLO)
        for turn in ("and then?", "why?"):
            expected = greedy(offline, messages)
            with client.messages.stream(
                model=NAME, max_tokens=10, messages=messages, extra_body={"temperature": 0}
            ) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert text == expected == final.content[0].text
            assert final.stop_reason in ("max_tokens", "end_turn")
            assert 0 < final.usage.output_tokens <= 10
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]

    def test_system_and_stop_sequences(self, client: Any, offline: LLM) -> None:
        expected = greedy(offline, [{"role": "system", "content": "Sing."}, *HELLO])
        stop = expected[4]
        answer = client.messages.create(
            model=NAME,
            max_tokens=10,
            system="Sing.",
            messages=HELLO,
            stop_sequences=[stop],
            extra_body={"temperature": 0},
        )
        assert answer.content[0].text == expected.partition(stop)[0]
        assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop

    def test_cached_tokens_are_counted_once(self, client: Any, offline: LLM) -> None:
        long = [{"role": "user", "content": "a prompt that fills several blocks of the cache " * 4}]
        salted = {"cache_salt": "counted"}  # without one, nothing is shared
        for _ in range(2):
            usage = client.messages.create(model=NAME, max_tokens=2, messages=long, extra_body=salted).usage
            assert usage.input_tokens + usage.cache_read_input_tokens == len(offline.encode(long))
        assert usage.cache_read_input_tokens > 0
        with client.messages.stream(model=NAME, max_tokens=2, messages=long) as stream:
            usage = stream.get_final_message().usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(offline.encode(long))

    def test_count_tokens(self, client: Any, offline: LLM) -> None:
        count = client.messages.count_tokens(model=NAME, messages=HELLO)
        assert count.input_tokens == len(offline.encode(HELLO))

    def test_errors(self, client: Any) -> None:
        anthropic = pytest.importorskip("anthropic")
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(model=NAME, max_tokens=0, messages=HELLO)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=5, messages=HELLO)


def test_langchain_holds_a_conversation(server: RunningServer, offline: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="the client is tested where it is installed")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=10, max_retries=0
    )
    messages: list[Any] = [("user", "hello there")]
    for turn in ("and then?", "why?"):
        plain = [{"role": role, "content": text} for role, text in messages]
        answer = model.invoke(messages)
        assert answer.content == greedy(offline, plain)
        assert "".join(str(chunk.content) for chunk in model.stream(messages)) == answer.content
        messages += [("assistant", answer.content), ("user", turn)]


@pytest.mark.clients
def test_the_llm_command_holds_a_conversation(server: RunningServer, offline: LLM, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="the client is tested where it is installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {NAME}\n  api_base: {server.url}/v1\n  api_key_name: none\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}

    def prompt(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "here", "--key", "none", "-o", "temperature", "0"]
        return subprocess.run(
            [*command, "-o", "max_tokens", "10", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.removesuffix("\n")

    first = prompt("hello there")
    assert first == greedy(offline, HELLO)
    turns = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert prompt("-c", "and then?") == greedy(offline, turns)


@pytest.mark.clients
def test_schemathesis_finds_no_server_error(server: RunningServer) -> None:
    """Requests made from the schema, right ones and wrong ones."""
    schemathesis = pytest.importorskip("schemathesis", reason="the client is tested where it is installed")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    quick = settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    seen: set[str] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        seen.add(operation.path)

        @quick
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            response = case.call(timeout=30)
            assert response.status_code < 500, response.text

        check()
    assert {"/v1/chat/completions", "/v1/messages", "/tokenize", "/metrics"} <= seen
    server.until_idle(30)
