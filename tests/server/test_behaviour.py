"""How the server behaves when clients leave, wait, read slowly or are too many, and when it is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foredraft.batch import PackedBatch
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.runtime.runner import ForwardOutput, Runner
from foredraft.server.limits import Limits
from foredraft.server.service import Service
from tests.server.running_server import NAME, RunningServer, load_tiny_model, running

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "go on"}],
    "max_tokens": 1900,
    "temperature": 0,
    "ignore_eos": True,
    "spec": "off",
}


def send(server: RunningServer, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    lines = ("host: localhost", "content-type: application/json", f"content-length: {len(data)}")
    head = f"POST {CHAT} HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    client.sendall(head.encode() + data)
    return client


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        piece = client.recv(65536)
        assert piece, f"the connection was closed after {data[-300:]!r}"
        data += piece
    return data


class Gate(Runner):
    """Lets no step through while it is closed."""

    def __init__(self, healthy: Runner) -> None:
        super().__init__(healthy.decoder, healthy.backend, healthy.kv)
        self.is_open = threading.Event()
        self.error: Exception | None = None

    def forward(self, batch: PackedBatch) -> ForwardOutput:
        assert self.is_open.wait(30)
        if self.error is not None:
            raise self.error
        return super().forward(batch)


@pytest.fixture
def gate(llm: LLM) -> Iterator[Gate]:
    gate = llm.engine.runner = Gate(llm.engine.runner)
    yield gate
    gate.is_open.set()


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_ends_its_request(self, server: RunningServer, stream: bool) -> None:
        before = server.metric("foredraft:disconnects_total")
        client = send(server, {**LONG, "stream": stream})
        if stream:
            read_until(client, b'"content":"')
        while not server.metric("vllm:num_requests_running"):
            time.sleep(0.001)
        first = server.metric("foredraft:steps")
        client.close()
        server.until_idle()
        assert server.metric("foredraft:steps") - first < 1000, "the answer was written to its end"
        assert server.metric("foredraft:disconnects_total") == before + 1

    def test_a_client_that_has_read_its_answer_does_not_count(
        self, server: RunningServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = server.metric("foredraft:disconnects_total")
        with caplog.at_level("INFO", "foredraft.server.log"):
            for _ in range(10):
                with send(server, {**LONG, "max_tokens": 3, "stream": True}) as client:
                    read_until(client, b"[DONE]")
            server.until_idle()
        assert server.metric("foredraft:disconnects_total") == before
        finished = [line["finish"] for line in map(json.loads, caplog.messages) if line["path"] == CHAT]
        assert finished and all(each == ["length"] for each in finished)

    def test_within_one_step(self, llm: LLM, gate: Gate) -> None:
        with running(llm) as server:
            client = send(server, {**LONG, "stream": True})
            while not server.metric("vllm:num_requests_running"):
                time.sleep(0.001)
            client.close()
            while not server.metric("foredraft:disconnects_total"):
                time.sleep(0.001)
            gate.is_open.set()
            server.until_idle()
            assert server.metric("foredraft:steps") == 1

    def test_before_it_runs(self, llm: LLM, gate: Gate) -> None:
        with running(llm) as server:
            first = send(server, LONG)
            while not server.metric("vllm:num_requests_running"):
                time.sleep(0.001)
            with send(server, LONG):
                while not server.metric("vllm:num_requests_waiting"):
                    time.sleep(0.001)
            first.close()
            gate.is_open.set()
            server.until_idle()


class TestSlowness:
    def test_a_reader_that_does_not_read_stalls_nobody_and_is_given_up(self, llm: LLM) -> None:
        with running(llm, Limits(write_timeout_s=0.5)) as server:
            slow = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}
            clients = [send(server, slow, receive_buffer=4096) for _ in range(2)]
            started = time.monotonic()
            assert len(server.canary()) > 0
            assert time.monotonic() - started < 5
            server.until_idle(30)
            while server.service.num_answering:
                assert time.monotonic() - started < 30
                time.sleep(0.01)
            for client in clients:
                client.close()

    def test_comments_keep_a_stream_alive_until_the_first_token(self, llm: LLM, gate: Gate) -> None:
        with running(llm, Limits(keep_alive_s=0.05)) as server:
            with send(server, {**LONG, "stream": True, "max_tokens": 3}) as client:
                data = read_until(client, b": keep-alive\n\n")
                gate.is_open.set()
                data += read_until(client, b"[DONE]")
            assert data.index(b": keep-alive") < data.index(b'"delta":{"content":"')

    def test_a_request_that_waits_too_long_is_told_so(self, llm: LLM, gate: Gate) -> None:
        with running(llm, Limits(waiting_timeout_s=0.2)) as server:
            status, data, headers = server.request("POST", CHAT, LONG)
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert "0.2 seconds" in json.loads(data)["error"]["message"]
            gate.is_open.set()
            server.until_idle()

    def test_a_request_that_runs_too_long_is_told_so(self, llm: LLM) -> None:
        with running(llm, Limits(running_timeout_s=0.1)) as server:
            assert server.post(CHAT, LONG)[0] == 504
            with send(server, {**LONG, "stream": True}) as client:
                data = read_until(client, b"[DONE]")
            error = json.loads(data.split(b"data: ")[-2])["error"]
            assert error["type"] == "server_error" and "0.1 seconds" in error["message"]
            server.until_idle()


class TestLoad:
    def test_too_many_requests_are_refused_before_they_are_tokenised(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = load_tiny_model(tiny_folder, max_num_seqs=1)
        gate = llm.engine.runner = Gate(llm.engine.runner)
        encoded: list[Any] = []
        encode = llm.tokenizer.encode_chat
        monkeypatch.setattr(llm.tokenizer, "encode_chat", lambda *given: encoded.append(given) or encode(*given))
        with running(llm, Limits(max_waiting=1)) as server:
            clients = [send(server, {**LONG, "max_tokens": 2}) for _ in range(2)]
            while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < 2:
                time.sleep(0.001)
            tokenised = len(encoded)
            for path in (CHAT, "/v1/messages"):
                status, data, headers = server.request("POST", path, {**LONG, "max_tokens": 2})
                assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
                assert json.loads(data)["error"]["type"] == "rate_limit_error"
            assert len(encoded) == tokenised
            gate.is_open.set()
            for client in clients:
                read_until(client, b'"finish_reason":"length"')
                client.close()
            assert server.post(CHAT, {**LONG, "max_tokens": 2})[0] == 200

    def test_more_samples_than_could_ever_run_are_a_bad_request(self, tiny_folder: Path) -> None:
        with running(load_tiny_model(tiny_folder, max_num_seqs=1), Limits(max_waiting=1)) as server:
            assert server.post(CHAT, {**LONG, "n": 3})[0] == 400

    def test_low_priorities_run_first(self, tiny_folder: Path) -> None:
        llm = load_tiny_model(tiny_folder, max_num_seqs=1)
        gate = llm.engine.runner = Gate(llm.engine.runner)
        with running(llm, honours_priority=True) as server:
            finished: list[int] = []

            def ask(priority: int) -> None:
                status, _ = server.post(CHAT, {**LONG, "max_tokens": 100, "priority": priority})
                assert status == 200
                finished.append(priority)

            threads = []
            for number, priority in enumerate((0, 5, 1, -7)):
                threads.append(threading.Thread(target=ask, args=(priority,)))
                threads[-1].start()
                while (
                    not server.metric("vllm:num_requests_running") or server.service.engine._commands.qsize() < number
                ):
                    time.sleep(0.001)  # the first runs, and the engine has the others to look at after its step
            gate.is_open.set()
            for thread in threads:
                thread.join(30)
            assert finished == [0, -7, 1, 5]


class TestFailure:
    def test_a_step_that_fails_tells_nothing_of_the_machine(self, llm: LLM, gate: Gate) -> None:
        gate.error = RuntimeError("/secret/path is broken")
        gate.is_open.set()
        with running(llm) as server:
            status, body = server.post(CHAT, LONG)
            assert status == 500 and body["error"]["type"] == "server_error"
            assert "secret" not in json.dumps(body)
            with send(server, {**LONG, "stream": True}) as client:
                data = read_until(client, b"[DONE]")
            assert b"secret" not in data and b'"error"' in data
            gate.error = None
            assert server.post(CHAT, {**LONG, "max_tokens": 2})[0] == 200
            server.until_idle()

    def test_a_dead_engine_is_no_health(self, llm: LLM) -> None:
        with running(llm) as server:
            server.service.engine._commands.put(None)
            server.service.engine._thread.join()
            assert server.get("/health")[0] == server.get("/ready")[0] == 503


def test_the_page_and_the_rest(server: RunningServer) -> None:
    status, page, headers = server.request("GET", "/")
    assert status == 200 and b"<title>Foredraft</title>" in page and "text/html" in headers["content-type"]
    assert server.get("/ready")[0] == 200
    assert server.get("/version")[1].keys() == {"version"}
    assert "/v1/chat/completions" in server.get("/openapi.json")[1]["paths"]


def test_tokenize_and_back(server: RunningServer, offline: LLM) -> None:
    _, found = server.post("/tokenize", {"prompt": "naïve"})
    assert found["tokens"] == offline.encode("naïve") and found["count"] == len(found["tokens"])
    assert server.post("/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "naïve"}
    messages = [{"role": "user", "content": "x"}]
    assert server.post("/tokenize", {"messages": messages})[1]["tokens"] == offline.encode(messages)


def test_only_allowed_specs(llm: LLM) -> None:
    with running(llm, allowed_specs=["ngram:k=2"]) as server:
        body = {**LONG, "max_tokens": 2}
        assert server.post(CHAT, {**body, "spec": "ngram:k=2"})[0] == 200
        assert server.post(CHAT, {**body, "spec": "off"})[0] == 200
        status, answer = server.post(CHAT, {**body, "spec": "suffix"})
        assert status == 400 and answer["error"]["param"] == "spec" and "ngram:k=2" in answer["error"]["message"]


def test_options_of_a_request_leave_its_drafts_to_the_controller(server: RunningServer) -> None:
    """Everybody waits for the rows of fixed drafts, so those are the operator's choice."""
    decided = {}
    for spec in ("suffix", "suffix:k=64,min_n=1,depth=64,min_score=0.0001"):
        status, answer = server.post(CHAT, {**LONG, "max_tokens": 64, "spec": spec})
        assert status == 200
        decided[spec] = bool(answer["metrics"]["speculative_decoding"]["decisions"])
    assert list(decided.values()) == [False, True]


