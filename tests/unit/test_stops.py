"""Where an accepted path is cut: which reason wins, and that looking at many tokens at once changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.stop_strings import StopStrings
from foredraft.engine.stops import find_stop
from foredraft.types import Sequence, Stop
from tests.unit.unit_helpers import make_sequence

EOS = 0
WORDS = ["<eos>", "a", "b", "END", "E", "ND", " ", "\n"]


class Vocabulary:
    """Token i is WORDS[i]."""

    def text_of(self, token: int) -> str | None:
        return None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token] for token in ids)


def setting(output: list[int] | None = None, **params: Any) -> tuple[Sequence, Detokenizer]:
    """A sequence that has written `output` already, and its detokenizer."""
    sequence = make_sequence([1], output or [], **params)
    detokenizer = Detokenizer(Vocabulary(), [1], StopStrings(tuple(sequence.params.stop or ())))
    for token in output or []:
        detokenizer.append(token)
    return sequence, detokenizer


def stop_of(tokens: list[int], output: list[int] | None = None, **params: Any) -> tuple[Stop, str]:
    sequence, detokenizer = setting(output, **params)
    stop, stable = find_stop(sequence, tokens, frozenset({EOS}), detokenizer)
    assert len(stable) == stop.num_kept
    assert sequence.output_token_ids == (output or []), "deciding is not committing"
    return stop, detokenizer.text


class TestReasons:
    def test_none(self) -> None:
        assert stop_of([1, 2, 1]) == (Stop(3), "aba")
        assert stop_of([]) == (Stop(0), "")

    def test_end_of_text(self) -> None:
        """The token is kept, its text is not."""
        assert stop_of([1, EOS, 2]) == (Stop(2, "stop"), "a")

    def test_end_of_text_ignored(self) -> None:
        assert stop_of([1, EOS, 2], ignore_eos=True) == (Stop(3), "a<eos>b")

    def test_stop_token(self) -> None:
        assert stop_of([1, 2, 1], stop_token_ids=[2]) == (Stop(2, "stop", 2), "a")

    def test_stop_token_that_is_the_end_of_text(self) -> None:
        """Ignoring the end of text does not ignore a stop token; otherwise the end of text is the reason."""
        assert stop_of([1, EOS], stop_token_ids=[EOS], ignore_eos=True) == (Stop(2, "stop", EOS), "a")
        assert stop_of([1, EOS], stop_token_ids=[EOS]) == (Stop(2, "stop"), "a")

    @pytest.mark.parametrize("tokens", [[1, 3, 2], [1, 4, 5, 2]])
    def test_stop_string(self, tokens: list[int]) -> None:
        """The token that completes it is kept, the text ends before it."""
        assert stop_of(tokens, stop="END") == (Stop(len(tokens) - 1, "stop", "END"), "a")

    def test_stop_string_begun_in_an_earlier_step(self) -> None:
        assert stop_of([5, 1], [1, 4], stop="END") == (Stop(1, "stop", "END"), "a")

    def test_length(self) -> None:
        assert stop_of([1, 2, 1], max_tokens=2) == (Stop(2, "length"), "ab")
        assert stop_of([1, 2, 1], [2, 2], max_tokens=4) == (Stop(2, "length"), "bbab")
        assert stop_of([1, 2], max_tokens=3) == (Stop(2), "ab")

    def test_several_end_of_text_tokens(self) -> None:
        sequence, detokenizer = setting()
        stop, _ = find_stop(sequence, [1, 7, EOS], frozenset({EOS, 7}), detokenizer)
        assert stop == Stop(2, "stop")


class TestPrecedence:
    """On the last token that max_tokens allows, a stop is a stop; the earliest token decides everything else."""

    @pytest.mark.parametrize(
        ("tokens", "params", "stop"),
        [
            ([1, EOS], {}, Stop(2, "stop")),
            ([1, 2], {"stop_token_ids": [2]}, Stop(2, "stop", 2)),
            ([1, 3], {"stop": "END"}, Stop(2, "stop", "END")),
            ([1, 2], {}, Stop(2, "length")),
            ([1, 2, EOS], {}, Stop(2, "length")),
            ([1, EOS], {"ignore_eos": True}, Stop(2, "length")),
        ],
    )
    def test_of_stops_over_length(self, tokens: list[int], params: dict[str, Any], stop: Stop) -> None:
        assert stop_of(tokens, max_tokens=2, **params)[0] == stop

    def test_of_stop_tokens_over_stop_strings(self) -> None:
        assert stop_of([3], stop="END", stop_token_ids=[3]) == (Stop(1, "stop", 3), "")

    def test_of_what_comes_first(self) -> None:
        assert stop_of([3, EOS, 2], stop="END", stop_token_ids=[2])[0] == Stop(1, "stop", "END")
        assert stop_of([EOS, 3, 2], stop="END", stop_token_ids=[2])[0] == Stop(1, "stop")
        assert stop_of([2, EOS, 3], stop="END", stop_token_ids=[2])[0] == Stop(1, "stop", 2)


class TestFinishing:
    """What is left of a character when a text ends is looked at too."""

    @pytest.mark.parametrize(("tokens", "reason"), [([97, 0xC3], "length"), ([97, 0xC3, 0], "stop")])
    def test_a_stop_string_there_is_a_stop(self, tokens: list[int], reason: str) -> None:
        class Bytes:
            def text_of(self, token: int) -> str | None:
                return None

            def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
                return bytes(ids).decode(errors="replace")

        for stop, expected in (((), (reason, None, "a\ufffd")), (("\ufffd",), ("stop", "\ufffd", "a"))):
            sequence = make_sequence([1], max_tokens=2 if reason == "length" else 9)
            detokenizer = Detokenizer(Bytes(), [], StopStrings(stop))
            found, stable = find_stop(sequence, tokens, frozenset({EOS}), detokenizer)
            assert (found.finish_reason, found.stop_reason, detokenizer.text) == expected
            assert stable[-1] == len(detokenizer.text)


class TestStableText:
    def test_one_mark_per_kept_token(self) -> None:
        """After each token: how much of the text may be shown."""
        sequence, detokenizer = setting(stop="END")
        _, stable = find_stop(sequence, [1, 4, 1, 4, 5, 2], frozenset(), detokenizer)
        assert stable == [1, 1, 3, 3, 3]


@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    stop=st.lists(st.sampled_from(["END", "ab", "\n", "b\n", "aE", "E"]), max_size=2),
    stop_token_ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=1),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(1, 12),
)
@settings(max_examples=300)
def test_paths_of_any_length_are_cut_where_plain_decoding_stops(
    tokens: list[int], sizes: list[int], max_tokens: int, **params: Any
) -> None:
    """The same tokens one at a time and in steps of several: same cut, same reason, same text, same marks."""

    def decode(lengths: list[int]) -> tuple[list[int], Stop, str, list[int]]:
        sequence, detokenizer = setting(max_tokens=max_tokens, **params)
        rest, marks = list(tokens), []
        for length in lengths:
            step, rest = rest[:length], rest[length:]
            stop, stable = find_stop(sequence, step, frozenset({EOS}), detokenizer)
            sequence.token_ids += step[: stop.num_kept]
            marks += stable
            if stop.finish_reason is not None or not rest:
                break
        return sequence.token_ids, Stop(0, stop.finish_reason, stop.stop_reason), detokenizer.text, marks

    assert decode(sizes) == decode([1] * 12)
