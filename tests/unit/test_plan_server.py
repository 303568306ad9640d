"""`foredraft plan --vllm-metrics`: what a running server's counters say, read over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foredraft.integrations.vllm_metrics import parse_metrics
from tests.unit.plan_command import CURVE, Command, fails_with_one_sentence, plan_command, written

LABELS = 'engine="{engine}",model_name="some/model"'


def metrics(drafts: float, positions: list[float], length: float, engines: int = 1, generated: float = 0) -> str:
    """As vLLM writes them; the counts are spread over its engines."""
    counts = {"drafts": drafts, "draft_tokens": drafts * length, "accepted_tokens": sum(positions)}
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.", "up 1"]
    for engine in range(engines):
        labels = LABELS.format(engine=engine)
        for name, value in counts.items():
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {value / engines}")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} 1.78e+09")
        for place, value in enumerate(positions):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{labels},position="{place}"}} {value / engines}')
        lines.append(f"vllm:generation_tokens_total{{{labels}}} {generated / engines}")
        lines.append(f"vllm:num_requests_running{{{labels}}} {4 / engines}")
    return "\n".join(lines) + "\n"


class Server(ThreadingHTTPServer):
    body = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(self.server.body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quietly."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return plan_command(monkeypatch, capsys)


def test_what_it_earns_and_which_length_it_should_have(server: Server, command: Command) -> None:
    """Acceptance 0.8, 0.75, then 0.1: the third draft token does not pay for its cost."""
    server.body = metrics(1000, [800, 600, 60], 3, generated=4920)
    record = command("--vllm-metrics", server.url, "--cost", "0.1", "--json").record
    told = record["server"]
    assert told["acceptance_per_depth"] == pytest.approx([0.8, 0.75, 0.1])
    assert (told["k"], told["draft_length"], told["running"]) == (3, 3, 4)
    assert told["tokens_per_draft"] == pytest.approx(2.46)
    assert told["speedup"] == pytest.approx(2.46 / 1.3) == record["table"][3]["speedup"]
    assert record["best_k"] == 2 and record["speedup"] == pytest.approx(2.4 / 1.2)
    assert record["table"][4]["expected_tokens"] == pytest.approx(2.466), "deeper it stays at 0.1"
    out = command("--vllm-metrics", f"{server.url}/metrics", "--cost", "0.1").out
    assert "A run with a draft gives 2.46 tokens for 3.0 draft tokens of at most 3: 1.89 times as fast" in out
    assert "Of all generated tokens, 29.7 % were draft tokens." in out
    assert "Set num_speculative_tokens=2: 2.00 times as fast as plain decoding, only 5.7 % more than now." in out


def test_all_engines_count_together() -> None:
    one = parse_metrics(metrics(1000, [800, 600], 2), "here")
    assert parse_metrics(metrics(1000, [800, 600], 2, engines=4), "here") == one
    assert one.k == 2 and one.acceptances == [0.8, 0.75]


def test_a_server_that_should_not_draft(server: Server, command: Command) -> None:
    server.body = metrics(1000, [100, 5, 0], 3)
    record = command("--vllm-metrics", server.url, "--cost", "0.2", "--json").record
    assert record["best_k"] == 0 and "Turn it off" in record["recommendation"]


def test_longer_drafts_are_an_assumption(server: Server, command: Command) -> None:
    server.body = metrics(1000, [900, 810], 2)
    result = command("--vllm-metrics", server.url, "--k-max", "6")
    assert "(an assumption: give --cost)" in result.out
    assert "Set num_speculative_tokens=6" in result.out and "their acceptance is assumed" in result.out
    assert "try a larger --k-max" in result.out


def test_load_makes_rows_expensive(server: Server, command: Command, tmp_path: Path) -> None:
    """Four running requests: a draft of k tokens makes runs of 4·(k + 1) rows."""
    server.body = metrics(1000, [700, 490, 343], 3)
    curve = written(tmp_path / "verify.json", CURVE)
    record = command("--vllm-metrics", server.url, "--cost", "0.01", "--verify-cost", curve, "--json").record
    assert record["table"][1]["speedup"] == pytest.approx(1.7 / (0.01 + 0.016 / 0.013))
    assert 0 < record["best_k"] < 16


def test_what_cannot_be_read_is_named(server: Server, command: Command) -> None:
    server.body = "up 1\n"
    for arguments, sentence in [
        (["--vllm-metrics", server.url], "counts no drafts"),
        (["--vllm-metrics", "localhost:8000"], "must be an address such as"),
        (["--vllm-metrics", "http://127.0.0.1:9"], "cannot be read"),
        (["--vllm-metrics", f"{server.url}/nothing"], "cannot be read"),
        (["--vllm-metrics", server.url, "--alpha", "0.5"], "finds acceptance itself"),
    ]:
        result = command(*arguments)
        assert fails_with_one_sentence(result) and sentence in result.err, result
