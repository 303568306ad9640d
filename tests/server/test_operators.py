"""What a server tells those who run it: one line per request in its log, and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from foredraft.llm import LLM
from foredraft.server.metrics import SECONDS, Gaps
from tests.server.running_server import RunningServer, running
from tests.server.test_behaviour import CHAT, LONG
from tests.steady_controller import SteadyController


class TestLog:
    def test_one_line_per_request_without_its_texts(self, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "foredraft.server.log")
        body = {**LONG, "max_tokens": 3, "messages": [{"role": "user", "content": "a secret"}]}
        with running(llm) as server:
            server.post(CHAT, body)
            server.post(CHAT, {**body, "n": 0})
            server.get("/health")
        good, bad = (json.loads(record.message) for record in caplog.records)
        assert good["path"] == CHAT and good["status"] == 200 and good["completion_tokens"] == 3
        assert good["spec"] == "off" and good["finish"] == ["length"] and good["seconds"] >= good["first_token_s"] > 0
        assert bad["status"] == 400 and bad["error"].startswith("n=0")
        assert "secret" not in caplog.text
        counted = {"prompt_tokens", "completion_tokens", "queue_s", "first_token_s", "tokens_per_run"}
        told = {"time", "request", "client", "method", "path", "status", "seconds", "spec", "finish"}
        assert good.keys() == counted | told, "nothing that holds the answer"

    def test_prompts_on_request(self, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "foredraft.server.log")
        with running(llm, log_prompts=True) as server:
            _, answer = server.post("/v1/completions", {"prompt": "a secret", "max_tokens": 3})
        (line,) = (json.loads(record.message) for record in caplog.records)
        assert line["prompts"] == ["a secret"] and line["answers"] == [answer["choices"][0]["text"]]


def test_metrics_under_the_names_of_vllm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # A request's own options are left to the controller, which must not depend on the clock here.
    monkeypatch.setattr(llm.engine.speculation, "controller", SteadyController())
    with running(llm) as server:
        body = {**LONG, "max_tokens": 64, "spec": "ngram:k=4", "n": 2}
        _, answer = server.post(CHAT, body)
        spec = answer["metrics"]["speculative_decoding"]
        assert spec["drafts"] > 0
        assert server.metric("vllm:spec_decode_num_drafts_total") == spec["drafts"]
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") == spec["drafted_tokens"]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == spec["accepted_tokens"]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") == spec["accepted_tokens"]
        assert server.metric("vllm:generation_tokens_total") == 128 == answer["usage"]["completion_tokens"]
        assert server.metric("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
        assert server.metric("vllm:request_success_total") == 2
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert server.metric(f"vllm:{name}_seconds_count") == 2
        assert server.metric("foredraft:drafted_tokens_by_proposer_total") == spec["drafted_tokens"]


def test_the_histogram_of_every_token_is_the_librarys() -> None:
    labels = {"model_name": "tiny", "engine": "0"}
    library, about = CollectorRegistry(), "Between two deliveries of tokens of one sequence."
    expected = Histogram("vllm:inter_token_latency_seconds", about, list(labels), registry=library, buckets=SECONDS)
    ours, gaps = CollectorRegistry(), Gaps(labels)
    ours.register(gaps)
    for seconds in (0.0, 0.001, 0.0011, 0.3, 640.0, 1e9):
        expected.labels(**labels).observe(seconds)
        gaps.observe(seconds)
    lines = generate_latest(library).decode().splitlines()
    assert generate_latest(ours).decode().splitlines() == [line for line in lines if "_created" not in line]


def test_the_dashboard_shows_metrics_that_there_are(server: RunningServer) -> None:
    server.post(CHAT, {**LONG, "max_tokens": 64, "spec": "ngram"})
    server.post(CHAT, {**LONG, "n": 0})
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text()
    shown = set(re.findall(r"(?:vllm|foredraft):\w+", dashboard))
    told = server.request("GET", "/metrics")[1].decode()
    known = set(re.findall(r"^# TYPE (\S+)", told, re.MULTILINE))
    assert len(shown) > 20
    assert {name for name in shown if name not in known and name.removesuffix("_bucket") not in known} == set()
