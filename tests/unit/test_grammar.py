"""Constraints: masks along paths, forced tokens, where a grammar may end, limits, and what is refused."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft.errors import InvalidParameter
from foredraft.params import MAX_GRAMMAR_LENGTH, SamplingParams
from foredraft.proposers.merge import pruned
from foredraft.sampling import grammar as grammar_module
from foredraft.sampling.grammar import GrammarConstraint, Grammars
from foredraft.sampling.pipeline import adjust_after, distribution, floor
from foredraft.types import NO_DRAFT, Draft, Sequence
from tests.grammars import SCHEMAS, record

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

WORDS = ["yes", "no", "maybe", '{"', '":', ' "', "name", "na", "me", "age", ", ", "12", "true", "false"]
EOS = 1


def make_tokenizer() -> Any:
    """Bytes and a few longer tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = word.replace(" ", "Ġ")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 10  # the logits of many models are wider than their vocabulary


def make_grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str, VOCAB, frozenset({EOS}))


GRAMMARS = make_grammars()


def constraint(grammar: dict[str, Any], ignore_eos: bool = False) -> GrammarConstraint:
    params = SamplingParams(grammar=grammar)
    assert params.grammar is not None
    return GRAMMARS.compile(params.grammar).constraint(ignore_eos)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(one: GrammarConstraint, path: list[int]) -> list[int]:
    mask = one.mask(path)
    assert mask.dtype is torch.bool and mask.shape == (VOCAB,)
    return mask.nonzero().flatten().tolist()


def texts(one: GrammarConstraint, path: list[int]) -> set[str]:
    return {TOKENIZER.decode([token]) for token in allowed(one, path)} - {""}


def walk(one: GrammarConstraint, chance: random.Random, length: int = 30) -> list[int]:
    """Tokens that the grammar allows one after the other."""
    path: list[int] = []
    while len(path) < length and not one.is_complete(path):
        path.append(chance.choice([token for token in allowed(one, path) if token != EOS] or [EOS]))
        if path[-1] == EOS:
            return path[:-1]
    return path


