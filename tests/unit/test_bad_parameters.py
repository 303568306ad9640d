"""Bad parameters of a request, each with the sentence that a person reads."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.errors import ForedraftError, InvalidParameter

PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": -1}, "min_tokens=-1 must be a whole number from 0 to 2147483647."),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 must be at most max_tokens=8."),
    ({"max_tokens": 0}, "max_tokens=0 must be a whole number from 1 to 2147483647."),
    ({"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number from 1 to 2147483647."),
    ({"max_tokens": None}, "max_tokens=None must be a whole number from 1 to 2147483647."),
    ({"max_tokens": True}, "max_tokens=True must be a whole number from 1 to 2147483647."),
    ({"temperature": -0.1}, "temperature=-0.1 must be 0 (greedy) or a number from 1e-06 to 100."),
    ({"temperature": float("nan")}, "temperature=nan must be 0 (greedy) or a number from 1e-06 to 100."),
    ({"temperature": 1e-300}, "temperature=1e-300 must be 0 (greedy) or a number from 1e-06 to 100."),
    ({"temperature": "hot"}, "temperature='hot' must be 0 (greedy) or a number from 1e-06 to 100."),
    ({"top_p": 0}, "top_p=0 must be a number above 0 up to 1."),
    ({"top_p": 1.5}, "top_p=1.5 must be a number above 0 up to 1."),
    ({"top_k": -2}, "top_k=-2 must be a whole number from -1 to 2147483647."),
    ({"min_p": 2}, "min_p=2 must be a number from 0 to 1."),
    ({"seed": -1}, "seed=-1 must be a whole number from 0 to 9223372036854775807."),
    ({"stop": ""}, "stop='' must be a non-empty string or a list of non-empty strings."),
    ({"stop": [1]}, "stop=[1] must be a non-empty string or a list of non-empty strings."),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be a list of token ids (whole numbers from 0 to 2147483647)."),
    ({"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False."),
    ({"logprobs": 51}, "logprobs=51 must be a whole number from 0 to 50."),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1 must be a whole number from 0 to 50."),
    ({"presence_penalty": 3}, "presence_penalty=3 must be a number from -2 to 2."),
    ({"frequency_penalty": -3}, "frequency_penalty=-3 must be a number from -2 to 2."),
    ({"repetition_penalty": 1e-44}, "repetition_penalty=1e-44 must be a number from 0.01 to 100."),
    ({"stop": ["x"] * 65}, "stop has 65 strings; at most 64 are allowed."),
    ({"stop": ["x", "y" * 257]}, f"stop has the string '{'y' * 76}... of 257 characters; at most 256 are allowed."),
    (
        {"stop": [7] * 64},
        f"stop={str([7] * 64)[:77]}... must be a non-empty string or a list of non-empty strings.",
    ),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids has 1025 token ids; at most 1024 are allowed."),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 entries; at most 1024 are allowed."),
    ({"seed": 10**5000}, f"seed=a int that is too long to show must be a whole number from 0 to {2**63 - 1}."),
    ({"acceptance": "m" * 999}, f"acceptance='{'m' * 76}... is not known; use match, rejection, block."),
    ({"logit_bias": {"a": 1}}, "logit_bias has the entry 'a': 1; it must map token ids to numbers from -100 to 100."),
    ({"logit_bias": {5: 101}}, "logit_bias has the entry 5: 101; it must map token ids to numbers from -100 to 100."),
    ({"logit_bias": {True: 1}}, "logit_bias has the entry True: 1; it must map token ids to numbers from -100 to 100."),
    ({"logit_bias": {1.5: 1}}, "logit_bias has the entry 1.5: 1; it must map token ids to numbers from -100 to 100."),
    (
        {"logit_bias": {5: float("nan")}},
        "logit_bias has the entry 5: nan; it must map token ids to numbers from -100 to 100.",
    ),
    ({"logit_bias": {5: None}}, "logit_bias has the entry 5: None; it must map token ids to numbers from -100 to 100."),
    ({"logit_bias": [5]}, "logit_bias=[5] must map token ids to numbers from -100 to 100."),
    ({"n": 0}, "n=0 must be a whole number from 1 to 256."),
    ({"acceptance": "maybe"}, "acceptance='maybe' is not known; use match, rejection, block."),
]


@pytest.mark.parametrize(("fields", "sentence"), PARAMETERS, ids=[sentence[:40] for _, sentence in PARAMETERS])
def test_bad_parameters(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ForedraftError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == sentence


WRONG: list[Any] = [float("nan"), float("inf"), -float("inf"), "1", b"1", object(), {1}, 1j]


@pytest.mark.parametrize("number", [2**31, 2**63, 10**30, 10**400, 10**5000], ids=lambda n: f"{n.bit_length()} bits")
@pytest.mark.parametrize(
    "field", ["max_tokens", "top_k", "n", "logprobs", "prompt_logprobs", "stop_token_ids", "logit_bias"]
)
def test_every_whole_number_has_an_upper_border(field: str, number: int) -> None:
    value: Any = {"stop_token_ids": [number], "logit_bias": {number: 1.0}}.get(field, number)
    with pytest.raises(InvalidParameter, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_too_many_entries_are_refused_before_any_is_looked_at(field: str) -> None:
    with pytest.raises(InvalidParameter, match="at most"):
        SamplingParams(**{field: [None] * 2000})


@pytest.mark.parametrize("name", SamplingParams.names())
def test_no_parameter_takes_what_is_not_of_its_kind(name: str) -> None:
    for value in (*WRONG, True):
        if (name, value) in (
            ("stop", "1"),
            ("cache_salt", "1"),
            ("prediction", "1"),
            ("ignore_eos", True),
            ("remember", True),
        ):
            continue
        with pytest.raises(ForedraftError, match=f"{name}="):
            SamplingParams(**{name: value})
