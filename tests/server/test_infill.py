"""Fill-in-the-middle through all routes that have it, and what editors ask first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.models import catalog
from foredraft.models.fill_in import FillInTokens
from foredraft.params import SamplingParams
from tests.server.running_server import NAME, RunningServer, load_tiny_model, running

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def coder(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server whose model takes `<s>` for the beginning of every part. Nothing ends a filling."""
    llm = load_tiny_model(tiny_folder)
    vars(llm.tokenizer)["fill_in"] = FillInTokens("<s>", "<s>", "<s>")
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def expected(offline: LLM) -> str:
    return offline.generate("<s>one <s> two<s>", SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))[0].text


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part) for part in data.decode().split("data: ")[1:]]


def test_infill(coder: RunningServer, expected: str) -> None:
    body = {"input_prefix": "one ", "input_suffix": " two", "n_predict": 9, **GREEDY}
    status, answer = coder.post("/infill", body)
    assert status == 200, answer
    assert answer["content"] == expected and answer["stop"] is True and answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 9
    *parts, last = events(coder.request("POST", "/infill", {**body, "stream": True})[1])
    assert "".join(part["content"] for part in parts) == expected and not any(part["stop"] for part in parts)
    assert last["stop"] is True and last["content"] == ""


def test_control_tokens_in_code_are_text(coder: RunningServer, offline: LLM) -> None:
    """The prompt has the three that the format writes, and none of those that the file spells out."""
    body = {"input_prefix": "a<s>b", "input_suffix": "c", "n_predict": 1, **GREEDY}
    text = coder.post("/infill", body)[1]
    begin = offline.tokenizer.bos_token_id
    tokens = coder.service.llm.tokenizer.encode_fill_in("a<s>b", "c")
    assert begin is not None and tokens.count(begin) == 3
    assert text["tokens_evaluated"] == len(tokens)


def test_other_files_and_a_beginning(coder: RunningServer, offline: LLM) -> None:
    body = {
        "input_prefix": "one",
        "input_suffix": "two",
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "prompt": "begun",
        "n_predict": 4,
        **GREEDY,
    }
    written = "a.py\nx = 1\n<s>one<s>two<s>begun"
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert coder.post("/infill", body)[1]["content"] == offline.generate(written, params)[0].text


def test_what_an_editor_sends(coder: RunningServer, expected: str) -> None:
    """The body of llama.cpp's plugins for vim and Visual Studio Code. What has no meaning here is named."""
    limits = {"samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 4}
    body = {
        **{"id_slot": 0, "input_prefix": "one ", "input_suffix": " two", "input_extra": [], "prompt": ""},
        **{"n_predict": 9, "top_k": 40, "top_p": 0.99, "stop": [], "stream": False, "cache_prompt": True},
        **limits,
        "response_fields": ["content", "timings/predicted_n", "truncated"],
        **GREEDY,
    }
    status, data, headers = coder.request("POST", "/infill", body)
    assert status == 200 and json.loads(data)["content"] == expected, data
    unknown = {"id_slot", "cache_prompt", "response_fields", *limits}
    assert set(headers["x-foredraft-ignored"].split(", ")) == unknown
    warm_up = {**body, "n_predict": 0, "input_extra": [{"filename": "a.py", "text": "x = 1", "time": 1.5}]}
    status, answer = coder.post("/infill", warm_up)
    assert status == 200 and answer["content"] == "", answer


def test_the_other_routes(coder: RunningServer, expected: str) -> None:
    body = {"model": NAME, "prompt": "one ", "suffix": " two", "max_tokens": 9, **GREEDY}
    assert coder.post("/v1/completions", body)[1]["choices"][0]["text"] == expected
    body = {"model": NAME, "prompt": "one ", "suffix": " two", "options": {"num_predict": 9}, "stream": False, **GREEDY}
    assert coder.post("/api/generate", body)[1]["response"] == expected
    plain = {"model": NAME, "prompt": "one ", "max_tokens": 9, **GREEDY}
    texts = [
        coder.post("/v1/completions", {**plain, **field})[1]["choices"][0]["text"] for field in ({}, {"suffix": ""})
    ]
    assert texts[0] == texts[1] != expected
    status, refused = coder.post("/v1/completions", {"prompt": [1, 2], "suffix": "x"})
    assert (status, refused["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ],
)
def test_a_model_without_such_tokens(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(path, body)
    assert status == 400 and "no tokens for fill-in-the-middle" in answer["error"]["message"]


def test_what_editors_ask_first(coder: RunningServer, server: RunningServer) -> None:
    _, props = coder.get("/props")
    assert props["fills_in"] and not server.get("/props")[1]["fills_in"]
    assert props["total_slots"] == 8 and props["model_alias"] == NAME and "messages" in props["chat_template"]
    status, data, _ = coder.request("GET", "/slots")
    places = json.loads(data)
    assert status == 200 and len(places) == 8 and not any(place["is_processing"] for place in places)


@pytest.mark.slow
def test_a_real_coder_fills_a_gap() -> None:
    """Its file is in the hub's cache, or where FOREDRAFT_CODER says."""
    entry = catalog.in_catalogue("qwen2.5-coder-0.5b")
    assert entry is not None
    file = os.environ.get("FOREDRAFT_CODER") or entry.path
    if file is None:
        pytest.skip("Qwen2.5-Coder 0.5B is not here; foredraft pull qwen2.5-coder-0.5b fetches it")
    llm = LLM(str(file), spec="suffix", max_model_len=1024)
    with running(llm) as server:
        body = {
            "input_prefix": "def area(width, height):\n    return width * ",
            "input_suffix": "\n\nprint(area(3, 4))\n",
            "n_predict": 16,
            "temperature": 0,
        }
        answer = server.post("/infill", body)[1]
    assert answer["content"].startswith("height")
    names = {name: place for place, name in enumerate(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))}
    ids = {llm.tokenizer.vocabulary()[name]: place for name, place in names.items()}
    prompt = llm.tokenizer.encode_fill_in("one <|im_end|>", "two")
    assert [ids[token] for token in prompt if token in ids] == [0, 1, 2]
    assert not set(prompt) & llm.engine.eos_token_ids