class TestMasks:
    def test_a_choice_is_followed_token_by_token(self) -> None:
        one = constraint({"choice": ["yes", "no", "maybe"]})
        assert texts(one, []) >= {"yes", "no", "y", "n", "m"} and "true" not in texts(one, [])
        assert texts(one, ids("y")) == {"e"}, "the tokenizer writes the rest as it always does"
        assert one.is_complete(ids("yes")) and not one.is_complete(ids("y"))

    @pytest.mark.parametrize("name", [*list(SCHEMAS)[::4], "regex", "lark"])
    def test_a_mask_depends_on_the_tokens_alone(self, name: str) -> None:
        """Whatever the parser has visited before: other branches, forced tokens, half of the path accepted."""
        kinds = {
            "regex": {"regex": "[a-c]{3,8}(foo|bar)*-[0-9]+"},
            "lark": {"lark": 'start: t (("+"|"-") t)*\nt: NUM | "(" start ")"\nNUM: /[0-9]+/'},
        }
        grammar = kinds.get(name) or SCHEMAS[name]
        for seed in range(4):
            chance = random.Random(seed)
            used = constraint(grammar)
            path = walk(used, chance)
            for _ in range(20):
                end = chance.randrange(len(path) + 1)
                if chance.random() < 0.3:
                    used.forced(path[: chance.randrange(len(path) + 1)])
                if chance.random() < 0.3:
                    used.num_valid([*path[:end], chance.randrange(VOCAB), 5])
                fresh = constraint(grammar)
                assert torch.equal(used.mask(path[:end]), fresh.mask(path[:end]))
            half = len(path) // 2
            used.accept(path[:half])
            assert used.num_accepted == half
            for end in range(half, len(path) + 1):
                assert torch.equal(used.mask(path[half:end]), constraint(grammar).mask(path[:end]))

    def test_siblings_have_masks_of_their_own(self) -> None:
        one = constraint({"regex": "a[0-9]b|c[x-z]d"})
        assert texts(one, ids("a")) == {*"0123456789", "12"} - {"12"}
        assert texts(one, ids("c")) == set("xyz")
        assert texts(one, ids("a")) == set("0123456789")

    def test_text_ends_only_where_the_grammar_may_end(self) -> None:
        one = constraint({"regex": "a{2,4}"})
        assert [EOS in allowed(one, ids("a" * count)) for count in range(5)] == [False, False, True, True, True]
        assert allowed(one, ids("aaaa")) == [EOS] and one.is_complete(ids("aaaa"))
        assert not one.is_complete(ids("aa"))

    def test_an_ignored_end_comes_only_where_nothing_else_may(self) -> None:
        one = constraint({"regex": "a{2,4}"}, ignore_eos=True)
        assert texts(one, ids("aa")) == {"a"} and EOS not in allowed(one, ids("aa"))
        assert allowed(one, ids("aaaa")) == [EOS]

    def test_behind_what_is_not_allowed_and_behind_the_end_there_is_a_token_still(self) -> None:
        """A backend may draw after every node, also after those that will not be accepted."""
        one = constraint({"regex": "a+"})
        assert allowed(one, ids("ab")) == allowed(one, [*ids("a"), EOS]) == allowed(one, [EOS, EOS]) == [EOS]
        assert texts(one, ids("a")) == {"a"}, "and the parser finds back"

    def test_tokens_beyond_the_tokenizer_are_never_allowed(self) -> None:
        assert max(allowed(constraint({"regex": "(?s:.)*"}), [])) < VOCAB - 10

    def test_the_sampling_sees_allowed_tokens_only(self) -> None:
        one = constraint({"choice": ["yes", "no"]})
        params = SamplingParams(temperature=0.7, grammar={"choice": ["yes", "no"]}).resolved({})
        sequence = Sequence(0, "", 0, [7, 8], 2, params, seed=1, max_tokens=9, constraint=one)
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
        for path in ([], ids("n"), ids("ye")):
            p = distribution(adjust_after(logits, sequence, path), params)
            wanted = torch.where(one.mask(path), (logits.double() / 0.7), -math.inf).softmax(-1)
            torch.testing.assert_close(p, wanted, rtol=1e-6, atol=1e-12)
            assert p.nonzero().flatten().tolist() == allowed(one, path)
        few = SamplingParams(temperature=0.7, top_k=50).resolved({})
        assert floor(adjust_after(logits, sequence, []), few) > -math.inf, "what is masked is no candidate"


class TestForced:
    def test_forced_tokens_are_the_only_ones_allowed(self) -> None:
        one = constraint(record(name={"enum": ["no", "maybe"]}, age={"type": "boolean"}))
        chance, found = random.Random(0), 0
        for _ in range(10):
            path = walk(one, chance)
            for end in range(len(path)):
                for place, token in enumerate(forced := one.forced(path[:end])):
                    assert allowed(one, [*path[:end], *forced[:place]]) == [token]
                    found += 1
        assert found > 50
        assert TOKENIZER.decode(one.forced([])) == '{"name": "'

    def test_nothing_is_forced_where_there_is_a_choice_or_an_end(self) -> None:
        one = constraint({"regex": "a+"})
        assert one.forced(ids("a")) == one.forced(ids("b")) == one.forced([EOS]) == []


