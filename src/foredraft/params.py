"""SamplingParams: what a request may ask for, checked when it is made, so that nothing bad reaches the engine loop."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from foredraft.errors import InvalidParameter

ACCEPTANCE_RULES = ("match", "rejection", "block")
MAX_LOGPROBS = 50
MAX_SEED = 2**63 - 1
MAX_WHOLE = 2**31 - 1  # of counts and token ids: what backends and files hold in 32 bits
MAX_N = 256
MAX_SALT_LENGTH = 256
MAX_STOPS = 64
MAX_STOP_LENGTH = 256  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_PREDICTION_LENGTH = 65_536  # characters or token ids of a predicted output
MAX_GRAMMAR_LENGTH = 65_536  # characters of a grammar, written as JSON
_GRAMMAR_KINDS = ("regex", "choice", "lark", "gbnf")  # anything else is a JSON schema
_GRAMMAR_FORMS = 'a JSON schema, {"regex": "…"}, {"choice": ["…", …]}, {"lark": "…"} or {"gbnf": "…"}'
MIN_TEMPERATURE = 1e-6  # below that, and above 0, float32 divides by zero

# What an unset sampling field means once a temperature is set.
NEUTRAL: dict[str, float | int] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_NEVER_NONE = (
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "acceptance",
    "cache_salt",
    "remember",
    "min_tokens",
)


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop: `SamplingParams(max_tokens=64, temperature=0.8, seed=1)`.

    With `temperature=None` the model's own generation config fills every unset sampling field (greedy if it has none);
    once a temperature is given, unset fields are neutral. None, which JSON clients send for what they leave open, is
    the default of every field but `max_tokens`, where it could also mean "no limit". Raises InvalidParameter, a
    ValueError, for what is out of range.

    max_tokens          the most tokens of an output
    temperature         0 is greedy
    top_p, top_k, min_p which tokens are kept: the likeliest up to this total probability, so many of them (0 or -1:
                        all), those above this fraction of the likeliest one's probability
    seed                repeats a text; one is drawn and reported when None
    stop                a string or strings that end the output and are not part of it
    stop_token_ids      tokens that end the output
    ignore_eos          whether the output goes on after the token that ends an answer
    min_tokens          before so many, no end-of-text token, stop token or stop string ends the output
    logprobs            log probabilities of the output's tokens, and of so many best ones beside each
    prompt_logprobs     the same of the prompt's
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias   as in OpenAI's and Hugging Face's interfaces
    n                   outputs of one prompt
    acceptance          the rule that accepts draft tokens: "match", "rejection" or "block"
    grammar             what the output may be: a JSON schema, {"regex": …}, {"choice": […]}, {"lark": …}, {"gbnf": …}
    prediction          what the output is expected to be, a text or token ids: drafts come from it
    cache_salt          prefix cache and remembered answers are shared only among requests of equal salts
    remember            False: once it has ended, neither the prefix cache nor a proposer keeps anything of it
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    acceptance: str = "match"
    grammar: Mapping[str, Any] | None = None
    prediction: str | list[int] | tuple[int, ...] | None = None
    cache_salt: str = ""
    remember: bool = True

    def __repr__(self) -> str:
        """The fields that are not as they are by default, as one writes them."""
        given = [(name, getattr(self, name)) for name in self.names()]
        set_apart = [f"{name}={value!r}" for name, value in given if value != getattr(_DEFAULTS, name)]
        return f"SamplingParams({', '.join(set_apart)})"

    def __post_init__(self) -> None:
        for name in _NEVER_NONE:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(SamplingParams, name))
        _whole(self, "max_tokens", low=1, high=MAX_WHOLE)
        _whole(self, "min_tokens", low=0, high=MAX_WHOLE)
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}.")
        _temperature(self)
        _number(self, "top_p", low=0.0, high=1.0, open_low=True)
        _whole(self, "top_k", low=-1, high=MAX_WHOLE)
        _number(self, "min_p", low=0.0, high=1.0)
        _whole(self, "seed", low=0, high=MAX_SEED)
        _whole(self, "logprobs", low=0, high=MAX_LOGPROBS)
        _whole(self, "prompt_logprobs", low=0, high=MAX_LOGPROBS)
        _number(self, "presence_penalty", low=-2.0, high=2.0)
        _number(self, "frequency_penalty", low=-2.0, high=2.0)
        _number(self, "repetition_penalty", low=0.01, high=100.0)
        _whole(self, "n", low=1, high=MAX_N)
        for name in ("ignore_eos", "remember"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name}={_shortened(getattr(self, name))} must be True or False.")
        if self.acceptance not in ACCEPTANCE_RULES:
            raise InvalidParameter(
                f"acceptance={_shortened(self.acceptance)} is not known; use {', '.join(ACCEPTANCE_RULES)}."
            )
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_LENGTH:
            raise InvalidParameter(
                f"cache_salt={_shortened(self.cache_salt)} must be a text of at most {MAX_SALT_LENGTH} characters."
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "grammar", _grammar(self.grammar))
        object.__setattr__(self, "prediction", _prediction(self.prediction))

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether penalties or a bias change logits before tokens are drawn."""
        return bool(
            self.repetition_penalty not in (None, 1)
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    def resolved(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        """These params with every unset sampling field filled in."""
        defaults = {**NEUTRAL, **model_defaults} if self.temperature is None else NEUTRAL
        unset: dict[str, Any] = {name: defaults[name] for name in NEUTRAL if getattr(self, name) is None}
        return replace(self, **unset) if unset else self

    @cached_property
    def stop_token_set(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids or ())

    @cached_property
    def draw_settings(self) -> tuple[float, float, float, float]:
        """Of resolved params: temperature, top-p, the logarithm of min-p and top-k (0: no limit)."""
        min_p = math.log(self.min_p) if self.min_p else -math.inf
        return self.temperature or 0.0, 1.0 if self.top_p is None else self.top_p, min_p, max(0, self.top_k or 0)

    @cached_property
    def bias_arrays(self) -> tuple[array[int], array[float]]:
        """The entries of `logit_bias` in ascending order of token id: ids (int64) and values (float32)."""
        ids = sorted(self.logit_bias)
        return array("q", ids), array("f", [self.logit_bias[token] for token in ids])

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def _shortened(value: object) -> str:
    """A value as messages show it: what somebody sends by mistake may be long."""
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to write numbers of very many digits
        return f"a {type(value).__name__} that is too long to show"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(params: SamplingParams, name: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(params, name)
    if value is None:
        return
    allowed = f"a number {'above' if open_low else 'from'} {low:g} {'up to' if open_low else 'to'} {high:g}"
    if not _is_number(value) or not low <= value <= high or (open_low and value == low):
        raise InvalidParameter(f"{name}={_shortened(value)} must be {allowed}.")


def _temperature(params: SamplingParams) -> None:
    value = params.temperature
    if value is None or (_is_number(value) and (value == 0 or MIN_TEMPERATURE <= value <= 100)):
        return
    raise InvalidParameter(
        f"temperature={_shortened(value)} must be 0 (greedy) or a number from {MIN_TEMPERATURE:g} to 100."
    )


def _is_whole(value: object, low: int = 0, high: int = MAX_WHOLE) -> bool:
    """Without limits: whether it may be a token id; which ids a model has, the engine knows."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _whole(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not _is_whole(value, low, high) and (value is not None or name == "max_tokens"):
        raise InvalidParameter(f"{name}={_shortened(value)} must be a whole number from {low} to {high}.")


def _at_most(name: str, values: Any, most: int, what: str) -> None:
    if len(values) > most:
        raise InvalidParameter(f"{name} has {len(values)} {what}; at most {most} are allowed.")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    is_list = isinstance(strings, list | tuple)
    if is_list:
        _at_most("stop", strings, MAX_STOPS, "strings")
    if not is_list or not all(isinstance(s, str) and s for s in strings):
        raise InvalidParameter(f"stop={_shortened(stop)} must be a non-empty string or a list of non-empty strings.")
    for string in strings:
        if len(string) > MAX_STOP_LENGTH:
            raise InvalidParameter(
                f"stop has the string {_shortened(string)} of {len(string)} characters; at most {MAX_STOP_LENGTH} are "
                "allowed."
            )
    return tuple(strings)


def _token_ids(ids: Any) -> tuple[int, ...]:
    values = () if ids is None else ids
    is_list = isinstance(values, list | tuple)
    if is_list:
        _at_most("stop_token_ids", values, MAX_STOP_TOKEN_IDS, "token ids")
    if not is_list or not all(map(_is_whole, values)):
        raise InvalidParameter(
            f"stop_token_ids={_shortened(ids)} must be a list of token ids (whole numbers from 0 to {MAX_WHOLE})."
        )
    return tuple(values)


def _logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidParameter(f"logit_bias={_shortened(bias)} must map token ids to numbers from -100 to 100.")
    _at_most("logit_bias", bias, MAX_LOGIT_BIAS, "entries")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        try:
            token_id: Any = int(token) if isinstance(token, str) else token  # JSON clients send the ids as strings
        except ValueError:
            token_id = None
        if not _is_whole(token_id) or not _is_number(value) or not abs(value) <= 100:
            raise InvalidParameter(
                f"logit_bias has the entry {_shortened(token)}: {_shortened(value)}; it must map token ids to numbers "
                "from -100 to 100."
            )
        checked[token_id] = float(value)
    return checked


def _prediction(given: Any) -> str | tuple[int, ...] | None:
    if given is None:
        return None
    if not isinstance(given, str) and not (isinstance(given, list | tuple) and all(map(_is_whole, given))):
        raise InvalidParameter(f"prediction={_shortened(given)} must be a text or a list of token ids.")
    _at_most("prediction", given, MAX_PREDICTION_LENGTH, "characters or token ids")
    return given if isinstance(given, str) else tuple(given)


def _grammar(grammar: Any) -> dict[str, Any] | None:
    """A copy of a grammar that holds nothing but JSON. What it says is checked when it is compiled."""
    if grammar is None:
        return None
    if not isinstance(grammar, Mapping):
        raise InvalidParameter(f"grammar={_shortened(grammar)} must be {_GRAMMAR_FORMS}.")
    try:
        text = json.dumps(dict(grammar), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidParameter(
            "grammar must hold nothing but JSON: texts as keys; texts, finite numbers, lists and objects as values, "
            "and not too deeply nested."
        ) from None
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidParameter(f"grammar has {len(text)} characters of JSON; at most {MAX_GRAMMAR_LENGTH} are allowed.")
    copied: dict[str, Any] = json.loads(text, object_hook=_check_references)
    kind = next((name for name in _GRAMMAR_KINDS if name in copied), None)
    if kind is None:
        return copied
    value = copied[kind]
    texts = value if kind == "choice" else [value]
    are_texts = isinstance(texts, list) and bool(texts) and all(isinstance(each, str) and each for each in texts)
    if len(copied) > 1 or not are_texts:
        raise InvalidParameter(f"grammar={_shortened(copied)} must be {_GRAMMAR_FORMS}.")
    return copied


def _check_references(part: dict[str, Any]) -> dict[str, Any]:
    """An object of a schema. It refers to the schema's own parts only: no request reads a file or a URL."""
    for name in ("$ref", "$dynamicRef", "$recursiveRef"):
        reference = part.get(name)
        if isinstance(reference, str) and not reference.startswith("#"):
            raise InvalidParameter(
                f"grammar refers to {_shortened(reference)}; a schema may refer to its own parts only, as in "
                "'#/$defs/name'."
            )
    return part


_DEFAULTS = SamplingParams()
