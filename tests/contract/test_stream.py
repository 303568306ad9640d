"""What one caller does with its stream, and what is left of the request afterwards: nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import InvalidParameter, InvalidPrompt, InvalidSpec
from foredraft.llm import LLM
from foredraft.proposers.registry import parse_spec
from tests.contract.async_engines import (
    LONG,
    SlowBuilds,
    are_in_the_background,
    has_requests,
    in_a_step,
    is_clean,
    last,
    no_other_task,
    read,
    until,
)
from tests.contract.test_engine import GREEDY, PROMPT, is_idle, with_fields
from tests.tiny_models import random_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, kv_cache_tokens=1024, spec="off")


def test_prompts_are_what_encode_takes(llm: LLM) -> None:
    expected = llm.generate(["hello"], GREEDY)[0]
    threads: set[str] = set()

    def encode(prompt: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return llm.encode(prompt)

    async def main() -> None:
        engine = AsyncEngine(llm.engine, encode)
        stream = engine.generate("hello", GREEDY)
        assert stream.prompt_token_ids == []
        await stream.admitted()
        assert stream.prompt_token_ids == expected.prompt_token_ids
        assert [event.token_id for event in await read(stream)] == expected.token_ids
        assert are_in_the_background(threads)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "spec", "error"),
    [([], "off", InvalidPrompt), ("text", "off", InvalidPrompt), (PROMPT, "early_exit:layers=9", InvalidSpec)],
)
def test_what_is_wrong_with_a_request_is_told_to_its_caller(
    llm: LLM, prompt: Any, spec: str, error: type[Exception]
) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(prompt, GREEDY, parse_spec(spec))
        for _ in range(2):
            with pytest.raises(error):
                await stream.admitted()
            with pytest.raises(error):
                await anext(stream)
        await until(engine)
        assert is_clean(engine, llm)
        assert await last(engine.generate(PROMPT, GREEDY)) == "length"
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("params", "spec", "error", "sentence"),
    [
        ({"n": 2}, None, InvalidParameter, "params must be a SamplingParams, not dict."),
        (None, "oracle", InvalidSpec, "spec='oracle' names the proposer 'oracle'; there are "),
        (None, 3, InvalidSpec, "spec=3 must be a string such as off"),
    ],
)
def test_arguments_of_a_wrong_kind_are_told_at_once(
    llm: LLM, params: Any, spec: Any, error: type[Exception], sentence: str
) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        with pytest.raises(error) as caught:
            engine.generate(PROMPT, params, spec)
        assert sentence in str(caught.value)
        assert is_clean(engine, llm)
        await engine.close()

    asyncio.run(main())


def test_a_spec_may_be_a_string(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        assert await last(engine.generate(PROMPT, GREEDY, "ngram:k=3")) == "length"
        assert set(llm.engine.speculation.assignments.proposers) == {"ngram:k=3"}
        await engine.close()

    asyncio.run(main())


def test_an_id_is_used_once_at_a_time(llm: LLM) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            with pytest.raises(InvalidParameter, match="The request id 'other' is in use; choose another"):
                engine.generate(PROMPT, GREEDY, request_id="other")
            others = [engine.generate(PROMPT, GREEDY) for _ in range(3)]
            assert len({stream.request_id for stream in others}) == 3
            for stream in others:
                await stream.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["waiting for the step", "running"])
def test_closing_from_another_task_ends_the_reader(llm: LLM, when: str) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            stream = engine.generate(PROMPT, LONG)
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0.02)
            if when == "running":
                llm.engine.runner.let_through.set()  # type: ignore[attr-defined]
                await stream.admitted()
            await stream.aclose()
            assert len(await reader) < 400
            assert await read(stream) == []
            await stream.aclose()

    asyncio.run(main())


def test_a_timeout_while_waiting_does_not_abort(llm: LLM) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids

    async def main() -> None:
        async with in_a_step(llm) as engine:
            stream = engine.generate(PROMPT, GREEDY)
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            llm.engine.runner.let_through.set()  # type: ignore[attr-defined]
            tokens: list[int | None] = []
            while len(tokens) < len(expected):
                try:
                    tokens.append((await asyncio.wait_for(anext(stream), 0.0005)).token_id)
                except TimeoutError:
                    continue
            assert tokens == expected

    asyncio.run(main())


@pytest.mark.parametrize("leave", ["close", "drop", "with", "abort", "cancel"])
def test_a_stream_that_is_left_frees_everything(llm: LLM, leave: str) -> None:
    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(PROMPT, LONG, request_id="left")
        await stream.admitted()
        if leave == "close":
            await stream.aclose()
        elif leave == "with":
            async with stream:
                pass
        elif leave == "abort":
            await engine.abort("left")
        elif leave == "cancel":
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            reader.cancel()
            await asyncio.wait([reader])
            del reader
        if leave != "abort":
            del stream
            gc.collect()
        await until(engine)
        assert not llm.engine.is_live("left")
        assert not has_requests(engine)
        assert await last(engine.generate(PROMPT, GREEDY, request_id="left")) == "length", "its id is free"
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


@pytest.mark.parametrize("leave", ["close", "drop", "abort"])
def test_a_request_that_is_left_before_it_is_admitted_never_runs(llm: LLM, leave: str) -> None:
    """Its prompt is being tokenised when nobody wants it any more."""
    begun, go_on = threading.Event(), threading.Event()

    def encode(prompt: list[int]) -> list[int]:
        begun.set()
        assert go_on.wait(30)
        return prompt

    async def main() -> None:
        engine = AsyncEngine(llm.engine, encode)
        stream = engine.generate(PROMPT, LONG, request_id="left")
        assert await asyncio.to_thread(begun.wait, 30)
        if leave == "close":
            await stream.aclose()
            assert await read(stream) == []
        elif leave == "abort":
            await engine.abort("left")
        if leave != "abort":
            del stream
        go_on.set()
        await no_other_task()
        if leave == "abort":
            (event,) = await read(stream)
            assert event.finish_reason == "abort"
        await until(engine)
        assert is_clean(engine, llm)
        assert llm.engine.stats().num_steps == 0
        await engine.close()

    asyncio.run(main())


def test_a_request_that_cannot_be_ended_is_logged(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(request_id: str) -> None:
        raise RuntimeError("out of memory")

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(PROMPT, LONG)
        await stream.admitted()
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "abort", fails)
            await stream.aclose()
            await until(engine)
        await engine.close()

    asyncio.run(main())
    (record,) = caplog.records
    assert record.message == "A request that nobody reads could not be ended."
    assert "out of memory" in caplog.text


def test_an_abort_happens_even_if_its_task_is_cancelled(llm: LLM) -> None:
    async def main() -> None:
        async with in_a_step(llm) as engine:
            long = engine.generate(PROMPT, LONG, request_id="long")
            await asyncio.sleep(0.02)
            aborting = asyncio.create_task(engine.abort("long"))
            await asyncio.sleep(0.01)
            aborting.cancel()
        assert [event.finish_reason for event in await read(long)] == ["abort"]

    asyncio.run(main())


@pytest.mark.parametrize("spec", ["ngram+suffix", "early_exit:layers=9+ngram"])
def test_an_abort_does_not_wait_for_proposers(llm: LLM, spec: str) -> None:
    """Even if they could not be built in the end."""
    builds = SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(PROMPT, with_fields(n=2), parse_spec(spec), request_id="aborted")
        assert await asyncio.to_thread(builds.entered.wait, 30)
        async with asyncio.timeout(20):
            await engine.abort("aborted")
            await stream.admitted()
            events = [await anext(stream) for _ in range(2)]
        assert [event.finish_reason for event in events] == ["abort"] * 2
        assert not has_requests(engine)
        assert await last(engine.generate(PROMPT, GREEDY, request_id="aborted")) == "length", "its id is free"
        builds.let_through.set()
        await no_other_task()
        assert await read(stream) == []
        assert len(builds.threads) == 1, "the second proposer is not built"
        await until(engine)
        assert is_clean(engine, llm)
        await engine.close()

    asyncio.run(main())


def test_a_bad_prompt_is_told_to_its_reader_and_not_to_whoever_aborts(llm: LLM) -> None:
    builds = SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate([-1], GREEDY, parse_spec("ngram"), request_id="bad")
        assert await asyncio.to_thread(builds.entered.wait, 30)
        await engine.abort("bad")
        with pytest.raises(InvalidPrompt):
            async with asyncio.timeout(20):
                await anext(stream)
        builds.let_through.set()
        await engine.close()

    asyncio.run(main())
    assert is_idle(llm)


def test_what_nobody_reads_is_not_built(llm: LLM) -> None:
    """However many clients connect and drop."""
    builds = SlowBuilds(llm)

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        for k in range(1, 9):
            stream = engine.generate(PROMPT, GREEDY, parse_spec(f"ngram:k={k}+suffix:k={k}"))
            assert await asyncio.to_thread(builds.entered.wait, 30)
            await asyncio.sleep(0.02)  # the later ones are queued
            await stream.aclose()
        builds.let_through.set()
        await no_other_task()
        assert len(builds.threads) == 1
        await until(engine)
        assert is_clean(engine, llm)
        await engine.close()

    asyncio.run(main())


def test_what_has_arrived_is_read_at_once(llm: LLM) -> None:
    expected = llm.generate([PROMPT], GREEDY)[0]

    async def main() -> None:
        engine = AsyncEngine(llm.engine)
        stream = engine.generate(PROMPT, GREEDY)
        tokens: list[int | None] = []
        async with asyncio.timeout(30):
            while not stream.has_ended:
                await stream.wait()
                tokens += [event.token_id for event in stream.arrived()]
        assert tokens == expected.token_ids
        assert stream.arrived() == []
        await stream.wait()  # nothing more will come

        arrived = asyncio.Event()
        streams = [engine.generate(PROMPT, GREEDY, arrived=arrived) for _ in range(3)]
        read: list[list[int | None]] = [[], [], []]
        async with asyncio.timeout(30):
            while not all(stream.has_ended for stream in streams):
                await arrived.wait()
                arrived.clear()
                for tokens, stream in zip(read, streams):
                    tokens += [event.token_id for event in stream.arrived()]
        assert read == [expected.token_ids] * 3
        assert engine.is_alive
        await engine.close()
        assert not engine.is_alive and is_clean(engine, llm)

    asyncio.run(main())
