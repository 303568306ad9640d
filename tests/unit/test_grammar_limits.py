"""What grammars may cost: large choices work, what is too large is refused before it is compiled or after a short
probe, a sequence never compiles, and what is kept is bounded."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import pytest
import torch

from foredraft.errors import InvalidParameter
from foredraft.sampling import grammar as grammar_module
from foredraft.sampling.grammar import Grammars
from foredraft.sampling.grammar_size import MOST_INTERSECTED, MOST_PROPERTY_PATTERNS, MOST_REMAINDERS, check_size
from tests.grammars import SCHEMAS, Matchers, record
from tests.unit.test_grammar import EOS, TOKENIZER, VOCAB, allowed, ids, make_grammars, texts

HUNGRY = {"regex": "(.*a.{200})b"}  # every text has states of its own


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}


class TestChoices:
    @pytest.mark.parametrize("count", [600, 5000])
    def test_thousands_of_words_can_all_be_written(self, count: int) -> None:
        words = [f"c{index}" for index in range(count)]
        compiled = make_grammars().compile({"choice": words})
        for word in words[:: count // 200]:
            one = compiled.constraint()
            path = ids(word)
            for end in range(len(path)):
                assert one.mask(path[:end])[path[end]], word
            assert EOS in allowed(one, path) and one.error is None
            assert one.num_valid(ids(word + "x")) == len(path)
        assert texts(compiled.constraint(), ids("c")) == {*"0123456789", "12"}

    def test_one_may_begin_another_and_hold_any_character(self) -> None:
        words = ["yes", "yes sir", 'a"b\\c', "é", "日本", "日本語", "\n", "/x/", "$", "a|b", "[a]", "\x7f", "\x00"]
        compiled = make_grammars().compile({"choice": words})
        for word in words:
            one = compiled.constraint()
            assert one.num_valid([*ids(word), EOS]) == len(ids(word)) + 1, word
        one = compiled.constraint()
        assert not one.is_complete(ids("yes")) and one.is_complete(ids("yes sir"))
        assert one.num_valid(ids("a")) == 1 and EOS not in allowed(one, ids("a"))


class TestProbe:
    @pytest.mark.parametrize(
        "grammar",
        [
            optional(1800),
            record(name={"const": "maybe"}, arguments=optional(200)),  # behind forced tokens
            {"lark": "start: " + " ".join(f'("a{index}")?' for index in range(1000))},
        ],
        ids=["many optional properties", "behind forced tokens", "many alternatives"],
    )
    def test_a_grammar_that_exceeds_a_limit_at_its_beginning_is_refused(self, grammar: dict[str, Any]) -> None:
        with pytest.raises(InvalidParameter, match="use fewer optional properties or alternatives") as refusal:
            make_grammars().compile(grammar)
        text = str(refusal.value)
        assert text.startswith("grammar cannot be used: too much may follow at one place") and "500" in text
        assert len(text) < 300 and "\n" not in text

    def test_an_error_of_another_kind_is_told_as_it_is(self) -> None:
        with pytest.raises(InvalidParameter, match="lexer error") as refusal:
            make_grammars().compile({"lark": 'start: "\x7f"'})
        assert "patterns" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("limit", "value", "message"),
        [
            ("initial_lexer_fuel", 10, "its patterns are too large"),
            ("max_lexer_states", 2, "its patterns are too large"),
            ("max_grammar_size", 5, "use fewer properties or rules"),
        ],
    )
    def test_every_limit_has_a_remedy(
        self, limit: str, value: int, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(grammar_module._LIMITS, limit, value)
        with pytest.raises(InvalidParameter, match=message):
            make_grammars().compile(record(name={"type": "string", "pattern": "^[a-z]{3,40}[0-9]+$"}, age={}))


def nested(keyword: str, depth: int) -> dict[str, Any]:
    """Every level has a pattern, and all of them hold together."""
    schema: dict[str, Any] = {}
    for index in range(depth):
        schema = {"type": "string", "pattern": f"a{index}", keyword: [schema]}
    return schema


class TestSize:
    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            ({"lark": "start: T\nT: " + " & ".join(f"/.*a{index}.*/" for index in range(40))}, "39 times &"),
            ({"allOf": [{"type": "string", "pattern": f"a{index}"} for index in range(40)]}, "40 times pattern"),
            (
                {
                    "$ref": "#/$defs/d0",
                    "$defs": {
                        f"d{index}": {"pattern": f"a{index}", "$ref": f"#/$defs/d{(index + 1) % 40}"}
                        for index in range(40)
                    },
                },
                "40 times pattern",
            ),
            (
                {"type": "object", "patternProperties": {f"^a{index}[a-z]*{index}$": {} for index in range(800)}},
                "800 patterns; at most 64",
            ),
            (
                {"lark": "start: %json " + json.dumps({"patternProperties": {f"^x{i}_": {} for i in range(99)}})},
                "99 patterns",
            ),
            ({"type": "integer", "multipleOf": 999_983}, "multipleOf"),
            (
                record(**{f"m{index}": {"type": "integer", "multipleOf": 9973 + 2 * index} for index in range(9)}),
                "20000",
            ),
            ({"allOf": [{"type": "integer", "multipleOf": 991}, {"multipleOf": 997}]}, "least common multiple"),
            (nested("anyOf", 20), "20 times pattern"),
            (nested("oneOf", 20), "20 times pattern"),
        ],
    )
    def test_what_the_compiler_does_not_bound_is_refused_before_it_runs(
        self, grammar: dict[str, Any], message: str, builds: list[str]
    ) -> None:
        with pytest.raises(InvalidParameter, match=message):
            check_size(grammar)  # by itself first: the compiler would run for minutes
        with pytest.raises(InvalidParameter, match=message) as refusal:
            make_grammars().compile(grammar)
        assert str(refusal.value).startswith("grammar cannot be used: ") and len(str(refusal.value)) < 300
        assert not builds

    def test_as_much_as_is_allowed_is_taken(self) -> None:
        grammars = make_grammars()
        anded = " & ".join(f"/.*a{index}.*/" for index in range(MOST_INTERSECTED))
        grammars.compile({"lark": f"start: T\nT: {anded}"})
        names = {f"^x{index}_": {"type": "string"} for index in range(MOST_PROPERTY_PATTERNS)}
        grammars.compile({"type": "object", "patternProperties": names})
        grammars.compile({"type": "integer", "multipleOf": MOST_REMAINDERS - 1})
        for schema in SCHEMAS.values():
            check_size(schema)

    def test_patterns_that_never_meet_are_not_counted_together(self) -> None:
        check_size(record(**{f"p{index}": {"type": "string", "pattern": f"^a{index}$"} for index in range(200)}))
        check_size({"lark": 'start: %json {"broken'})
        check_size({"type": "number", "multipleOf": 1e-9})
        check_size({"type": "number", "multipleOf": 1e18})


class TestRunning:
    def test_a_limit_behind_the_probe_ends_the_sequence_and_compiles_nothing(self, builds: list[str]) -> None:
        grammars = make_grammars()
        compiled = grammars.compile(record(name={"type": "string"}, age=optional(200)))
        builds.clear()
        one, other = compiled.constraint(), compiled.constraint()
        path = ids('{"name": "x", "age": {"')
        assert not one.mask(path).any() and one.error is not None
        assert one.error.startswith("grammar cannot be used: too much may follow at one place; use fewer optional")
        assert other.mask(ids('{"name": "x", "')).any() and other.error is None
        assert not builds and grammars.find(record(name={"type": "string"}, age=optional(200))) is compiled

    def test_states_that_others_made_do_not_count(self, monkeypatch: pytest.MonkeyPatch, builds: list[str]) -> None:
        """All sequences of a grammar share one automaton. When it is full, they go on with the second, which is
        compiled already, and new requests compile again."""
        monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 400)
        grammars = make_grammars()
        compiled = grammars.compile(HUNGRY)
        long_lived = compiled.constraint()
        path = ids("abcabcabc")
        expected = long_lived.mask(path)
        long_lived.accept(path)
        for seed in range(30):
            one, chance = grammars.compile(HUNGRY).constraint(), random.Random(seed)
            num_builds = len(builds)
            one.mask([chance.choice(ids("abcde")) for _ in range(40)])
            assert one.error is None and len(builds) == num_builds, "a sequence compiles nothing"
        assert compiled.is_full and grammars.find(HUNGRY) is not compiled
        assert torch.equal(
            long_lived.mask(ids("c")), make_grammars().compile(HUNGRY).constraint().mask([*path, *ids("c")])
        )
        assert torch.equal(compiled.constraint().mask(path), expected)


class TestCompiling:
    def test_requests_with_the_same_grammar_compile_it_once(self, builds: list[str]) -> None:
        grammars = make_grammars()
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(grammars.compile({"regex": "a+"}))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1 and len(found) == 8 and len(builds) == 2

    def test_a_compiled_grammar_is_found_while_another_is_compiled(self, matchers: Matchers) -> None:
        grammars = make_grammars()
        compiled = grammars.compile({"regex": "a"})
        matchers.may_begin.clear()
        other = threading.Thread(target=grammars.compile, args=({"regex": "b"},))
        other.start()
        while len(matchers.threads) < 3:
            time.sleep(0.001)
        assert grammars.find({"regex": "a"}) is compiled and grammars.find({"regex": "b"}) is None
        matchers.may_begin.set()
        other.join(30)
        assert grammars.find({"regex": "b"}) is not None

    def test_what_is_kept_is_bounded_in_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_module, "_MOST_CACHED_LENGTH", 100)
        grammars = make_grammars()
        written = [{"regex": letter * 20} for letter in "abcdefgh"]
        for number, grammar in enumerate(written, 1):
            grammars.compile(grammar)
            kept = [one for one in written if grammars.find(one) is not None]
            assert sum(len(json.dumps(one)) for one in kept) <= 100
            assert kept == written[max(0, number - 3) : number], "the oldest goes first"

    def test_the_tokenizer_is_read_when_it_is_prepared(self) -> None:
        """Reading it stops all threads: an engine that serves others does it before anybody waits."""
        reads: list[str] = []

        def read() -> str:
            reads.append(TOKENIZER.to_str())
            return reads[-1]

        grammars = Grammars(read, VOCAB, frozenset({EOS}))
        grammars.prepare()
        assert len(reads) == 1
        grammars.compile({"regex": "a"})
        assert len(reads) == 1, "it is not read again"
        Grammars(lambda: "{}", 10, frozenset({EOS})).prepare()  # those that cannot be used are told by their requests
