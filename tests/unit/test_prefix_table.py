"""Which replica gets a request: the one that knows the longest beginning of it, unless that one is busy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.integrations.ray_serve.prefix_table import PrefixTable, prefix_names

LONG = "A system prompt that is long enough to be worth a cache. " * 8


def names(key: int | None = 0, shares_answers: bool = False, **fields: Any) -> tuple[bytes, ...]:
    return prefix_names(json.dumps(fields).encode(), key, shares_answers)


class TestNames:
    def test_prompts_share_names_as_far_as_they_agree(self) -> None:
        first, second = names(prompt=LONG + "one" * 100), names(prompt=LONG + "two" * 100)
        shared = sum(a == b for a, b in zip(first, second))
        assert shared == len(LONG) // 128
        assert not set(first[shared:]) & set(second)

    def test_a_conversation_that_goes_on_keeps_its_names(self) -> None:
        turns = [{"role": "user", "content": LONG}]
        more = [*turns, {"role": "assistant", "content": LONG}, {"role": "user", "content": "And?"}]
        first = names(messages=turns)
        assert first and names(messages=more)[: len(first)] == first

    @pytest.mark.parametrize("field", ["tools", "system", "instructions"])
    def test_what_stands_before_the_prompt_counts(self, field: str) -> None:
        assert not set(names(input=LONG, **{field: "a"})) & set(names(input=LONG, **{field: "b"}))

    def test_salts_share_nothing(self) -> None:
        assert not set(names(prompt=LONG, cache_salt="a")) & set(names(prompt=LONG, cache_salt="b"))
        assert not set(names(prompt=LONG, cache_salt="a")) & set(names(prompt=LONG))

    def test_private_requests_have_none(self) -> None:
        assert names(key=None, prompt=LONG) == names(key=None, prompt=LONG, cache_salt="") == ()
        assert names(key=None, prompt=LONG, cache_salt="a") and names(key=None, prompt=LONG, shares_answers=True)

    def test_keys_share_only_where_the_operator_shares(self) -> None:
        assert not set(names(key=0, prompt=LONG)) & set(names(key=1, prompt=LONG))
        assert not set(names(key=0, prompt=LONG, cache_salt="a")) & set(names(key=1, prompt=LONG, cache_salt="a"))
        assert names(key=0, prompt=LONG, shares_answers=True) == names(key=1, prompt=LONG, shares_answers=True)

    def test_a_salt_is_a_prefix_of_its_own(self) -> None:
        assert names(prompt="Hi", cache_salt="a") == names(prompt="Ho", cache_salt="a")[:1] != ()

    def test_token_ids_have_names(self) -> None:
        assert names(prompt=list(range(200)))[0] == names(prompt=[*range(150), 7])[0]

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[1]", b'"x"', b"{}", b'{"prompt": 5}', b'{"cache_salt": 5}', b"\xff"]
    )
    def test_a_body_that_is_wrong_has_none(self, body: bytes) -> None:
        assert prefix_names(body, 0, False) == ()

    def test_lone_surrogates_are_characters(self) -> None:
        assert names(prompt="\ud800" * 200, cache_salt="\ud800")

    def test_long_prompts_have_a_bounded_number(self) -> None:
        assert len(names(prompt="x" * 1_000_000)) == 64


class TestOrder:
    def test_without_memory_the_idlest_comes_first(self) -> None:
        assert PrefixTable(slack=4).order([b"p"], {"a": 3, "b": 0, "c": 1}) == ["b", "c", "a"]

    def test_among_equals_the_given_order_stays(self) -> None:
        assert PrefixTable(slack=4).order([], {"b": 0, "a": 0}) == ["b", "a"]

    def test_the_replica_with_the_prefix_comes_first(self) -> None:
        table = PrefixTable(slack=4)
        table.note([b"p"], "b")
        assert table.order([b"p", b"pq"], {"a": 0, "b": 4}) == ["b", "a"]

    def test_the_longest_prefix_wins(self) -> None:
        table = PrefixTable(slack=4)
        table.note([b"p", b"pq"], "a")
        table.note([b"p", b"pr"], "b")
        assert table.order([b"p", b"pq"], {"a": 1, "b": 0}) == ["a", "b"]
        assert table.order([b"p", b"ps"], {"c": 0, "a": 2, "b": 1}) == ["b", "a", "c"]

    def test_a_prefix_is_worth_less_than_a_queue(self) -> None:
        table = PrefixTable(slack=4)
        table.note([b"p"], "b")
        assert table.order([b"p"], {"a": 0, "b": 5}) == ["a", "b"]

    def test_a_replica_that_is_gone_is_not_offered(self) -> None:
        table = PrefixTable(slack=4)
        table.note([b"p", b"pq"], "dead")
        table.note([b"p"], "b")
        assert table.order([b"p", b"pq"], {"a": 0, "b": 0}) == ["b", "a"]
        assert table.order([b"p"], {}) == []

    def test_the_oldest_prefix_is_forgotten(self) -> None:
        table = PrefixTable(slack=4, capacity=2)
        for name in (b"p", b"q", b"r"):
            table.note([name], "b")
        assert table.order([b"p"], {"a": 0, "b": 0}) == ["a", "b"]
        assert table.order([b"q"], {"a": 0, "b": 0}) == ["b", "a"]