class TestPruning:
    SEQUENCE = staticmethod(
        lambda one: Sequence(0, "", 0, [7], 1, SamplingParams().resolved({}), 0, 99, constraint=one)
    )

    def draft(self, *branches: str, q: Any = None) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for branch in branches:
            for place, token in enumerate(ids(branch)):
                parents.append(len(tokens) - 1 if place else -1)
                tokens.append(token)
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), ("x",) * len(tokens), q)

    def test_what_is_not_allowed_goes_with_what_hangs_below_it(self) -> None:
        one = constraint({"regex": "a[0-9]b|c[x-z]d"})
        draft = self.draft("a5b", "axb", "q1", "cyd", "c5")
        kept = pruned(draft, self.SEQUENCE(one))
        leaves = set(range(len(kept))) - set(kept.parents)
        assert {TOKENIZER.decode(kept.path_tokens(leaf)) for leaf in leaves} == {"a5b", "a", "cyd", "c"}
        assert pruned(self.draft("xyz"), self.SEQUENCE(one)) == NO_DRAFT
        whole = self.draft("a5b", "cxd")
        assert pruned(whole, self.SEQUENCE(one)) is whole

    def test_an_end_stays_only_where_the_grammar_may_end(self) -> None:
        one = constraint({"regex": "aa+"})
        ends = Draft((*ids("a"), EOS, *ids("a"), EOS, 5), (-1, 0, 0, 2, 3), (0.5,) * 5, ("x",) * 5)
        assert pruned(ends, self.SEQUENCE(one)).tokens == (*ids("aa"), EOS)

    def test_accepted_tokens_count_and_draft_tokens_of_a_stage_too(self) -> None:
        """A draft model extends a sequence by tokens that are not accepted, and queries its helper about it."""
        one = constraint({"regex": "abcdef"})
        sequence = self.SEQUENCE(one)
        sequence.token_ids += ids("ab")
        one.accept(ids("ab"))
        assert len(pruned(self.draft("cde"), sequence)) == 3
        sequence.token_ids += ids("cd")
        assert len(pruned(self.draft("efg"), sequence)) == 2

    def test_sampled_drafts_stay_whole(self) -> None:
        sampled = self.draft("xyz", q=torch.ones(3, VOCAB) / VOCAB)
        assert pruned(sampled, self.SEQUENCE(constraint({"regex": "a"}))) is sampled


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def circular() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["properties"] = schema
    return schema


WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("a text", lambda: '{"type": "object"}', "must be a JSON schema"),
    ("a list", lambda: ["yes", "no"], "must be a JSON schema"),
    ("two kinds", lambda: {"regex": "a", "choice": ["a"]}, "must be a JSON schema"),
    ("a regex that is no text", lambda: {"regex": 5}, "must be a JSON schema"),
    ("an empty regex", lambda: {"regex": ""}, "must be a JSON schema"),
    ("choices that are no list", lambda: {"choice": "yes"}, "must be a JSON schema"),
    ("no choices", lambda: {"choice": []}, "must be a JSON schema"),
    ("an empty choice", lambda: {"choice": ["a", ""]}, "must be a JSON schema"),
    ("a choice that is no text", lambda: {"choice": ["a", 1]}, "must be a JSON schema"),
    ("a set", lambda: {"enum": {1, 2}}, "nothing but JSON"),
    ("NaN", lambda: {"const": math.nan}, "nothing but JSON"),
    ("a circle", circular, "nothing but JSON"),
    ("very deep", lambda: nested(100_000), "nothing but JSON"),
    ("too large", lambda: {"enum": ["x" * MAX_GRAMMAR_LENGTH]}, "at most 65536"),
    ("a URL", lambda: {"$ref": "http://localhost/x.json"}, "refers to 'http://localhost/x.json'"),
    ("a file", lambda: {"anyOf": [{"$ref": "file:///etc/passwd"}]}, "its own parts only"),
]


