"""What of an answer is thought, said and called: every format, cut into pieces in every way."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.answers import HARMONY_TAGS, TAGS, AnswerFormat, CallReader, Part

PLAIN = AnswerFormat()
THINKS = AnswerFormat(thinks=True)
BEGUN = AnswerFormat(thinks=True, begun="<think>")
LLAMA3 = AnswerFormat(has_bare_calls=True)
HARMONY = AnswerFormat(is_harmony=True, begun="<|start|>assistant")
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BARE = '{"name": "weather", "parameters": {"city": "Oslo"}}'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_WEATHER = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'

# what is written, in which format: what is thought, what is said, how many calls there are
ANSWERS: dict[str, tuple[AnswerFormat, str, tuple[str, str, int]]] = {
    "a thought": (THINKS, "<think>\nHm.\n\nYes.\n</think>\n\nIt is.\n", ("Hm.\n\nYes.", "It is.\n", 0)),
    "spaces before a thought": (THINKS, " \n<think>Hm.</think>It is.", ("Hm.", "It is.", 0)),
    "no thought": (THINKS, "\n It is.", ("", "\n It is.", 0)),
    "an empty thought": (THINKS, "<think>\n\n</think>\n\nIt is.", ("", "It is.", 0)),
    "a thought without an end": (THINKS, "<think>\nHm. </thi", ("Hm. </thi", "", 0)),
    "a thought that the prompt began": (BEGUN, "Hm.\n</think>\n\nIt is.", ("Hm.", "It is.", 0)),
    "a begun thought without an end": (BEGUN, "Hm. ", ("Hm.", "", 0)),
    "tags in what is said": (THINKS, "Say <think>so</think>.", ("", "Say <think>so</think>.", 0)),
    "a second thought": (THINKS, "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>", 0)),
    "a second thought at once": (THINKS, "<think>a</think><think>c</think>", ("a", "<think>c</think>", 0)),
    "the beginning of a tag": (THINKS, "<thin", ("", "<thin", 0)),
    "nothing but spaces": (THINKS, " \n", ("", " \n", 0)),
    "nothing behind a thought": (THINKS, "<think>a</think>\n", ("a", "", 0)),
    "a call behind a thought": (THINKS, f"<think>a</think>\n<tool_call>{CALL}</tool_call>", ("a", "", 1)),
    "a call in a thought": (
        BEGUN,
        f"<tool_call>{CALL}</tool_call></think>b",
        (f"<tool_call>{CALL}</tool_call>", "b", 0),
    ),
    "a model that does not think": (PLAIN, "<think>a</think>b", ("", "<think>a</think>b", 0)),
    "a bare call": (LLAMA3, f"\n{BARE}\n", ("", "", 1)),
    "a bare call of no tool": (LLAMA3, BARE.replace("weather", "x"), ("", BARE.replace("weather", "x"), 0)),
    "another object": (LLAMA3, ' {"name": "weather"}', ("", ' {"name": "weather"}', 0)),
    "a bare call that was cut": (LLAMA3, BARE[:-1], ("", BARE[:-1], 0)),
    "more than a bare call": (LLAMA3, f"{BARE} is it", ("", f"{BARE} is it", 0)),
    "an object in what is said": (LLAMA3, f"It is {BARE}", ("", f"It is {BARE}", 0)),
    "no format of Llama 3": (PLAIN, BARE, ("", BARE, 0)),
    "channels": (HARMONY, f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}It is.", ("Hm.", "It is.", 0)),
    "channels to their end": (
        HARMONY,
        f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}It is.<|return|>",
        ("Hm.", "It is.", 0),
    ),
    "a function": (HARMONY, f"{ANALYSIS}Hm.<|end|><|start|>assistant{TO_WEATHER}", ("Hm.", "", 1)),
    "a function, called": (HARMONY, f"{TO_WEATHER}<|call|>", ("", "", 1)),
    "a function in the role": (
        HARMONY,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        ("", "", 1),
    ),
    "a function that is thought of": (
        HARMONY,
        '<|channel|>analysis to=functions.weather<|message|>{"city": "Oslo"}',
        ("", "", 1),
    ),
    "another recipient": (HARMONY, "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", 0)),
    "a preamble": (
        HARMONY,
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_WEATHER}",
        ("", "I look.", 1),
    ),
    "two thoughts": (HARMONY, f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>", ("a\n\nb", "", 0)),
    "a missing end": (HARMONY, f"{ANALYSIS}a{FINAL}b", ("a", "b", 0)),
    "a cut header": (HARMONY, f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>fin", ("a", "", 0)),
    "a cut first header": (HARMONY, "<|channel|>anal", ("", "", 0)),
    "a cut tag": (HARMONY, f"{FINAL}a<|en", ("", "a<|en", 0)),
    "no header": (HARMONY, "It is.", ("", "It is.", 0)),
    "a message goes on": (AnswerFormat(is_harmony=True, begun=f"<|start|>assistant{FINAL}It"), " is.", ("", " is.", 0)),
    "a grammar's answer": (AnswerFormat(is_harmony=True), CALL, ("", CALL, 0)),
}


def read(answer_format: AnswerFormat, pieces: list[str], names: tuple[str, ...] | None = ("weather",)) -> Part:
    reader = answer_format.reader(names)
    return sum([reader.feed(piece) for piece in pieces], Part()) + reader.end()


def told(part: Part) -> tuple[str, str, list[tuple[str, str]]]:
    return part.reasoning, part.content, [(call.name, call.arguments) for call in part.calls]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str, size: int) -> None:
    answer_format, text, (reasoning, content, num_calls) = ANSWERS[name]
    part = read(answer_format, [text[start : start + size] for start in range(0, len(text), size)])
    assert (part.reasoning, part.content) == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in part.calls] == [
        ("weather", {"city": "Oslo"})
    ] * num_calls


BITS = [*TAGS, *HARMONY_TAGS, CALL, BARE, "analysis", "final", "commentary to=functions.x ", "<", "|", " ", "\n", "a"]


@given(
    texts=st.lists(st.sampled_from(BITS), max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    answer_format=st.sampled_from([PLAIN, THINKS, BEGUN, LLAMA3, HARMONY]),
    names=st.sampled_from([None, (), ("weather",)]),
)
def test_pieces_change_nothing(
    texts: list[str], cuts: list[int], answer_format: AnswerFormat, names: tuple[str, ...] | None
) -> None:
    text = "".join(texts)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = told(read(answer_format, [text], names))
    assert told(read(answer_format, pieces, names)) == whole
    assert told(read(answer_format, list(text), names)) == whole
    if names == ():
        assert not whole[2], "nothing can be called"


def test_thoughts_and_content_come_as_they_are_written() -> None:
    reader = THINKS.reader(())
    pieces = ["<think>", "Hm", ", ", "yes", "</think>", "\n", "It", " is"]
    assert [reader.feed(piece) for piece in pieces] == [
        *(Part(), Part("Hm"), Part(","), Part(" yes"), Part(), Part()),
        *(Part(content="It"), Part(content=" is")),
    ]


def test_what_cannot_be_called_is_content() -> None:
    assert told(read(HARMONY, [TO_WEATHER], ())) == ("", '{"city": "Oslo"}', [])
    assert told(read(LLAMA3, [BARE], ())) == ("", BARE, [])


def test_an_answer_that_is_a_call_whatever_it_says() -> None:
    assert told(CallReader("weather").whole("<think>")) == ("", "", [("weather", "<think>")])
    assert told(CallReader().whole("{}")) == ("", "{}", [])


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("", ["<|im_end|>"], PLAIN),
        ("{% if '</think>' in content %}", [], THINKS),
        ("", ["<think>", "</think>"], THINKS),
        ("", HARMONY_TAGS, AnswerFormat(is_harmony=True)),
        ("", ["<|end|>", "<|user|>"], PLAIN),  # Phi
        ('{"name": function name, "parameters": dictionary of argument name and its value}', [], LLAMA3),
        ('<tool_call> "parameters": dictionary of argument name and its value', ["<|python_tag|>"], PLAIN),
    ],
)
def test_how_a_model_writes(template: str, tokens: list[str], expected: AnswerFormat) -> None:
    assert AnswerFormat.of(template, tokens) == expected
