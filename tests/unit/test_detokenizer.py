"""Text that grows token by token: characters and stop strings across token borders, and what may be shown when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foredraft.engine.detokenizer import Decodes, Detokenizer
from foredraft.engine.stop_strings import StopStrings

WORDS = ["", "a", "b", "ab", "END", "EN", "D", "\n", " the", "é", "日", "本", "🙂", "👨‍👩‍👧", "x́"]


BYTES = [*b"a\x80\x82\x9f\x99\xac\xc3\xa9\xe2\xf0\xf0\x9f\xff"]  # the beginnings, middles and ends of characters


class Bytes:
    """A byte-level tokenizer in which token i is byte i; from 256 on, tokens are special and have no text."""

    def text_of(self, token: int) -> str | None:
        text = self.decode([token])
        return text if text and "\ufffd" not in text else None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class ByteGroups:
    """A byte-level tokenizer in which token i is the i-th group of bytes."""

    def __init__(self, groups: list[bytes]) -> None:
        self.groups = groups

    def text_of(self, token: int) -> str | None:
        text = self.decode([token])
        return text if text and "\ufffd" not in text else None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.groups[token] for token in ids).decode("utf-8", errors="replace")


class ByteFallback:
    """Like SentencePiece's fallback: token i is byte i, and every byte that is no character has a mark of its own."""

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text, rest = "", bytes(ids)
        while rest:
            for size in range(min(4, len(rest)), 0, -1):
                try:
                    text, rest = text + rest[:size].decode(), rest[size:]
                    break
                except UnicodeDecodeError:
                    continue
            else:
                text, rest = text + "\ufffd", rest[1:]
        return text


class Pieces:
    """Like SentencePiece: token i is WORDS[i] after a space, and the very first token of a text loses its space."""

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {WORDS[token]}" for token in ids).removeprefix(" ")


class Hugging:
    """A real byte-level BPE, trained on so little that rare characters fall apart into bytes."""

    def __init__(self) -> None:
        self.inner = Tokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        self.inner.train_from_iterator(["the end of the END \n\n and the 日本 日本 of it"] * 4, trainer)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def bpe() -> Hugging:
    return Hugging()


def fed(
    tokenizer: Decodes,
    tokens: Iterable[int],
    stops: Iterable[str] = (),
    prompt: Iterable[int] = (),
    is_followed: bool = True,
) -> Detokenizer:
    """A finished detokenizer: all tokens, or those up to the first stop string."""
    detokenizer = Detokenizer(tokenizer, list(prompt), StopStrings(tuple(stops)), is_followed)
    for token in tokens:
        if detokenizer.append(token) is not None:
            return detokenizer
    detokenizer.finish()
    return detokenizer