class TestRefused:
    @pytest.mark.parametrize(("make", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
    def test_when_the_parameters_are_made(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(InvalidParameter, match=message) as refusal:
            SamplingParams(grammar=make())
        assert len(str(refusal.value)) < 300

    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            ({"regex": "(a"}, "invalid regex .*: unclosed group"),
            ({"regex": "(?=a)b"}, "invalid regex"),
            ({"regex": "(a)\\1"}, "invalid regex"),
            ({"regex": "[^\\s\\S]"}, "no text fits it"),
            ({"regex": "(" * 2000 + "a" + ")" * 2000}, "invalid regex"),
            ({"regex": "\ud800"}, "grammar"),
            ({"choice": ["\ud800"]}, "grammar"),
            ({"lark": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deeply nested"),
            ({"lark": 'foo: "a"'}, "start rule"),
            ({"lark": "start: missing"}, "unknown name"),
            ({"lark": "start: start"}, "no text fits it"),
            ({"lark": 'start: "a" start'}, "may have no end"),
            ({"lark": "%import .etc.passwd\nstart: passwd"}, "Unknown common regex"),
            ({"lark": "start: @other"}, "unknown grammar"),
            ({"$ref": "#"}, "no text fits it"),
            ({"$ref": "#/$defs/missing"}, "grammar"),
            ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "circular"),
            (record(left={"$ref": "#"}), "may have no end"),
            (nested(500), "recursion limit"),
            ({"type": "integr"}, "Invalid type"),
            ({"type": 5}, "type must be"),
            ({"not": {"type": "string"}}, "not"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"type": "string", "format": "unheard-of"}, "Unknown format"),
            ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
            ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "Unsatisfiable"),
            ({"enum": []}, "Unsatisfiable"),
            ({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]}, "grammar"),
            ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "not"),
        ],
    )
    def test_when_it_is_compiled(self, grammar: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidParameter, match=message) as refusal:
            constraint(grammar)
        text = str(refusal.value)
        assert text.startswith("grammar cannot be used: ") and len(text) < 300 and "\n" not in text

    def test_without_the_library_a_sentence_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(InvalidParameter, match=r"pip install 'foredraft\[grammar\]'"):
            make_grammars().compile({"regex": "a"})

    def test_a_tokenizer_that_is_unknown_to_the_parser_is_told(self) -> None:
        with pytest.raises(InvalidParameter, match="its tokenizer"):
            Grammars(lambda: "{}", VOCAB, frozenset({EOS})).compile({"regex": "a"})


class TestLimits:
    HUNGRY = {"regex": "(.*a.{200})b"}  # every text has states of its own

    def test_a_sequence_that_exceeds_a_limit_ends_with_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 400)
        grammars = make_grammars()
        one = grammars.compile(self.HUNGRY).constraint()
        chance = random.Random(1)
        path: list[int] = []
        while one.error is None and len(path) < 500:
            path.append(chance.choice(ids("abcde")))
            mask = one.mask(path)
        assert one.error == (
            "grammar cannot be used: its patterns are too large; use simpler ones and lower their repetitions "
            "(lexer error: too many states: 400 >= 400)."
        )
        assert not mask.any() and one.forced(path) == [] and one.num_valid(path) == 0 and not one.is_complete(path)
        one.accept(path[:1])

    def test_compiled_grammars_are_kept_by_their_content(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_module, "_MOST_CACHED", 3)
        grammars = make_grammars()
        first = grammars.compile({"regex": "a"})
        for letter in "bcab":
            grammars.compile({"regex": letter})
        assert grammars.compile(json.loads('{"regex": "a"}')) is first, "it was used among the last three"
        for letter in "def":
            grammars.compile({"regex": letter})
        assert grammars.compile({"regex": "a"}) is not first
        kept = [letter for letter in "abcdef" if grammars.find({"regex": letter}) is not None]
        assert kept == ["a", "e", "f"]
        order = (
            {"type": "object", "properties": {"x": {}, "y": {}}},
            {"type": "object", "properties": {"y": {}, "x": {}}},
        )
        assert grammars.compile(order[0]) is not grammars.compile(order[1]), "names come in the order of the schema"


def test_a_grammar_is_copied_when_the_parameters_are_made() -> None:
    given: dict[str, Any] = {"enum": ["a"]}
    params = SamplingParams(grammar=given)
    given["enum"].append("b")
    assert params.grammar == {"enum": ["a"]} == params.resolved({"temperature": 0.5}).grammar
