"""Who may see what of whom: prompts by `cached_tokens`, answers by the drafts in a trace. Every case is a victim and
whoever comes after it and knows the beginning."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foredraft.control.controller import Offer, Prices
from foredraft.proposers.suffix import Suffix
from foredraft.server.service import Service
from foredraft.server.sharing import shared_salt
from foredraft.types import NO_DRAFT, Draft
from tests.server.running_server import NAME, RunningServer, load_tiny_model, running
from tests.steady_controller import SteadyController

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
KEYS = ["first key", "second key"]
HELLO = [{"role": "user", "content": "hello"}]
Who = tuple[int | None, str | None]  # the place of the key, and the given salt
_numbers = count()


@pytest.fixture(scope="module")
def servers(tiny_folder: Path) -> Iterator[dict[tuple[bool, bool], RunningServer]]:
    """By whether they have keys, and whether their operator shares answers."""
    with ExitStack() as running_servers:
        yield {
            (has_keys, shares): running_servers.enter_context(
                running(load_tiny_model(tiny_folder), api_keys=KEYS if has_keys else [], shares_answers=shares)
            )
            for has_keys in (False, True)
            for shares in (False, True)
        }


def send(server: RunningServer, who: Who, path: str, body: dict[str, Any]) -> bytes:
    key, salt = who
    headers = {} if key is None else {"authorization": f"Bearer {KEYS[key]}"}
    salted = body if salt is None else {**body, "cache_salt": salt}
    status, data, _ = server.request("POST", path, {"model": NAME, "temperature": 0, **salted}, headers)
    assert status == 200, data
    return data


def cached_tokens(server: RunningServer, who: Who, prompt: list[int]) -> int:
    found = json.loads(send(server, who, COMPLETE, {"prompt": prompt, "max_tokens": 1, "spec": "off"}))
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def steps(server: RunningServer, who: Who, start: str, **fields: Any) -> list[dict[str, Any]]:
    """The trace of an answer that a grammar makes begin like this."""
    body = {
        "messages": HELLO,
        "grammar": {"regex": f"{start}[a-z ]*"},
        "max_tokens": len(start) + 8,
        "spec": "suffix",
        "stream": True,
        "speculation_trace": True,
        **fields,
    }
    chunks = [json.loads(line[6:]) for line in send(server, who, CHAT, body).splitlines() if line[:7] == b"data: {"]
    return [step for chunk in chunks for step in chunk["choices"][0].get("speculation_trace", ())]


def drafted(server: RunningServer, who: Who, start: str) -> str:
    return "".join(token for step in steps(server, who, start) for token in step["draft"]["tokens"])


# with keys, with --share-answers: the victim, who comes after it, and whether that one finds something
NOBODY: Who = (None, None)
CASES: list[tuple[bool, bool, Who, Who, bool]] = [
    (False, False, NOBODY, NOBODY, False),
    (False, False, (None, ""), (None, ""), False),
    (False, False, (None, "a"), (None, "a"), True),
    (False, False, (None, "a"), (None, "b"), False),
    (False, False, (None, "a"), NOBODY, False),
    (False, False, NOBODY, (None, "a"), False),
    (True, False, (0, None), (0, None), True),
    (True, False, (0, None), (1, None), False),
    (True, False, (0, "a"), (0, "a"), True),
    (True, False, (0, "a"), (1, "a"), False),
    (True, False, (0, "a"), (0, None), False),
    (True, False, (0, None), (0, "a"), False),
    (True, False, (0, None), (1, shared_salt(0, "", False)), False),
    (False, True, NOBODY, NOBODY, True),
    (False, True, (None, "a"), NOBODY, False),
    (False, True, NOBODY, (None, "a"), False),
    (False, True, NOBODY, (None, shared_salt(None, "", True)), False),
    (False, True, (None, "a"), (None, "a"), True),
    (True, True, (0, None), (1, None), True),
    (True, True, (0, "a"), (1, "a"), False),
]


@pytest.mark.parametrize(("has_keys", "shares", "victim", "other", "is_shared"), CASES)
def test_prompts_are_found_by_whom_they_are_shared_with(
    servers: dict[tuple[bool, bool], RunningServer],
    has_keys: bool,
    shares: bool,
    victim: Who,
    other: Who,
    is_shared: bool,
) -> None:
    server, number = servers[has_keys, shares], next(_numbers)
    prompt = [(13 * place + 5 * number) % 300 for place in range(70)]
    cached_tokens(server, victim, prompt)
    assert cached_tokens(server, other, [*prompt[:66], 1, 2, 3]) == (64 if is_shared else 0)


@pytest.mark.parametrize(("has_keys", "shares", "victim", "other", "is_shared"), CASES)
def test_answers_are_drafted_for_whom_they_are_shared_with(
    servers: dict[tuple[bool, bool], RunningServer],
    has_keys: bool,
    shares: bool,
    victim: Who,
    other: Who,
    is_shared: bool,
) -> None:
    server, number = servers[has_keys, shares], next(_numbers)
    start = f"launch {'abcdefghij'[number % 10]}{'abcdefghij'[number // 10]}"
    secret = f"{start} zebra"
    drafted(server, other, "hi")  # whoever comes later has the proposer made first
    answer = {"messages": HELLO, "grammar": {"choice": [secret]}, "max_tokens": 40, "spec": "off"}
    assert json.loads(send(server, victim, CHAT, answer))["choices"][0]["message"]["content"] == secret
    assert ("zebra" in drafted(server, other, start)) == is_shared


def is_empty(service: Service) -> bool:
    engine = service.llm.engine
    proposers = [guarded.proposer for guarded in engine.speculation.assignments.proposers.values()]
    suffixes = [each for each in proposers if isinstance(each, Suffix)]
    assert suffixes
    return not engine.scheduler.pool._block_of_name and not any(each._stores for each in suffixes)


def test_private_requests_leave_nothing_behind(tiny_folder: Path) -> None:
    """Neither finished ones nor those whose clients leave: they would only take the place of what is shared."""
    body = {"prompt": [list(range(3, 83)), list(range(3, 90))], "max_tokens": 40, "n": 3, "ignore_eos": True}
    with running(load_tiny_model(tiny_folder)) as server:
        send(server, NOBODY, COMPLETE, body)
        server.until_idle()
        assert is_empty(server.service)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request(
            "POST",
            COMPLETE,
            json.dumps({**body, "max_tokens": 1500, "stream": True}),
            {"content-type": "application/json"},
        )
        connection.getresponse().readline()
        connection.close()
        server.until_idle()
        assert is_empty(server.service)
        send(server, (None, "a"), COMPLETE, body)
        server.until_idle()
        assert not is_empty(server.service)


def test_samples_and_prompts_of_one_body_share_and_no_others(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, salts = server.service.engine.generate, []

    def watched(prompt: Any, params: Any, *arguments: Any, **options: Any) -> Any:
        salts.append(params.cache_salt)
        return generate(prompt, params, *arguments, **options)

    monkeypatch.setattr(server.service.engine, "generate", watched)
    for _ in range(2):
        send(server, NOBODY, COMPLETE, {"prompt": ["one", "two"], "n": 2, "max_tokens": 2})
    assert len(salts) == 4 and len(set(salts)) == 2 and salts[0] == salts[1] and "" not in salts


def test_neither_keys_nor_salts_are_in_logs_and_metrics(
    servers: dict[tuple[bool, bool], RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = servers[True, False]
    with caplog.at_level(logging.INFO):
        for who in ((0, None), (0, "a salt of mine")):
            send(server, who, COMPLETE, {"prompt": "x", "max_tokens": 2})
    told = caplog.text + server.request("GET", "/metrics", headers={"x-api-key": KEYS[1]})[1].decode()
    assert COMPLETE in told and "generation_tokens" in told
    digest = hashlib.sha256(KEYS[0].encode()).hexdigest()
    for secret in (
        KEYS[0],
        digest,
        "a salt of mine",
        *(shared_salt(0, given, False) for given in ("", "a salt of mine")),
    ):
        assert secret and secret not in told


class CuttingController(SteadyController):
    """Lets no more than the first node of a draft pass."""

    def choose(self, offers: Items[Offer | None], prices: Prices) -> tuple[list[Draft], list[str]]:
        cut = [offer.draft.only([0]) if offer else NO_DRAFT for offer in offers]
        return cut, ["cut"] * len(cut)


def test_a_trace_shows_what_was_verified_and_nothing_else_that_was_drafted(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, sizes, propose = load_tiny_model(tiny_folder), list[int](), Suffix.propose

    def watched(*arguments: Any) -> list[Draft]:
        drafts = propose(*arguments)
        sizes.extend(map(len, drafts))
        return drafts

    monkeypatch.setattr(Suffix, "propose", watched)
    llm.engine.speculation.controller = CuttingController()
    with running(llm) as server:
        answer = {"messages": HELLO, "grammar": {"choice": ["launch a zebra"]}, "max_tokens": 40}
        send(server, (None, "a"), CHAT, {**answer, "spec": "suffix"})
        shown = steps(server, (None, "a"), "launch a", spec="auto(suffix)")
    assert max(sizes) > 1 and {len(step["draft"]["tokens"]) for step in shown} == {0, 1}