@contextmanager
def served(tiny_folder: Path) -> Iterator[tuple[subprocess.Popen[str], RunningServer]]:
    """`foredraft serve` in a process of its own, which is killed at the end if it still runs."""
    program = "from foredraft.cli.main import run; run()"
    command = [sys.executable, "-c", program, "serve", "--model", str(tiny_folder), "--served-model-name", NAME]
    options = ["--port", "0", "--spec", "off", "--threads", "1", "--kv-cache-tokens", "32768"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "Serving tiny" in line, line
        port = int(line.partition("127.0.0.1:")[2].split(".")[0])
        yield process, RunningServer(None, None, port)  # type: ignore[arg-type]
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_running_requests_finish(tiny_folder: Path, offline: LLM) -> None:
    with served(tiny_folder) as (process, server):
        with send(server, {**LONG, "stream": True, "max_tokens": 1000}) as client:
            data = read_until(client, b'"content":"')
            process.send_signal(signal.SIGTERM)
            while server.get("/ready")[0] == 200:
                time.sleep(0.001)
            assert server.get("/health")[0] == 200
            assert server.post(CHAT, LONG)[0] == 503
            data += read_until(client, b"[DONE]")
        chunks = [json.loads(line) for line in re.findall(r"^data: (\{.*\})$", data.decode(), re.MULTILINE)]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        assert text == offline.chat(LONG["messages"], params, spec="off")[0].text
        assert process.wait(20) == 0


def test_a_second_signal_ends_answers_with_an_error(tiny_folder: Path) -> None:
    with served(tiny_folder) as (process, server):
        streamed, whole = (send(server, {**LONG, "n": 8, "stream": stream}) for stream in (True, False))
        with streamed, whole:
            while server.metric("vllm:num_requests_running") < 16:
                time.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # another one: two of a kind may arrive as one
            assert b"The server stopped" in read_until(streamed, b"[DONE]")
            refused = read_until(whole, b"}}")
            assert refused.startswith(b"HTTP/1.1 503") and b"The server stopped" in refused
        assert process.wait(20) == 0


def test_a_port_in_use_is_told_in_one_sentence(server: RunningServer) -> None:
    from foredraft.errors import InvalidParameter
    from foredraft.server.run import listen

    with pytest.raises(InvalidParameter, match=f"--port {server.port} cannot be used"):
        listen("127.0.0.1", server.port)


def test_a_service_refuses_a_spec_that_is_none(llm: LLM) -> None:
    with pytest.raises(ValueError, match="oracle"):
        Service(llm, [NAME], Limits(), ["oracle"])
