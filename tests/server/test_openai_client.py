"""The official `openai` client, sync and async: every kind of call that people make, and errors of the right type."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.server.running_server import NAME, RunningServer

openai = pytest.importorskip("openai", reason="the client is tested where it is installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HELLO: list[Any] = [{"role": "user", "content": "hello there, hello there"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}
KEEP_ON: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(offline: LLM) -> str:
    """The offline answer to HELLO."""
    return offline.chat(HELLO, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text


class TestChat:
    def test_answer(self, client: Any, expected: str) -> None:
        answer = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body=KEEP_ON)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.model == NAME and answer.object == "chat.completion"
        assert answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12

    @pytest.mark.parametrize("spec", ["off", "ngram", "suffix", "ngram:k=3", "auto(ngram+suffix)", "ngram+suffix"])
    def test_every_spec_gives_the_same_text(self, client: Any, expected: str, spec: str) -> None:
        answer = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body={**KEEP_ON, "spec": spec})
        assert answer.choices[0].message.content == expected
        figures = answer.metrics["speculative_decoding"]
        assert figures["emitted_tokens"] == 12
        assert figures["target_runs"] + figures["accepted_tokens"] == 12
        assert spec != "off" or figures["drafts"] == 0

    def test_stream(self, client: Any, expected: str) -> None:
        chunks = list(client.chat.completions.create(messages=HELLO, **GREEDY, stream=True, extra_body=KEEP_ON))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
        assert chunks[-1].metrics["speculative_decoding"]["emitted_tokens"] == 12
        assert all(chunk.usage is None for chunk in chunks)

    def test_stream_with_usage(self, client: Any) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(messages=HELLO, **GREEDY, **options, extra_body=KEEP_ON)
        assert last.choices == [] and last.usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks)

    def test_stream_of_several_choices(self, client: Any, server: RunningServer) -> None:
        sampled = {"model": NAME, "messages": HELLO, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 8}
        whole = client.chat.completions.create(**sampled)
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**sampled, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert len(set(texts)) == 3

    def test_logprobs(self, client: Any, offline: LLM) -> None:
        answer = client.chat.completions.create(
            messages=HELLO, **GREEDY, logprobs=True, top_logprobs=2, extra_body=KEEP_ON
        )
        content = answer.choices[0].logprobs.content
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
        reference = offline.chat(HELLO, params)[0].logprobs
        assert reference is not None
        assert [entry.logprob for entry in content] == [entry.logprob for entry in reference]
        assert all(len(entry.top_logprobs) == 2 for entry in content)
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)

    def test_streamed_logprobs_are_those_of_the_whole(self, client: Any) -> None:
        wanted = {"messages": HELLO, **GREEDY, "logprobs": True, "top_logprobs": 1, "extra_body": KEEP_ON}
        whole = client.chat.completions.create(**wanted)
        streamed = [
            entry
            for chunk in client.chat.completions.create(**wanted, stream=True)
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]
        assert streamed == whole.choices[0].logprobs.content

    def test_stop(self, client: Any, expected: str) -> None:
        stop = expected[3]
        answer = client.chat.completions.create(messages=HELLO, **GREEDY, stop=[stop], extra_body=KEEP_ON)
        assert answer.choices[0].message.content == expected.partition(stop)[0]
        assert answer.choices[0].finish_reason == "stop"

    def test_seed(self, client: Any, offline: LLM) -> None:
        sampled = {"model": NAME, "temperature": 1, "max_tokens": 12}
        one, two = (client.chat.completions.create(messages=HELLO, seed=7, **sampled) for _ in range(2))
        assert one.choices[0].message.content == two.choices[0].message.content
        params = SamplingParams(max_tokens=12, temperature=1, seed=7)
        assert one.choices[0].message.content == offline.chat(HELLO, params)[0].text
        drawn = client.chat.completions.create(messages=HELLO, **sampled).choices[0]
        again = client.chat.completions.create(messages=HELLO, seed=drawn.seed, **sampled).choices[0]
        assert again.message.content == drawn.message.content

    def test_penalties_and_bias(self, client: Any, offline: LLM) -> None:
        fields = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"7": 5.0}}
        answer = client.chat.completions.create(messages=HELLO, **GREEDY, **fields, extra_body=KEEP_ON)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, **fields)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == offline.chat(HELLO, params)[0].text

    def test_own_sampling_fields(self, client: Any, offline: LLM) -> None:
        own = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "acceptance": "rejection", "cache_salt": "x"}
        answer = client.chat.completions.create(
            model=NAME, messages=HELLO, temperature=1, top_p=0.9, seed=3, max_completion_tokens=9, extra_body=own
        )
        params = SamplingParams(max_tokens=9, temperature=1, top_p=0.9, seed=3, **own)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == offline.chat(HELLO, params)[0].text

    def test_conversation_in_parts(self, client: Any) -> None:
        whole = [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}, *HELLO]
        parts: list[Any] = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in whole]
        parts[0]["role"] = "developer"
        one, two = (client.chat.completions.create(messages=each, **GREEDY) for each in (whole, parts))
        assert one.choices[0].message.content == two.choices[0].message.content

    def test_prefix_cache_is_told(self, client: Any) -> None:
        long = [{"role": "user", "content": "a prompt that is long enough for several blocks of the cache " * 3}]
        for _ in range(2):
            again = client.chat.completions.create(messages=long, **GREEDY, extra_body={"cache_salt": "told"})
        assert again.usage.prompt_tokens_details.cached_tokens > 100


class TestTools:
    def test_tools_are_rendered_by_the_template(self, client: Any) -> None:
        without = client.chat.completions.create(messages=HELLO, **GREEDY)
        answer = client.chat.completions.create(messages=HELLO, tools=[WEATHER], **GREEDY)
        assert answer.usage.prompt_tokens == without.usage.prompt_tokens + len("<tool>weather</tool>")
        none = client.chat.completions.create(messages=HELLO, tools=[WEATHER], tool_choice="none", **GREEDY)
        assert none.usage.prompt_tokens == without.usage.prompt_tokens

    def test_results_of_calls_are_taken(self, client: Any) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
        assert client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY).choices

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_is_forced(self, client: Any, choice: Any, stream: bool) -> None:
        wanted = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice, **GREEDY, "max_tokens": 200}
        if stream:
            chunks = list(client.chat.completions.create(**wanted, stream=True))
            (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        else:
            (call,) = client.chat.completions.create(**wanted).choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


class TestFormats:
    def test_json_schema(self, client: Any) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        answer = client.chat.completions.create(messages=HELLO, **{**GREEDY, "max_tokens": 200}, response_format=wanted)
        assert isinstance(json.loads(answer.choices[0].message.content)["yes"], bool)

    def test_responses_with_a_schema(self, client: Any) -> None:
        text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
        answer = client.responses.create(model=NAME, input="hello", text=text, max_output_tokens=200, temperature=0)
        assert isinstance(json.loads(answer.output_text)["yes"], bool)


class TestCompletions:
    def test_answer(self, client: Any, offline: LLM) -> None:
        answer = client.completions.create(prompt="Once upon", **GREEDY, extra_body=KEEP_ON)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        assert answer.choices[0].text == offline.generate(["Once upon"], params)[0].text

    def test_several_prompts_and_answers(self, client: Any, offline: LLM) -> None:
        answer = client.completions.create(model=NAME, prompt=["one", "two"], n=2, temperature=1, seed=4, max_tokens=6)
        params = SamplingParams(max_tokens=6, temperature=1, seed=4, n=2)
        texts = [output.text for each in offline.generate(["one", "two"], params) for output in each.outputs]
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]

    def test_token_ids(self, client: Any, offline: LLM) -> None:
        ids = offline.encode("Once upon")
        one, two = (client.completions.create(prompt=prompt, **GREEDY) for prompt in (ids, "Once upon"))
        assert one.choices[0].text == two.choices[0].text

    def test_logprobs(self, client: Any) -> None:
        answer = client.completions.create(prompt="Once", **GREEDY, logprobs=3, extra_body=KEEP_ON)
        logprobs = answer.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
        assert logprobs.text_offset[0] == 0

    def test_stream(self, client: Any) -> None:
        whole = client.completions.create(prompt=["one", "two"], **GREEDY)
        texts = ["", ""]
        *chunks, last = client.completions.create(
            prompt=["one", "two"], **GREEDY, stream=True, stream_options={"include_usage": True}
        )
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]
        assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})


class TestResponses:
    def test_answer(self, client: Any, expected: str) -> None:
        answer = client.responses.create(
            model=NAME, input=HELLO, temperature=0, max_output_tokens=12, extra_body=KEEP_ON
        )
        assert answer.output_text == expected
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage.output_tokens == 12

    def test_stream(self, client: Any, expected: str) -> None:
        events = list(
            client.responses.create(
                model=NAME,
                instructions=None,
                input=HELLO[0]["content"],
                temperature=0,
                max_output_tokens=12,
                stream=True,
                extra_body=KEEP_ON,
            )
        )
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.incomplete"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == expected == events[-1].response.output_text

    def test_instructions_are_a_system_prompt(self, client: Any) -> None:
        one = client.responses.create(model=NAME, instructions="Sing.", input="x", max_output_tokens=5, temperature=0)
        messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "x"}]
        two = client.chat.completions.create(messages=messages, **{**GREEDY, "max_tokens": 5})
        assert one.output_text == two.choices[0].message.content


class TestModels:
    def test_list_and_retrieve(self, client: Any) -> None:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "foredraft"


class TestErrors:
    def test_bad_request(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=NAME, messages=HELLO, temperature=-1)
        assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"

    def test_too_long(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="x" * 4000)
        assert caught.value.code == "context_length_exceeded"

    def test_a_bad_request_to_stream_is_no_stream(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, prompt="x" * 4000, stream=True)

    def test_unknown_model(self, client: Any) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=HELLO)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")


def test_async_client(server: RunningServer, expected: str) -> None:
    """Ten calls at once, half of them streams: all the same text."""

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(messages=HELLO, **GREEDY, extra_body=KEEP_ON)
                return str(answer.choices[0].message.content)

            async def streamed() -> str:
                stream = await client.chat.completions.create(messages=HELLO, **GREEDY, stream=True, extra_body=KEEP_ON)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model=NAME, messages=[])
            response = await client.responses.create(model=NAME, input="x", max_output_tokens=3, temperature=0)
            assert response.usage.output_tokens == 3
            return list(await asyncio.gather(*(call() for call in [whole, streamed] * 5)))

    assert asyncio.run(main()) == [expected] * 10