class TestCharacters:
    @given(text=st.text(max_size=20))
    def test_bytes_add_up_to_the_text(self, text: str) -> None:
        assert fed(Bytes(), text.encode()).text == text

    @given(text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
    def test_tokens_add_up_to_the_text(self, text: str) -> None:
        tokenizer = Hugging()
        assert fed(tokenizer, tokenizer.encode(text)).text == text

    @given(raw=st.binary(max_size=16) | st.lists(st.sampled_from(BYTES), max_size=24).map(bytes))
    def test_bytes_that_are_no_text_end_as_the_tokenizer_says(self, raw: bytes) -> None:
        assert fed(Bytes(), raw).text == raw.decode("utf-8", errors="replace")

    @given(raw=st.lists(st.sampled_from(BYTES), max_size=24).map(bytes))
    def test_bytes_with_marks_of_their_own_end_as_the_tokenizer_says(self, raw: bytes) -> None:
        assert fed(ByteFallback(), raw).text == ByteFallback().decode(list(raw))

    @given(pieces=st.lists(st.lists(st.sampled_from(BYTES), min_size=1, max_size=4), max_size=8))
    def test_tokens_of_several_bytes_end_as_the_tokenizer_says(self, pieces: list[list[int]]) -> None:
        """A character may begin and end within tokens that hold other bytes too."""
        tokenizer = ByteGroups([bytes(piece) for piece in pieces])
        tokens = list(range(len(pieces)))
        assert fed(tokenizer, tokens).text == tokenizer.decode(tokens)

    @pytest.mark.parametrize("tokens", [[0x80], [300], [0xF0], [0xF0, 300], [0xF0, 0x9F], [0xC3, 300, 300]])
    def test_tokens_that_never_become_a_character_cost_the_same_each(self, tokens: list[int]) -> None:
        """They are streamed, and no token is decoded again and again."""

        class Counting(Bytes):
            most = 0

            def text_of(self, token: int) -> str | None:
                return None

            def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
                self.most = max(self.most, len(ids))
                return super().decode(ids, skip_special_tokens)

        tokenizer, endless = Counting(), tokens * 50
        detokenizer = Detokenizer(tokenizer, list(b"so: "), StopStrings(()))
        for token in endless:
            detokenizer.append(token)
        whole = Bytes().decode(endless)
        assert tokenizer.most <= 12
        assert len(whole) - len(detokenizer.text) <= 3
        detokenizer.finish()
        assert detokenizer.text == whole

    def test_a_character_is_shown_only_when_it_is_whole(self) -> None:
        detokenizer = Detokenizer(Bytes(), [], StopStrings(()))
        growth = []
        for byte in "a🙂é".encode():
            detokenizer.append(byte)
            growth.append(detokenizer.text)
        assert growth == ["a", "a", "a", "a", "a🙂", "a🙂", "a🙂é"]

    def test_the_bpe_does_split_characters(self, bpe: Hugging) -> None:
        """Otherwise the tests with it would show nothing."""
        assert len(bpe.encode("🙂")) > 1
        assert len(bpe.encode("the")) < 3

    def test_half_a_character_at_the_end_is_kept_as_a_mark(self) -> None:
        assert fed(Bytes(), "né".encode()[:-1]).text == "n\ufffd"

    def test_finish_adds_nothing_twice(self) -> None:
        detokenizer = fed(Bytes(), "né".encode()[:-1])
        detokenizer.finish()
        assert detokenizer.text == "n\ufffd"

    def test_tokens_without_text_are_passed_over(self) -> None:
        assert fed(Bytes(), [104, 300, 105, 301, 300, 33, 256]).text == "hi!"

    def test_tokens_without_text_may_stand_within_a_character(self) -> None:
        assert fed(Bytes(), [0xC3, 300, 0xA9]).text == "é"


class TestNobodyFollows:
    """Text that nobody follows is decoded when it is read, and is the same."""

    @given(
        raw=st.lists(st.sampled_from([*BYTES, 300]), max_size=24),
        prompt=st.lists(st.sampled_from(BYTES), max_size=6),
        stops=st.lists(st.sampled_from(["a", "\ufffd"]), max_size=1),
    )
    def test_the_text_is_the_same(self, raw: list[int], prompt: list[int], stops: list[str]) -> None:
        followed, unfollowed = (fed(Bytes(), raw, stops, prompt, is_followed) for is_followed in (True, False))
        assert unfollowed.text == followed.text

    def test_it_can_be_read_before_its_end(self) -> None:
        detokenizer = Detokenizer(Bytes(), [], StopStrings(()), is_followed=False)
        for token in b"so":
            assert detokenizer.append(token) is None
        assert (detokenizer.stable(), detokenizer.text) == (0, "so")
        detokenizer.append(ord("!"))
        assert detokenizer.text == "so!"


class TestPrompt:
    def test_is_no_part_of_the_text(self) -> None:
        assert fed(Bytes(), b"yes", prompt=b"is it?").text == "yes"

    def test_gives_the_first_token_its_space(self) -> None:
        """Decoded alone, the first token of the output would lose it."""
        assert fed(Pieces(), [1, 2, 3], prompt=[4, 4]).text == " a b ab"
        assert fed(Pieces(), [1, 2, 3]).text == "a b ab"

    @pytest.mark.parametrize("length", range(8))
    def test_any_length_will_do(self, length: int) -> None:
        assert fed(Pieces(), [1, 2], prompt=[4] * length).text == (" a b" if length else "a b")

    def test_may_begin_within_a_character(self) -> None:
        """Only the last few tokens of the prompt are looked at, which may cut one of its characters."""
        assert fed(Bytes(), b"ok", prompt="🙂🙂".encode()[:-1]).text.endswith("ok")
        assert fed(Bytes(), b"ok", prompt="日日".encode()).text == "ok"

    @pytest.mark.parametrize("text", ["é", "日", "🙂"])
    @pytest.mark.parametrize("tokenizer", [Bytes(), ByteFallback()], ids=["bytes", "byte fallback"])
    def test_a_character_that_it_begins_is_the_outputs(self, tokenizer: Decodes, text: str) -> None:
        raw = text.encode()
        for before in ("", "b", "🙂"):
            for split in range(1, len(raw)):
                prompt = [*before.encode(), *raw[:split]]
                assert fed(tokenizer, [*raw[split:], *b" so"], prompt=prompt).text == f"{text} so"
                assert fed(tokenizer, raw[split:], prompt=prompt).text == text
                assert fed(tokenizer, b"so", prompt=prompt).text == "so", "it is never completed"

    def test_bytes_that_do_not_complete_its_character_are_marked(self) -> None:
        assert fed(Bytes(), [0x9F, 0x99], prompt=[0xF0]).text == "\ufffd\ufffd"
        assert fed(Bytes(), [300], prompt=[0xF0]).text == ""

    def test_a_mark_that_it_ends_with_is_its_own(self) -> None:
        assert fed(Bytes(), b"so", prompt="a\ufffd".encode()).text == "so"


class TestStopStrings:
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_are_found_across_token_borders(self, size: int) -> None:
        words = ["one STOP two"[i : i + size] for i in range(0, 12, size)]
        detokenizer = Detokenizer(Vocabulary(words), [], StopStrings(("STOP",)))
        needed = -(-len("one STOP") // size)
        assert [detokenizer.append(token) for token in range(needed)] == [None] * (needed - 1) + ["STOP"]
        assert detokenizer.text == "one "

    def test_end_the_text_before_them(self) -> None:
        assert fed(Bytes(), b"one STOP two", ["STOP"]).text == "one "

    def test_within_one_token(self) -> None:
        assert fed(Vocabulary(["one ST", "OP two STOP"]), [0, 1], ["STOP"]).text == "one "

    def test_the_earliest_wins(self) -> None:
        tokenizer = Vocabulary(["xx two one"])
        detokenizer = Detokenizer(tokenizer, [], StopStrings(("one", "two")))
        assert detokenizer.append(0) == "two"
        assert detokenizer.text == "xx "

    def test_of_two_that_begin_together_the_longer_wins(self) -> None:
        detokenizer = Detokenizer(Vocabulary(["x\n\ny"]), [], StopStrings(("\n", "\n\n")))
        assert detokenizer.append(0) == "\n\n"
        assert detokenizer.text == "x"

    def test_what_is_complete_first_wins_over_what_began_first(self) -> None:
        """Byte by byte, `b` is complete before `abc` can be."""
        detokenizer = Detokenizer(Bytes(), [], StopStrings(("abc", "b")))
        assert [detokenizer.append(byte) for byte in b"ab"] == [None, "b"]
        assert detokenizer.text == "a"

    def test_overlapping_beginnings(self) -> None:
        """A false start must not hide the true one within it."""
        assert fed(Bytes(), b"aab", ["ab"]).text == "a"
        assert fed(Bytes(), b"ENENDx", ["END"]).text == "EN"
        assert fed(Bytes(), b"ababac", ["abac"]).text == "ab"

    def test_of_several_tokens_in_one_character(self) -> None:
        assert fed(Bytes(), "ein 🙂 zwei".encode(), ["🙂"]).text == "ein "
        assert fed(Bytes(), "ein é zwei".encode(), ["é z"]).text == "ein "

    def test_the_prompt_does_not_count(self) -> None:
        assert fed(Bytes(), b"P on", ["STOP"], prompt=b"STO").text == "P on"

    def test_in_what_finish_adds(self) -> None:
        detokenizer = Detokenizer(Bytes(), [], StopStrings(("\ufffd",)))
        assert [detokenizer.append(byte) for byte in b"a\xc3"] == [None, None]
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.text == "a"

    @pytest.mark.parametrize("stops", [["a" * 31_999 + "b"], ["a" * size + "b" for size in range(1, 250)]])
    def test_cost_the_same_however_many_and_long(self, stops: list[str]) -> None:
        """Steps of the automaton are counted, not seconds: at most two for a character, going forward and back."""

        class Counting(list[int]):
            reads = 0

            def __getitem__(self, index: Any) -> Any:
                self.reads += 1
                return super().__getitem__(index)

        automaton = StopStrings(tuple(stops))
        fallback = automaton._fallback = Counting(automaton._fallback)
        text = ("a" * 200 + "c") * 20
        state = 0
        for character in text:
            state, found = automaton.advance(state, character)
            assert found is None
        assert fallback.reads <= len(text)


class Vocabulary:
    """Token i is the i-th of some words."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[token] for token in ids)


STOPS = st.lists(st.text("abEND\né", min_size=1, max_size=4), max_size=3)


def cut(text: str, pieces: list[str], stops: list[str]) -> str:
    """What a text looks like after stops, found by looking at it again after every piece."""
    for count in range(1, len(pieces) + 1):
        seen = "".join(pieces[:count])
        places = [seen.find(stop) for stop in stops if stop in seen]
        if places:
            return seen[: min(places)]
    return text


class TestStreaming:
    @given(pieces=st.lists(st.text("abEND\né", min_size=1, max_size=3), max_size=14), stops=STOPS)
    @settings(max_examples=400)
    def test_what_is_shown_is_the_final_text_and_never_taken_back(self, pieces: list[str], stops: list[str]) -> None:
        """Piece by piece, everything shown is a prefix of the final text; in the end it is all of it."""
        self.stream(Vocabulary(pieces), list(range(len(pieces))), stops, cut("".join(pieces), pieces, stops))

    @given(text=st.text("abEND\né🙂", max_size=20), stops=STOPS)
    @settings(max_examples=400)
    def test_the_same_byte_by_byte(self, text: str, stops: list[str]) -> None:
        self.stream(Bytes(), list(text.encode()), stops, cut(text, list(text), stops))

    def stream(self, tokenizer: Decodes, tokens: list[int], stops: list[str], final: str) -> None:
        detokenizer = Detokenizer(tokenizer, [], StopStrings(tuple(stops)))
        shown = ""
        for token in tokens:
            found = detokenizer.append(token)
            if found is not None:
                assert found in stops
                break
            shown += detokenizer.take(detokenizer.stable())
            assert final.startswith(shown)
            assert detokenizer.shown == len(shown)
        else:
            detokenizer.finish()
        shown += detokenizer.take(len(detokenizer.text))
        assert shown == detokenizer.text == final

    def test_nothing_is_held_back_without_need(self) -> None:
        detokenizer = Detokenizer(Bytes(), [], StopStrings(("END", "\n\n")))
        stable = []
        for byte in b"aENbEN\nE":
            detokenizer.append(byte)
            stable.append(detokenizer.stable())
        assert stable == [1, 1, 1, 4, 4, 4, 6, 7]

    def test_without_stops_all_is_stable(self) -> None:
        detokenizer = fed(Bytes(), b"any text")
        assert detokenizer.stable() == len("any text")

    def test_the_longest_possible_stop_is_held(self) -> None:
        detokenizer = Detokenizer(Bytes(), [], StopStrings(("b!", "ab?", "xxab:")))
        for byte in b"xxab":
            detokenizer.append(byte)
        assert detokenizer.stable() == 0
