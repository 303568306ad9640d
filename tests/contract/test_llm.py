"""The library as an editor and a notebook show it."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.answers import AnswerFormat
from foredraft.config import EngineConfig
from foredraft.errors import InvalidPrompt
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.server.running_server import save_tiny_model
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), spec="ngram", threads=1, max_model_len=64)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its template writes `<tool>name</tool>` for every tool."""
    return LLM(str(save_tiny_model(tmp_path_factory.mktemp("chat"))), spec="off", threads=1)


def test_every_option_of_the_engine_is_a_typed_keyword_with_its_default() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    for option in fields(EngineConfig):
        parameter = parameters.pop(option.name)
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameter.default, parameter.annotation) == (option.default, option.type), option.name
    assert sorted(parameters) == ["model", "progress", "spec"]


def test_an_option_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gpu_memory"):
        LLM(str(tmp_path), gpu_memory=0.9)  # type: ignore[call-arg]


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    llm = LLM(str(folder), spec="off", max_num_seqs=3, max_num_batched_tokens=40, kv_cache_tokens=160, block_size=32)
    scheduler = llm.engine.scheduler
    assert (scheduler.max_num_seqs, llm.engine.kv.block_size, llm.engine.kv.num_blocks) == (3, 32, 5)


def test_what_was_loaded_is_shown(llm: LLM) -> None:
    assert repr(llm) == (
        f"LLM({llm.model!r}, spec='ngram', dtype='float32', device='cpu', backend={llm.backend_name!r}, "
        "max_model_len=64)"
    )


def test_an_output_is_shown_in_a_line(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, seed=4, n=2))
    shown = f"text={output.text!r}, finish_reason='length', seed={output.seed}, 3 tokens, "
    assert repr(output).startswith(f"<RequestOutput {shown}") and repr(output).endswith(" per run, 1 more outputs>")
    assert repr(output.outputs[0]).startswith(f"<CompletionOutput {shown}")
    failed = replace(output.outputs[0], text="word " * 1000, error="Too hot.")
    assert "word …', finish" in repr(failed) and repr(failed).endswith("error='Too hot.'>") and len(repr(failed)) < 200


class TestTools:
    MESSAGES = [{"role": "user", "content": "x"}]
    TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    def test_the_model_is_told_of_them(self, talker: LLM) -> None:
        params = SamplingParams(max_tokens=2, temperature=0)
        (output,) = talker.chat([self.MESSAGES], params, tools=[self.TOOL])
        assert talker.tokenizer.decode(output.prompt_token_ids).startswith("<tool>weather</tool>")
        *_, last = talker.stream(self.MESSAGES, params, tools=[self.TOOL])
        assert last.output is not None and last.output.token_ids == output.token_ids

    def test_calls_are_read_out_of_the_answer(self, talker: LLM) -> None:
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        params = SamplingParams(max_tokens=200, grammar={"choice": [call]})
        (output,) = talker.chat(self.MESSAGES, params, tools=[self.TOOL])
        (found,) = output.tool_calls
        assert (found.name, found.arguments) == ("weather", '{"city": "Oslo"}')
        assert output.tool_calls[0].id == found.id
        assert talker.chat(self.MESSAGES, SamplingParams(max_tokens=1))[0].tool_calls == []

    def test_thoughts_are_read_out_of_the_answer(self, talker: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(talker.tokenizer, "_answer_format", AnswerFormat(thinks=True))
        text = "<think>\nWhy?\n</think>\n\nIt is."
        params = SamplingParams(max_tokens=200, grammar={"choice": [text]})
        (output,) = talker.chat(self.MESSAGES, params)
        assert (output.reasoning, output.content, output.text) == ("Why?", "It is.", text)
        *_, last = talker.stream(self.MESSAGES, params)
        assert last.output is not None and last.output.reasoning == "Why?"

    @pytest.mark.parametrize("tools", ["weather", [{"name": "weather"}], [{"type": "function", "function": {}}]])
    def test_what_is_no_tool(self, talker: LLM, tools: list[dict[str, Any]]) -> None:
        with pytest.raises(InvalidPrompt, match="tools must be a list of functions like"):
            talker.chat(self.MESSAGES, tools=tools)

    def test_they_need_a_conversation(self, talker: LLM) -> None:
        with pytest.raises(InvalidPrompt, match="tools need a conversation"):
            talker.stream("x", tools=[self.TOOL])


def test_a_stream_tells_how_much_of_its_prompt_is_computed(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    llm = LLM(str(folder), spec="off", threads=1, max_num_seqs=4, max_num_batched_tokens=7, prefix_caching=False)
    told: list[tuple[int, int]] = []
    params = SamplingParams(max_tokens=3, temperature=0)
    events = llm.stream([1 + place for place in range(20)], params, progress=lambda *now: told.append(now))
    next(events)
    assert told == [(7, 20), (14, 20), (20, 20)]
    list(events)
    assert set(told[3:]) == {(20, 20)}

    told.clear()
    list(llm.stream_many([[1] * 10, [2] * 4], params, progress=lambda *now: told.append(now)))
    assert told[0] == (7, 14) and told[-1] == (14, 14)


def test_threads_may_share_it(llm: LLM) -> None:
    def text(seed: int) -> list[int]:
        return llm.generate([1 + seed], SamplingParams(max_tokens=30, seed=seed, temperature=1.0))[0].token_ids

    alone = [text(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, range(8))) == alone


def test_what_progress_raises_ends_the_request(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    llm = LLM(str(folder), spec="off", threads=1, max_num_seqs=4, max_num_batched_tokens=7)

    def stop(done: int, total: int) -> None:
        raise TimeoutError(f"{done} of {total}")

    with pytest.raises(TimeoutError, match="7 of 20"):
        list(llm.stream([1] * 20, progress=stop))
    assert not llm.engine.has_work
    assert llm.generate([1] * 20, SamplingParams(max_tokens=2))[0].finish_reason == "length"
