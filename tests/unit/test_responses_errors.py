"""An error in the middle of a stream of /v1/responses is the event that OpenAI's clients expect."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("fastapi", reason="the server needs foredraft[server]")
from foredraft.answers import AnswerFormat
from foredraft.server.errors import ApiError
from foredraft.server.openai_responses import ResponsesAnswer, ResponsesRequest
from foredraft.server.tools import ToolChoice


def test_an_error_keeps_the_type_of_its_event() -> None:
    generation = cast(Any, SimpleNamespace(id="1", answer_format=AnswerFormat()))
    answer = ResponsesAnswer(generation, "model", ResponsesRequest(model="model", input="hello"), ToolChoice())
    told = answer.failure(ApiError(500, "It broke.")).decode()
    name, data = told.strip().split("\n")
    sent = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert sent == {"type": "error", "sequence_number": 0, "code": None, "message": "It broke.", "param": None}
