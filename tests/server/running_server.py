"""A real server in a thread, over a tiny model, and what tests want to know of it."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

from foredraft.llm import LLM
from foredraft.server.limits import Limits
from foredraft.server.run import DrainingServer, listen, make_server
from foredraft.server.service import Service
from tests.tiny_models import random_model, save_model

NAME = "tiny"
TEMPLATE = (
    "{% if mood is defined %}<s>mood: {{ mood }}\n{% endif %}"
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CANARY = {"model": NAME, "prompt": "A canary sings.", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def save_tiny_model(folder: Path) -> Path:
    save_model(random_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def load_tiny_model(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"spec": "ngram+suffix", "max_num_seqs": 8, "kv_cache_tokens": 8192, "threads": 1}
    return LLM(str(folder), **{**defaults, **options})


class RunningServer:
    """The server, its address, and plain HTTP without any client library."""

    def __init__(self, service: Service, server: DrainingServer, port: int) -> None:
        self.service = service
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> tuple[int, bytes, dict[str, str]]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        status, data, _ = self.request("POST", path, body, headers)
        return status, json.loads(data)

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        status, data, _ = self.request("GET", path, None, headers)
        return status, json.loads(data)

    def metric(self, name: str, key: str | None = None) -> float:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        text = self.request("GET", "/metrics", headers=headers)[1].decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    def until_idle(self, timeout: float = 10, key: str | None = None) -> None:
        """Until nothing runs or waits; then no block of the KV cache may be held."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        end = time.monotonic() + timeout
        while any(values := [self.metric(name, key) for name in names]):
            assert time.monotonic() < end, f"running, waiting and KV use are still {values}"
            time.sleep(0.01)

    def canary(self, **headers: str) -> str:
        status, body = self.post("/v1/completions", CANARY, **headers)
        assert status == 200, body
        return body["choices"][0]["text"]


@contextmanager
def running(llm: LLM, limits: Limits | None = None, **options: Any) -> Iterator[RunningServer]:
    """`options` are api_keys, log_prompts and sites, and those of Service."""
    for_app = {name: options.pop(name) for name in ("api_keys", "log_prompts", "sites") if name in options}
    service = Service(llm, options.pop("names", [NAME]), limits or Limits(), **options)
    server = make_server(service, **for_app)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield RunningServer(service, server, port)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
