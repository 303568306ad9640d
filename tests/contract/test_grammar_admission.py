"""Grammars of requests that run beside others: compiled once, on a thread of their own, and never in a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import InvalidParameter
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.sampling import grammar as grammar_module
from tests.contract.async_engines import last, read
from tests.tiny_models import random_model, save_model

pytest.importorskip("llguidance")

WORDS = {"regex": "([a-f]{2,5} ){3,6}end"}
HUNGRY = {"regex": "(.*a.{200})b"}  # every text has states of its own
NUM_BUILDS = 2  # parsers of one grammar


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), threads=1, max_num_seqs=64)


def under(grammar: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 1.0, "seed": 1, **fields}, grammar=grammar)


def are_off_the_engine_thread(builds: list[str]) -> bool:
    return all(name.startswith("foredraft-grammar") for name in builds)


def test_the_engine_thread_compiles_nothing(llm: LLM, builds: list[str]) -> None:
    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        events = await read(engine.generate([5, 6], under(WORDS), "grammar"))
        assert events[-1].output is not None and events[-1].output.text.endswith("end")
        with pytest.raises(InvalidParameter, match="grammar cannot be used"):
            await engine.generate([5, 6], under({"regex": "(a"})).admitted()
        assert await last(engine.generate([5, 6], under(WORDS))) == "stop"
        await engine.close()

    asyncio.run(scene())
    assert len(builds) == NUM_BUILDS + 1 and are_off_the_engine_thread(builds)


def test_a_grammar_that_nobody_keeps_is_compiled_off_the_engine_thread_too(
    llm: LLM, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have pushed it out of the cache before the request is added."""
    monkeypatch.setattr(grammar_module, "_MOST_CACHED", 0)

    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        assert await last(engine.generate([5, 6], under(WORDS))) == "stop"
        await engine.close()

    asyncio.run(scene())
    assert len(builds) == NUM_BUILDS and are_off_the_engine_thread(builds)


@pytest.mark.parametrize("spec", ["off", "grammar+ngram"])
def test_a_limit_in_flight_compiles_nothing_and_ends_one_request(
    llm: LLM, builds: list[str], monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 120)

    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        other = engine.generate([5, 6], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        failed = await read(engine.generate([5, 6], under(HUNGRY, max_tokens=200, n=8), spec))
        errors = [event.output.error or "" for event in failed if event.output is not None]
        assert len(errors) == 8
        assert all(error.startswith("grammar cannot be used: its patterns are too large") for error in errors)
        assert await last(other) == "length"
        await engine.close()

    asyncio.run(scene())
    assert len(builds) == NUM_BUILDS and are_off_the_engine_thread(builds)


def test_what_is_too_large_is_refused_before_it_runs(llm: LLM) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1800)}}
    with pytest.raises(ValueError, match="use fewer optional properties"):
        llm.generate([[5, 6]], under(schema))

    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        with pytest.raises(InvalidParameter, match="use fewer optional properties"):
            await engine.generate([5, 6], under(schema, n=8)).admitted()
        assert llm.engine.stats().num_steps == 0
        await engine.close()

    asyncio.run(scene())


def test_requests_that_come_together_compile_once(llm: LLM, builds: list[str]) -> None:
    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        streams = [engine.generate([5, 6 + index], under(WORDS, n=4)) for index in range(6)]
        assert [await last(stream) for stream in streams] == ["stop"] * 6
        await engine.close()

    asyncio.run(scene())
    assert len(builds) == NUM_BUILDS


def held(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Holds every compilation until the second event is set; the first tells that one has begun."""
    begun, may_end = threading.Event(), threading.Event()
    compile_it: Callable[..., Any] = llm.engine.grammars.compile

    def wait(grammar: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        return compile_it(grammar)

    monkeypatch.setattr(llm.engine.grammars, "compile", wait)
    return begun, may_end


def test_nobody_waits_for_a_compilation_of_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.engine.grammars.compile(WORDS)
    begun, may_end = held(llm, monkeypatch)

    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        waiting = engine.generate([5, 6], under({"choice": ["yes", "no"]}))
        assert await asyncio.to_thread(begun.wait, 30)
        assert await last(engine.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True))) == "length"
        assert await last(engine.generate([5, 6], under(WORDS))) == "stop", "its grammar is compiled"
        may_end.set()
        assert await last(waiting) == "stop"
        await engine.close()

    try:
        asyncio.run(scene())
    finally:
        may_end.set()


def test_a_request_that_is_aborted_does_not_wait_for_its_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, builds: list[str]
) -> None:
    begun, may_end = held(llm, monkeypatch)

    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        first = engine.generate([5, 6], under(WORDS), request_id="first")
        second = engine.generate([5, 6], under({"regex": "b+"}), request_id="second")
        assert await asyncio.to_thread(begun.wait, 30)
        while not second.prompt_token_ids:
            await asyncio.sleep(0.001)
        for name, stream in (("first", first), ("second", second)):
            await engine.abort(name)
            assert await last(stream) == "abort"
        assert not builds
        may_end.set()
        assert await last(engine.generate([5, 6], under({"choice": ["yes", "no"]}))) == "stop"
        await engine.close()

    try:
        asyncio.run(scene())
    finally:
        may_end.set()
    assert are_off_the_engine_thread(builds) and llm.engine.grammars.find({"regex": "b+"}) is None


def test_the_tokenizer_is_read_before_anybody_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        engine = AsyncEngine(llm.engine)
        monkeypatch.setattr(llm.engine.grammars, "_tokenizer_json", lambda: pytest.fail("a request reads it"))
        assert await last(engine.generate([5, 6], under(WORDS))) == "stop"
        await engine.close()

    asyncio.run(scene())
