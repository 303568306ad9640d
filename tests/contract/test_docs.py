"""What the documentation shows, works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.errors import InvalidPrompt, InvalidSpec
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.proposers import registry
from foredraft.proposers.registry import parse_spec
from tests.tiny_models import random_model, save_model

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_proposer_drafts_and_changes_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "adding-a-proposer.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "echo_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._BUILT_IN, "echo", "echo_of_the_docs:Echo")
    check_echo(tmp_path)
    with pytest.raises(InvalidSpec, match="from 1 to 64"):
        parse_spec("echo:k=65")
    monkeypatch.undo()

    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.delitem(registry._BUILT_IN, "echo", raising=False)  # where somebody follows the page
    monkeypatch.setattr(registry, "_REGISTERED", {})
    foredraft.register_proposer(namespace["Echo"])
    check_echo(tmp_path)


def check_echo(tmp_path: Path) -> None:
    llm = LLM(str(save_model(random_model("llama"), tmp_path / "model")))
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logit_bias={7: 8.0})
    off, on = (llm.generate([[5, 6, 7]], params, spec=spec)[0] for spec in ("off", "ngram+echo:k=5"))
    assert on.token_ids == off.token_ids
    assert on.metrics.drafted_tokens > 0


@pytest.mark.usefixtures("default_model")
def test_the_page_of_the_library_runs(capsys: pytest.CaptureFixture[str]) -> None:
    testclient = pytest.importorskip("fastapi.testclient", reason="the page shows a server")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "my_server"}
    for code in blocks:
        exec(code.replace("from __future__", ""), namespace)
    told = capsys.readouterr().out
    assert "LLM('smollm2-135m', spec='auto'" in told and "<RequestOutput text=" in told
    server = blocks[-1]
    assert "AsyncEngine" in server and len([line for line in server.splitlines() if line]) <= 15
    with testclient.TestClient(namespace["app"]) as client:
        answered = client.get("/ask", params={"question": "Name three rivers."})
        assert answered.status_code == 200 and answered.text
        with pytest.raises(InvalidPrompt, match="tokens"):
            client.get("/ask", params={"question": "very " * 10_000})
        assert namespace["engine"].is_alive
    assert not namespace["engine"].is_alive


@pytest.mark.parametrize("page", ["../README.md", "usage.md", "grammars.md"])
@pytest.mark.usefixtures("default_model")
def test_the_first_lines_of_python_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out


def test_every_proposer_and_option_is_on_its_page() -> None:
    from dataclasses import fields
    from importlib import import_module

    page = (DOCS / "proposers.md").read_text()
    for name, place in registry._BUILT_IN.items():
        module, class_name = place.split(":")
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for option in fields(getattr(import_module(module), class_name).Options):
            assert f"`{option.name}=" in row, f"{name}: {option.name}"
