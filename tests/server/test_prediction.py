"""Predicted outputs, with the official `openai` client: the text is the same with any prediction, and usage says how
much of it was right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer

openai = pytest.importorskip("openai", reason="the client is tested where it is installed")

REQUEST: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 40}
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module", autouse=True)
def letters(server: RunningServer) -> None:
    """Answers have letters only, so that their text has the tokens that were drawn."""
    tokens = server.post("/tokenize", {"prompt": "abcdefghijkl", "add_special_tokens": False})[1]["tokens"]
    REQUEST["logit_bias"] = {str(token): 80 for token in tokens}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: Any, prediction: Any = None, spec: str = "prediction") -> tuple[str, int, int]:
    fields = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    extra = {"ignore_eos": True, "spec": spec}
    answer = client.chat.completions.create(messages=HELLO, **REQUEST, **fields, extra_body=extra)
    details = answer.usage.completion_tokens_details
    return (
        answer.choices[0].message.content,
        details.accepted_prediction_tokens,
        details.rejected_prediction_tokens,
    )


def test_a_right_prediction_is_accepted(client: Any) -> None:
    text, *none = ask(client)
    assert none == [0, 0]
    for content in (text, [{"type": "text", "text": text}]):
        same, accepted, rejected = ask(client, content)
        assert same == text and accepted > 20 and accepted > 3 * rejected


def test_one_that_is_right_but_for_a_part_of_it_is_found_again(client: Any) -> None:
    text, *_ = ask(client)
    same, accepted, _ = ask(client, f"{text[:12]} something else {text[16:]}")
    assert same == text and accepted > 10


def test_a_wrong_one_is_rejected(client: Any) -> None:
    text, *_ = ask(client)
    same, accepted, rejected = ask(client, "zzzz qqqq " * 30)
    assert same == text and accepted < 10 and rejected > 0
    assert ask(client, text, spec="off") == (text, 0, 0)


@pytest.mark.parametrize(
    "prediction", [{"type": "content"}, {"type": "picture", "content": "x"}, "x", {"type": "content", "content": 5}]
)
def test_what_is_none_is_refused(server: RunningServer, prediction: Any) -> None:
    status, body = server.post("/v1/chat/completions", {**REQUEST, "messages": HELLO, "prediction": prediction})
    assert (status, body["error"]["param"]) == (400, "prediction")


def test_one_that_is_too_long_is_refused(server: RunningServer) -> None:
    prediction = {"type": "content", "content": "ab " * 60_000}
    status, body = server.post("/v1/chat/completions", {**REQUEST, "messages": HELLO, "prediction": prediction})
    assert (status, body["error"]["param"]) == (400, "prediction"), body
