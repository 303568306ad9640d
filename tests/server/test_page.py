"""The page's files and what they are fed with: types, policy, the trace of a stream, and the load."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from foredraft.server.page import FILES
from tests.server.running_server import NAME, RunningServer

CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "la la la la la la la la"}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "require-trusted-types-for": "'script'",
}


def chunks(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    status, data, _ = server.request("POST", "/v1/chat/completions", {**CHAT, "stream": True, **fields})
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def choices(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(server, **fields) for choice in chunk["choices"]]


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_files_come_with_their_type_and_a_policy(server: RunningServer, path: str) -> None:
    status, data, headers = server.request("GET", path)
    name = path.rpartition("/")[2] or "index.html"
    assert (status, data) == (200, FILES[name])
    assert headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
    assert headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy | POLICY == policy
    assert "unsafe" not in headers["content-security-policy"]
    assert server.request("GET", path, headers={"if-none-match": headers["etag"]})[:2] == (304, b"")


@pytest.mark.parametrize(
    "name", ["", "page.py", "../page.py", "..%2fpage.py", "%2e%2e/app.py", "index.html/", "a%00.js"]
)
def test_nothing_else_is_served(server: RunningServer, name: str) -> None:
    assert server.request("GET", f"/static/{name}")[0] in (307, 404)


@pytest.mark.parametrize("name", FILES)
def test_files_name_nothing_outside_and_make_no_html_of_text(name: str) -> None:
    text = FILES[name].decode()
    assert text.count("\n") < 400
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"')]*", text)) - {"http://www.w3.org/2000/svg"}
    assert urls == set()
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if name.endswith(".html"):
        assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
        linked = {path.removeprefix("/static/") for path in re.findall(r'(?:src|href)="(/static/[^"]*)"', text)}
        assert linked <= FILES.keys() and linked
    for imported in re.findall(r'from "([^"]*)"', text) if name.endswith(".js") else ():
        assert imported.removeprefix("./") in FILES


@pytest.mark.parametrize("spec", ["off", "ngram+suffix"])
def test_a_trace_adds_up_to_the_answer(server: RunningServer, spec: str) -> None:
    plain = choices(server, spec=spec)
    assert not any("speculation_trace" in choice for choice in plain)
    text = "".join(choice["delta"].get("content", "") for choice in plain)
    found = chunks(server, spec=spec, speculation_trace=True)
    steps = [step for chunk in found for choice in chunk["choices"] for step in choice.get("speculation_trace", ())]
    tokens = [token for step in steps for token in step["tokens"]]
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) == CHAT["max_tokens"]
    report = found[-1]["metrics"]["speculative_decoding"]
    assert len(steps) == report["target_runs"]
    assert sum(len(step["draft"]["tokens"]) for step in steps) == report["drafted_tokens"]
    assert sum(len(step["accepted"]) for step in steps) == report["accepted_tokens"]
    assert (report["accepted_tokens"] > 0) == (spec != "off")
    for step in steps:
        origins = [step["draft"]["origins"][node] for node in step["accepted"]]
        assert [token["origin"] for token in step["tokens"]][: len(origins)] == origins


def test_a_trace_needs_a_stream(server: RunningServer) -> None:
    status, body = server.post("/v1/chat/completions", {**CHAT, "speculation_trace": True})
    assert status == 400 and body["error"]["param"] == "speculation_trace"


def test_stats(server: RunningServer) -> None:
    server.until_idle()
    status, stats = server.get("/v1/stats")
    assert status == 200
    assert (stats["model"], stats["running"], stats["waiting"], stats["kv_use"]) == (NAME, 0, 0, 0)
    assert stats["spec"] == "ngram+suffix" and {"off", "auto", "ngram", "suffix"} <= set(stats["allowed_specs"])


def test_the_page_of_routes(server: RunningServer) -> None:
    status, data, headers = server.request("GET", "/docs")
    text = data.decode()
    assert status == 200 and headers["content-type"].startswith("text/html") and "<script" not in text
    assert "unsafe" not in headers["content-security-policy"]
    schema = json.loads(server.request("GET", "/openapi.json")[1])
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in text
    ref = '<a href="#ChatMessage">ChatMessage</a>'
    assert f"<td><code>messages</code></td><td>list of {ref}</td><td>yes</td><td></td>" in text
    assert "<td><code>temperature</code></td><td>number</td><td></td>" in text
    assert "<td>the client&#x27;s own draft of the answer</td>" in text
    assert "<td><code>arguments</code></td><td>string</td><td>yes</td>" in text.partition('id="CalledFunction"')[2]
    places = re.findall(r' id="([^"]+)"', text)
    assert len(places) == len(set(places))
    for link in re.findall(r'href="([^"]+)"', text):
        assert link.removeprefix("#") in places if link.startswith("#") else server.request("GET", link)[0] == 200, link
