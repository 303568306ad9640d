"""The gateway of a fleet over replicas in this process: what it passes on, repeats, refuses and breaks off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import Overloaded
from foredraft.integrations.ray_serve.forwarding import ForwardedRequest, answer
from foredraft.integrations.ray_serve.gateway import ReplicaLost, make_gateway
from foredraft.integrations.ray_serve.options import FleetOptions
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.server.app import make_app
from foredraft.server.limits import Limits
from foredraft.server.service import Service
from tests.server.running_server import CANARY as UNSEEDED
from tests.server.running_server import NAME, load_tiny_model

CANARY = {**UNSEEDED, "seed": 1}
Messages = list[Any]


class Replica:
    """A replica that dies after `lives` batches of messages of an answer; None: never."""

    def __init__(self, service: Service, lives: int | None = None) -> None:
        self.service = service
        self.app = make_app(service)
        self.lives = lives
        self.num_requests = 0

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[Messages]:
        self.num_requests += 1
        count = 0
        async for messages in answer(self.app, request):
            if count == self.lives:
                raise ReplicaLost
            yield messages
            count += 1


class FakeFleet:
    """Hands requests to the replicas in turn."""

    def __init__(self, *replicas: Replica, is_full: bool = False) -> None:
        self.replicas = replicas
        self.is_full = is_full
        self.requests: list[ForwardedRequest] = []

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[Messages]:
        if self.is_full:
            raise Overloaded("All replicas are busy.")
        self.requests.append(request)
        replica = self.replicas[(len(self.requests) - 1) % len(self.replicas)]
        async for messages in replica.answer(request):
            yield messages

    async def metrics(self) -> list[str]:
        return [replica.service.metrics.render().decode() for replica in self.replicas]

    async def num_ready(self) -> int:
        return len(self.replicas)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    llm = load_tiny_model(tiny_folder)
    yield llm
    llm.close()


def in_a_loop(llm: LLM, work: Any) -> Any:
    """Runs `work(service)` in an event loop with an engine of its own thread, which it ends."""

    async def main() -> Any:
        service = Service(llm, [NAME], Limits(), label="first")
        try:
            return await work(service)
        finally:
            await service.engine.close()

    return asyncio.run(main())


def post(path: str, body: Any, **headers: str) -> ForwardedRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    return ForwardedRequest("POST", path, b"", tuple((k.encode(), v.encode()) for k, v in sent.items()), None, data)


def get(path: str) -> ForwardedRequest:
    return ForwardedRequest("GET", path, b"", (), ("192.0.2.1", 5), b"")


async def ask(fleet: FakeFleet, request: ForwardedRequest, **options: Any) -> tuple[int, dict[str, str], bytes]:
    """What a client of the gateway gets."""
    app = make_gateway(fleet, FleetOptions(**options), "gate")
    messages = [message async for batch in answer(app, request) for message in batch]
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(message["body"] for message in messages[1:])


def test_answers_are_those_of_the_library(llm: LLM, offline: LLM) -> None:
    async def work(service: Service) -> tuple[int, dict[str, str], bytes]:
        return await ask(FakeFleet(Replica(service)), post("/v1/completions", CANARY))

    status, headers, body = in_a_loop(llm, work)
    assert status == 200 and "x-request-id" in headers
    (expected,) = offline.generate(CANARY["prompt"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert json.loads(body)["choices"][0]["text"] == expected.text


def test_names_and_sites_are_checked_before_a_replica_is_used(llm: LLM) -> None:
    async def work(service: Service) -> list[int]:
        fleet = FakeFleet(Replica(service))
        named = {"host": "chat.example", "origin": "https://chat.example"}
        wanted = post("/v1/completions", CANARY, **named)
        sites = ({}, {"hosts": ["chat.example"]}, {"hosts": ["other.example"]}, {"is_local": True})
        answers = [await ask(fleet, wanted, sites=each) for each in sites]
        foreign = await ask(fleet, post("/v1/completions", CANARY, **{**named, "origin": "https://evil.example"}))
        friend = await ask(fleet, wanted, sites={"origins": ["https://chat.example"]})
        assert friend[1]["access-control-allow-origin"] == "https://chat.example"
        assert len(fleet.requests) == 3
        return [status for status, _, _ in (*answers, foreign, friend)]

    assert in_a_loop(llm, work) == [200, 200, 403, 403, 403, 200]


def test_a_request_whose_replica_dies_is_answered_by_another(llm: LLM) -> None:
    async def work(service: Service) -> tuple[Any, Any, FakeFleet, bytes]:
        fleet = FakeFleet(Replica(service, lives=0), Replica(service))
        app = make_gateway(fleet, FleetOptions(), "gate")
        messages = [m async for batch in answer(app, post("/v1/completions", CANARY)) for m in batch]
        page = [m async for batch in answer(app, get("/metrics")) for m in batch][1]["body"]
        plain = await ask(FakeFleet(Replica(service)), post("/v1/completions", CANARY))
        return messages, plain, fleet, page

    messages, plain, fleet, page = in_a_loop(llm, work)
    assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
    assert json.loads(messages[1]["body"])["choices"] == json.loads(plain[2])["choices"]
    assert [replica.num_requests for replica in fleet.replicas] == [1, 1]
    assert b'foredraft:requests_retried_total{gateway="gate"} 1.0' in page
    assert b'vllm:generation_tokens_total{engine="first",model_name="tiny"}' in page


def test_a_request_that_kills_replicas_is_given_up(llm: LLM) -> None:
    async def work(service: Service) -> tuple[Any, FakeFleet]:
        fleet = FakeFleet(Replica(service, lives=0))
        return await ask(fleet, post("/v1/completions", CANARY)), fleet

    (status, _, body), fleet = in_a_loop(llm, work)
    assert status == 500 and json.loads(body)["error"]["type"] == "server_error"
    assert len(fleet.requests) == 3


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/completions", {"prompt": "A canary sings."}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Sing."}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Sing."}]}),
        ("/v1/responses", {"input": "Sing."}),
    ],
)
def test_a_stream_that_has_begun_is_broken_off_once_and_never_begun_again(
    llm: LLM, path: str, fields: dict[str, Any]
) -> None:
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": NAME, "stream": True, "temperature": 0, "ignore_eos": True, length: 64, **fields}

    async def work(service: Service) -> tuple[Any, FakeFleet]:
        fleet = FakeFleet(Replica(service, lives=3), Replica(service))
        return await ask(fleet, post(path, body)), fleet

    (status, _, data), fleet = in_a_loop(llm, work)
    assert status == 200 and len(fleet.requests) == 1
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    wrong = [event for event in events if "error" in event or event.get("type") == "error"]
    assert wrong == events[-1:] and "send the request again" in json.dumps(wrong)
    assert data.endswith(b"\n\n")


def test_a_full_fleet_is_429_with_the_time_to_come_back(llm: LLM) -> None:
    async def work(service: Service) -> Any:
        return await ask(FakeFleet(Replica(service), is_full=True), post("/v1/completions", CANARY))

    status, headers, body = in_a_loop(llm, work)
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"


def test_keys_and_bodies_are_checked_before_a_replica_is_troubled(llm: LLM) -> None:
    async def work(service: Service) -> Any:
        fleet = FakeFleet(Replica(service))
        keyed: dict[str, Any] = {"api_keys": ["secret"], "limits": {"max_body_bytes": 1000}}
        refused = await ask(fleet, post("/v1/completions", CANARY), **keyed)
        large = await ask(fleet, post("/v1/completions", b"x" * 1001, authorization="Bearer secret"), **keyed)
        ready = await ask(fleet, get("/ready"), **keyed)
        assert fleet.requests == []
        let_in = await ask(fleet, post("/v1/completions", CANARY, authorization="Bearer secret"), **keyed)
        return [refused[0], large[0], ready[0], let_in[0]]

    assert in_a_loop(llm, work) == [401, 413, 200, 200]


def test_a_fleet_without_replicas_is_not_ready() -> None:
    status, _, body = asyncio.run(ask(FakeFleet(), get("/ready")))
    assert status == 503 and json.loads(body)["replicas"] == 0


def test_requests_carry_the_prefixes_of_their_prompt(llm: LLM) -> None:
    async def work(service: Service) -> FakeFleet:
        fleet = FakeFleet(Replica(service))
        long = {**CANARY, "prompt": "A canary sings. " * 20}
        for headers in ({"x-api-key": "a"}, {"authorization": "Bearer a"}, {"x-api-key": "b"}):
            await ask(fleet, post("/v1/completions", long, **headers), api_keys=["a", "b"])
        await ask(fleet, post("/v1/completions", long))
        for key in ("a", "b"):
            shared = {"api_keys": ["a", "b"], "shares_answers": True}
            await ask(fleet, post("/v1/completions", long, **{"x-api-key": key}), **shared)
        await ask(fleet, get("/v1/models"))
        return fleet

    first, second, another_key, private, *shared, other = in_a_loop(llm, work).requests
    assert first.prefixes == second.prefixes != () and not set(first.prefixes) & set(another_key.prefixes)
    assert private.prefixes == other.prefixes == ()
    assert shared[0].prefixes == shared[1].prefixes != ()


def test_a_client_that_leaves_ends_its_request(llm: LLM) -> None:
    async def work(service: Service) -> int:
        app = make_gateway(FakeFleet(Replica(service)), FleetOptions(), "gate")
        body = {**CANARY, "stream": True, "max_tokens": 2000}
        messages = answer(app, post("/v1/completions", body))
        await anext(messages)
        await messages.aclose()
        async with asyncio.timeout(10):
            while service.engine.stats().running:
                await asyncio.sleep(0.01)
        return service.num_answering

    assert in_a_loop(llm, work) == 0
