"""Requests that try to cost much, each with the status that is right. Those of test_hostile.py are wrong in form; these
are large, deep, greedy, or from somebody who should not be there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETE, RESPOND, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_MANY = 200_000
_WORDS = [f"word{number:04}" for number in range(5000)]


@dataclass(frozen=True)
class Hostile:
    """A request. `body` is sent as it is, if it is bytes."""

    path: str
    body: Any
    status: int = 400
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def _complete(**fields: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": 2, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **fields}


def _raw(name: str, value: str) -> bytes:
    """A completion with one value as it is written here."""
    return json.dumps(_complete()).encode()[:-1] + f', "{name}": {value}}}'.encode()


def _grammar(grammar: Any, status: int = 400) -> Hostile:
    return Hostile(COMPLETE, _complete(grammar=grammar, spec="off"), status)


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


REQUESTS: dict[str, Hostile] = {
    # prompts
    "a prompt of floats": Hostile(COMPLETE, _complete(prompt=[0.5] * _MANY)),
    "a prompt of many prompts": Hostile(COMPLETE, _complete(prompt=["a"] * 5000)),
    "a prompt of lists of texts": Hostile(COMPLETE, _complete(prompt=[["a"]])),
    "a prompt of truths": Hostile(COMPLETE, _complete(prompt=[True, False])),
    "a prompt that is an object": Hostile(COMPLETE, _complete(prompt={"text": "a"})),
    "an empty prompt among others": Hostile(COMPLETE, _complete(prompt=[[1], []])),
    "a token id beyond 64 bits": Hostile(COMPLETE, _raw("prompt", f"[{10**30}]")),
    "3 MB of digits": Hostile(COMPLETE, _complete(prompt="1" * 3_000_000)),
    "3 MB of spaces": Hostile(COMPLETE, _complete(prompt=" " * 3_000_000)),
    "a million characters of one accent": Hostile(COMPLETE, _complete(prompt="́" * 500_000)),
    "more token ids than fit": Hostile(COMPLETE, _complete(prompt=[1] * _MANY)),
    "as many prompts and samples as there are": Hostile(COMPLETE, _complete(prompt=[[1]] * 64, n=16)),
    # numbers
    "top_k of 400 digits": Hostile(COMPLETE, _raw("top_k", "1" + "0" * 400)),
    "top_k below its range": Hostile(COMPLETE, _complete(top_k=-2)),
    "top_k that is a truth": Hostile(COMPLETE, _complete(top_k=True)),
    "min_p above its range": Hostile(COMPLETE, _complete(min_p=2)),
    "n of 30 digits": Hostile(COMPLETE, _raw("n", "1" + "0" * 30)),
    "no samples": Hostile(COMPLETE, _complete(n=0)),
    "no tokens": Hostile(COMPLETE, _complete(max_tokens=0)),
    "tokens as text": Hostile(COMPLETE, _complete(max_tokens="5")),
    "tokens of 4,000 digits": Hostile(COMPLETE, _raw("max_tokens", "9" * 4000)),
    "a billion log probabilities": Hostile(COMPLETE, _complete(logprobs=10**9)),
    "a seed below 64 bits": Hostile(COMPLETE, _complete(seed=-(2**63) - 1)),
    "a seed of 65 bits": Hostile(COMPLETE, _complete(seed=2**65)),
    "a priority of 400 digits": Hostile(COMPLETE, _raw("priority", "1" + "0" * 400)),
    # lists
    "many stop texts": Hostile(COMPLETE, _complete(stop=["a"] * _MANY)),
    "an empty stop text": Hostile(COMPLETE, _complete(stop=[""])),
    "many stop tokens": Hostile(COMPLETE, _complete(stop_token_ids=[9] * _MANY)),
    "a negative stop token": Hostile(COMPLETE, _complete(stop_token_ids=[-1])),
    "a large bias": Hostile(COMPLETE, _complete(logit_bias={str(token): 1 for token in range(_MANY)})),
    "a bias of no token": Hostile(COMPLETE, _complete(logit_bias={"abc": 1})),
    "a bias out of range": Hostile(COMPLETE, _complete(logit_bias={"1": 1e300})),
    "many unknown fields": Hostile(COMPLETE, _complete(**{f"x{place}": 1 for place in range(_MANY)})),
    # speculation and sharing
    "drafts that cost others": Hostile(
        COMPLETE, _complete(spec="suffix:k=64,min_n=1,depth=64,min_score=0.0001", n=8), 200
    ),
    "a store of one's own": Hostile(COMPLETE, _complete(spec="suffix:store=10000000")),
    "a proposer that was not allowed": Hostile(COMPLETE, _complete(spec="early_exit")),
    "a draft model from a file": Hostile(COMPLETE, _complete(spec="draft_model:model=/etc/passwd")),
    "a spec of a megabyte": Hostile(COMPLETE, _complete(spec="ngram+" * 170_000 + "ngram")),
    "an acceptance rule that accepts all": Hostile(COMPLETE, _complete(acceptance="always")),
    "a salt that is a number": Hostile(COMPLETE, _complete(cache_salt=7)),
    # grammars
    "5,000 choices": _grammar({"choice": _WORDS}, 200),
    "no choice": _grammar({"choice": []}),
    "a choice of 200,000": _grammar({"choice": ["a"] * _MANY}),
    "a repetition of a million": _grammar({"regex": "(a|b){1000000}"}, 200),
    "an open bracket": _grammar({"regex": "["}),
    "a rule of itself": _grammar({"lark": "start: start"}),
    "40 intersections": _grammar({"lark": "start: T\nT: " + " & ".join(f"/.*{place}.*/" for place in range(40))}),
    "1,800 optional properties": _grammar(
        {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(1800)}}
    ),
    "a large divisor": _grammar({"type": "integer", "multipleOf": 999_983}),
    "a schema elsewhere": _grammar({"$ref": "http://127.0.0.1:9/schema"}),
    # conversations
    "many empty messages": Hostile(CHAT, b'{"messages":[' + b",".join([b"{}"] * _MANY) + b"]}"),
    "a message of many parts": Hostile(
        CHAT, _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}])
    ),
    "a role of a megabyte": Hostile(CHAT, _chat(messages=[{"role": "r" * 1_000_000, "content": "a"}])),
    "3 MB of control tokens": Hostile(CHAT, _chat(messages=[{"role": "user", "content": "<s>" * 1_000_000}])),
    "many tools": Hostile(CHAT, _chat(tools=[_tool(f"f{place}") for place in range(1000)])),
    "a tool that is not there": Hostile(
        CHAT, _chat(tools=[_tool("f")], tool_choice={"type": "function", "function": {"name": "g"}})
    ),
    "many items of input": Hostile(RESPOND, {"input": [{"role": "user", "content": "a"}] * 50_000}),
    "a system of many parts": Hostile(MESSAGES, {**_chat(), "system": [{"type": "text", "text": "a"}] * 50_000}),
    # other routes, and other people
    "2 MB to tokenise": Hostile("/tokenize", {"prompt": "1" * 2_000_000}),
    "a million tokens to write": Hostile("/detokenize", {"tokens": [9] * 1_000_000}),
    "a text and a conversation at once": Hostile("/tokenize", {"prompt": "a", "messages": _chat()["messages"]}),
    "another host": Hostile(COMPLETE, _complete(), 403, {"host": "evil.example"}),
    "another origin": Hostile(COMPLETE, _complete(), 403, {"origin": "https://evil.example"}),
    "the origin of a file": Hostile(COMPLETE, _complete(), 403, {"origin": "null"}),
    "a compressed body": Hostile(COMPLETE, b"\x1f\x8b", 415, {"content-encoding": "gzip"}),
    "a body of 5 MB": Hostile(COMPLETE, b" " * 5_000_000, 413),
}
