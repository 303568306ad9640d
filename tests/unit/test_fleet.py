"""A fleet's options, its metrics on one page, and the command that starts it, all without Ray."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the packages of the extra `server`")

import yaml
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from foredraft.cli.main import run
from foredraft.errors import InvalidParameter
from foredraft.integrations.ray_serve.gateway import merged
from foredraft.integrations.ray_serve.options import FleetOptions, read_options

DOCS = Path(__file__).parents[2] / "docs"


class TestOptions:
    def test_numbers_may_be_texts(self) -> None:
        """`serve run APP name=value` gives nothing else."""
        options = read_options({"num_replicas": "4", "threads": "2", "exact": "false"})
        assert (options.num_replicas, options.threads, options.exact) == (4, 2, False)

    def test_limits_are_those_of_the_server(self) -> None:
        assert read_options({"limits": {"max_tokens": 7}}).limits.max_tokens == 7

    def test_a_replica_holds_as_many_as_run_and_as_many_more(self) -> None:
        assert FleetOptions(max_num_seqs=8).most_ongoing == 16
        assert FleetOptions(max_num_seqs=8, max_ongoing_requests=9).most_ongoing == 9

    def test_keys_are_not_shown(self) -> None:
        assert "secret" not in repr(read_options({"api_keys": ["secret"]}))

    @pytest.mark.parametrize(
        "args, sentence",
        [
            ({"replicas": 2}, "replicas is no option of replicas; there are model, "),
            ({"num_replicas": 0}, "num_replicas=0: Input should be greater than 0."),
            ({"num_replicas": "many"}, "num_replicas='many': Input should be a valid integer"),
            ({"limits": {"max_tokens": 0}}, "max_tokens=0 must be a number of at least 1."),
            ({"num_replicas": 3, "max_replicas": 2}, "max_replicas=2 must be at least num_replicas=3."),
            ({"api_keys": [""]}, "api_keys must not hold an empty key"),
        ],
    )
    def test_what_is_wrong_is_told(self, args: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InvalidParameter, match=re.escape(sentence)):
            read_options(args)

    def test_the_file_of_the_documentation_is_valid(self) -> None:
        config = yaml.safe_load((DOCS / "ray-serve.yaml").read_text(encoding="utf-8"))
        (application,) = config["applications"]
        module, _, name = application["import_path"].partition(":")
        assert callable(getattr(sys.modules[module], name))
        assert read_options(application["args"]).max_replicas


def page(engine: str, value: int) -> str:
    registry = CollectorRegistry()
    for name in ("vllm:prompt_tokens", "vllm:generation_tokens"):
        Counter(name, "Tokens.", ("engine",), registry=registry).labels(engine).inc(value)
    return generate_latest(registry).decode()


def test_metrics_of_all_replicas_are_one_page() -> None:
    text = merged([page("a", 1), page("b", 2)])
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family must not come twice"
    (tokens,) = (family for family in families if family.name == "vllm:generation_tokens")
    found = {sample.labels["engine"]: sample.value for sample in tokens.samples if sample.name.endswith("_total")}
    assert found == {"a": 1, "b": 2}
    assert merged([]) == ""


class TestCommand:
    @pytest.fixture
    def without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ray", "ray.serve"):
            monkeypatch.setitem(sys.modules, name, None)

    def sentence(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["foredraft", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and out == "" and err.count("\n") == 1
        return err

    @pytest.mark.usefixtures("without_ray")
    def test_without_ray_it_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        told = self.sentence(monkeypatch, capsys, "--replicas", "2")
        assert told == "--replicas needs Ray Serve; to get it: pip install 'foredraft[ray]'.\n"

    def test_no_replicas_are_no_server(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--replicas" in self.sentence(monkeypatch, capsys, "--replicas", "0")
