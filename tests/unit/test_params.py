"""What unset sampling fields mean, and what speculation strings say. What is refused stands in test_bad_input.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foredraft.params import MAX_SEED, NEUTRAL, SamplingParams
from foredraft.proposers.registry import ProposerChoice, Spec, parse_spec

MODEL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}  # min_p is left open


def sampling(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in NEUTRAL}


class TestResolved:
    def test_without_a_temperature_the_model_decides(self) -> None:
        assert sampling(SamplingParams().resolved(MODEL)) == {**MODEL, "min_p": 0.0}

    def test_without_either_it_is_greedy(self) -> None:
        assert sampling(SamplingParams().resolved({})) == {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

    @pytest.mark.parametrize("temperature", [0, 0.0, 0.3, 2.0])
    def test_a_temperature_makes_everything_unset_neutral(self, temperature: float) -> None:
        assert sampling(SamplingParams(temperature=temperature).resolved(MODEL)) == {
            **NEUTRAL,
            "temperature": temperature,
        }

    @pytest.mark.parametrize("field", ["top_p", "top_k", "min_p", "repetition_penalty"])
    def test_what_is_set_stays_and_does_not_unset_the_rest(self, field: str) -> None:
        fields: dict[str, Any] = {field: 1}
        params = SamplingParams(**fields).resolved(MODEL)
        assert sampling(params) == {"min_p": 0.0, **MODEL, field: 1}

    def test_zero_is_not_unset(self) -> None:
        params = SamplingParams(top_k=0, min_p=0.0).resolved({**MODEL, "min_p": 0.1})
        assert (params.top_k, params.min_p) == (0, 0.0)

    def test_everything_else_is_left_alone(self) -> None:
        params = SamplingParams(
            max_tokens=7, seed=3, stop="x", stop_token_ids=[1], ignore_eos=True, logprobs=2, n=2, logit_bias={5: 1}
        )
        before = {name: getattr(params, name) for name in SamplingParams.names() if name not in NEUTRAL}
        after = params.resolved({**MODEL, "max_tokens": 9, "seed": 4, "eos_token_id": 2})
        assert {name: getattr(after, name) for name in before} == before
        assert params.temperature is None, "the caller's object was changed"

    def test_resolving_twice_changes_nothing(self) -> None:
        once = SamplingParams().resolved(MODEL)
        assert once.resolved({"temperature": 1.9, "top_k": 3}) is once

    def test_model_defaults_are_checked_like_a_request(self) -> None:
        with pytest.raises(ValueError, match="temperature=-1"):
            SamplingParams().resolved({"temperature": -1.0})


class TestNormalised:
    @pytest.mark.parametrize(
        ("stop", "strings"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
    )
    def test_stop(self, stop: Any, strings: tuple[str, ...]) -> None:
        assert SamplingParams(stop=stop).stop == strings

    @pytest.mark.parametrize(("ids", "expected"), [(None, ()), ([3, 4], (3, 4)), ((0,), (0,)), ([], ())])
    def test_stop_token_ids(self, ids: Any, expected: tuple[int, ...]) -> None:
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == expected

    @pytest.mark.parametrize("name", sorted({*SamplingParams.names()} - {"max_tokens"}))
    def test_none_of_json_clients_is_the_default(self, name: str) -> None:
        fields: dict[str, Any] = {name: None}
        assert SamplingParams(**fields) == SamplingParams()
        assert SamplingParams(**fields).resolved(MODEL) == SamplingParams().resolved(MODEL)

    def test_logit_bias_of_json_clients(self) -> None:
        bias: dict[Any, float] = {"17": -100, 4: 0.5}
        assert SamplingParams(logit_bias=bias).logit_bias == {17: -100.0, 4: 0.5}

    @pytest.mark.parametrize(
        "fields",
        [
            {"max_tokens": 1},
            {"temperature": 100},
            {"temperature": 1e-6},
            {"stop": ("x" * 256,) * 64},
            {"stop_token_ids": tuple(range(1024))},
            {"logit_bias": dict.fromkeys(range(1024), -100.0)},
            {"repetition_penalty": 0.01},
            {"top_p": 1},
            {"top_p": 1e-9},
            {"max_tokens": 2**31 - 1},
            {"top_k": -1},
            {"top_k": 10**9},
            {"top_k": 2**31 - 1},
            {"stop_token_ids": (2**31 - 1,)},
            {"min_p": 1.0},
            {"seed": 0},
            {"seed": MAX_SEED},
            {"logprobs": 50, "prompt_logprobs": 0},
            {"presence_penalty": -2, "frequency_penalty": 2.0},
            {"repetition_penalty": 100.0},
            {"n": 256},
            {"acceptance": "match"},
        ],
        ids=str,
    )
    def test_borders_are_allowed(self, fields: dict[str, Any]) -> None:
        params = SamplingParams(**fields)
        assert {name: getattr(params, name) for name in fields} == fields

    def test_names_are_the_fields(self) -> None:
        assert set(NEUTRAL) | {"max_tokens", "seed", "stop", "logit_bias", "n"} < set(SamplingParams.names())


class TestSpec:
    @pytest.mark.parametrize(
        ("text", "spec"),
        [
            ("off", Spec()),
            (
                "auto",
                Spec(
                    (ProposerChoice("prediction"), ProposerChoice("suffix"), ProposerChoice("grammar")),
                    adaptive=True,
                    with_head=True,
                ),
            ),
            ("ngram", Spec((ProposerChoice("ngram"),))),
            ("early_exit", Spec((ProposerChoice("early_exit"),))),
            ("ngram:k=4", Spec((ProposerChoice("ngram", {"k": "4"}),))),
            ("ngram:k=4,max_n=8", Spec((ProposerChoice("ngram", {"k": "4", "max_n": "8"}),))),
            ("draft_model:model=/a/b=c", Spec((ProposerChoice("draft_model", {"model": "/a/b=c"}),))),
            ("draft_model:model=hub:name", Spec((ProposerChoice("draft_model", {"model": "hub:name"}),))),
            ("ngram+suffix", Spec((ProposerChoice("ngram"), ProposerChoice("suffix")))),
            ("suffix:k=8+ngram:k=2", Spec((ProposerChoice("suffix", {"k": "8"}), ProposerChoice("ngram", {"k": "2"})))),
            ("auto(ngram)", Spec((ProposerChoice("ngram"),), adaptive=True)),
            ("auto(ngram+suffix)", Spec((ProposerChoice("ngram"), ProposerChoice("suffix")), adaptive=True)),
            (
                "auto(ngram:k=4+suffix)",
                Spec((ProposerChoice("ngram", {"k": "4"}), ProposerChoice("suffix")), adaptive=True),
            ),
        ],
    )
    def test_good_strings(self, text: str, spec: Spec) -> None:
        assert parse_spec(text) == spec

    def test_off_is_not_adaptive(self) -> None:
        assert parse_spec("off") == Spec((), adaptive=False)


class TestRepr:
    def test_it_shows_what_was_set(self) -> None:
        assert repr(SamplingParams()) == "SamplingParams()"
        shown = repr(SamplingParams(max_tokens=8, temperature=0, stop="x", logit_bias={5: 1}))
        assert shown == "SamplingParams(max_tokens=8, temperature=0, stop=('x',), logit_bias={5: 1.0})"

    def test_it_can_be_read_back(self) -> None:
        params = SamplingParams(top_k=3, seed=1, grammar={"choice": ["a"]}, prediction=[1, 2], remember=False)
        assert eval(repr(params)) == params

    def test_the_docstring_tells_of_every_field(self) -> None:
        for name in SamplingParams.names():
            assert re.search(rf"^    (\w+, )*{name}\b", SamplingParams.__doc__ or "", re.MULTILINE), name
