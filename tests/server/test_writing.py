"""Answers are written so that nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from foredraft.server.errors import json_bytes
from foredraft.server.generation import Generation
from foredraft.server.limits import Limits
from foredraft.server.reports import Logprobs, Offsets
from foredraft.server.sse import EventStream, json_pieces, portions, respond
from foredraft.types import TokenLogprob
from tests.server.running_server import RunningServer

VALUES: list[Any] = [
    {},
    [],
    None,
    "é\ud800",
    {"a": {}, "b": [], "c": [[]], "d": [{}], "é\n": 1.5, "f": None, "g": [1, [2, [3, [4, [5, [6, {"x": "y"}]]]]]]},
    [{"a": [{"b": {"c": [{"d": [1, 2]}]}}]}, True, "x"],
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_pieces_are_the_json_of_the_whole(value: Any) -> None:
    assert b"".join(json_pieces(value)) == json_bytes(value)


def test_iterators_are_lists() -> None:
    value = {"choices": iter([{"index": 0}, {"index": 1}]), "none": iter(())}
    assert json.loads(b"".join(json_pieces(value))) == {"choices": [{"index": 0}, {"index": 1}], "none": []}


def test_log_probabilities_are_written_token_by_token() -> None:
    tokens = [{"token": "x", "top_logprobs": [{"token": "y"}] * 50}] * 20
    body = {"choices": [{"logprobs": {"content": tokens}}]}
    assert max(map(len, json_pieces(body))) == len(json_bytes(tokens[0]))


@pytest.mark.parametrize("together", [1, 2, 3, 9])
def test_offsets_are_where_tokens_begin_in_the_text(together: int) -> None:
    """Also of characters that span tokens, behind an end of text, and of answers that come in pieces."""
    tokens = [b"sea", *(bytes([each]) for each in "🐙".encode()), " é".encode()[:2], "é".encode()[1:], b"."]
    end = len(tokens)
    tokens += [b"</s>", b"!"]
    tokenizer: Any = SimpleNamespace(
        own_text=lambda token: tokens[token].decode(errors="replace"),
        bytes_of=tokens.__getitem__,
        is_special=lambda token: token == end,
        decode=lambda ids: "",
    )
    logprobs, offsets = [TokenLogprob(token, -1.0, {}) for token in range(len(tokens))], Offsets()
    pieces = [logprobs[first : first + together] for first in range(0, len(tokens), together)]
    found: list[int] = []
    for piece in pieces:
        found += Logprobs(tokenizer, 0).completion(piece, offsets)["text_offset"]
    text = b"".join(tokens).decode().replace("</s>", "")
    assert found == [0, 3, 3, 3, 3, *map(text.index, " é."), text.index("!"), text.index("!")]


def test_a_token_is_decoded_once(big_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, ...]] = []
    tokenizer = big_server.service.llm.tokenizer
    monkeypatch.setattr(tokenizer, "_own_texts", {})
    decode = tokenizer.decode

    def note(ids: Any, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            decoded.append(tuple(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", note)
    logprobs = [TokenLogprob(token, -1.0, dict.fromkeys(range(50), -2.0)) for token in range(100)]
    for _ in range(2):
        Logprobs(tokenizer, 50).chat(logprobs)
        Logprobs(tokenizer, 50).completion(logprobs, Offsets())
    assert len(decoded) == len(set(decoded)) == 100


@pytest.mark.parametrize("is_large", [True, False])
def test_large_answers_are_written_in_another_thread(is_large: bool) -> None:
    threads: list[threading.Thread] = []

    async def nothing() -> None:
        pass

    def body() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"choices": iter([1, 2])}

    generation: Any = SimpleNamespace(is_large=is_large, finish=nothing, close=nothing)
    answer: Any = SimpleNamespace(body=body)
    response = asyncio.run(respond(generation, answer, Limits(), stream=False))
    assert response.body == b'{"choices":[1,2]}'
    assert [thread is threading.main_thread() for thread in threads] == [not is_large]


def test_what_is_large() -> None:
    def generation(num_tokens: int, logprobs: int | None) -> Any:
        outputs = {index: SimpleNamespace(token_ids=[0] * num_tokens) for index in range(16)}
        return SimpleNamespace(outputs=outputs, _params=SimpleNamespace(logprobs=logprobs, prompt_logprobs=None))

    is_large: Any = Generation.is_large
    assert is_large.fget(generation(500, 50))
    assert not is_large.fget(generation(500, None))
    assert not is_large.fget(generation(20, 5))


def test_portions_hold_all_tokens_in_order() -> None:
    events: Any = {0: list(range(200)), 3: list(range(10)), 1: list(range(65))}
    cut = list(portions(events))
    assert max(len(its) for portion in cut for its in portion.values()) <= 64
    for index, its in events.items():
        assert [event for portion in cut for event in portion.get(index, ())] == its
    few: Any = {0: [1, 2], 1: [3]}
    assert [portion is few for portion in portions(few)] == [True]


def test_others_run_between_the_portions_of_a_stream() -> None:
    order: list[str] = []

    async def nothing(*_: object) -> None:
        pass

    async def others() -> None:
        while True:
            order.append("others")
            await asyncio.sleep(0)

    def delta(portion: Any) -> bytes:
        order.append("portion")
        return b"x"

    async def write() -> None:
        arriving: list[Any] = [{}, {0: list(range(200))}]

        async def arrived(patience_s: float) -> Any:
            return arriving.pop()

        generation: Any = SimpleNamespace(next=arrived, close=nothing, client_left=False)
        answer: Any = SimpleNamespace(begin=bytes, delta=delta, end=bytes)
        beside = asyncio.create_task(others())
        await EventStream(generation, answer, Limits())({}, nothing, nothing)
        beside.cancel()

    asyncio.run(write())
    assert order.count("portion") == 4 and "portion portion" not in " ".join(order)
