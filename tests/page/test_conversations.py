"""What chat pages have: answers that go on, are asked for again, edited, copied, deleted, exported and imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.page.open_page import OpenPage
from tests.page.scripted import answer_with, step, steps_of, stream_of

pytestmark = pytest.mark.page


def texts(page: OpenPage) -> list[str]:
    return page.tab.locator(".message .body").all_text_contents()


def press(page: OpenPage, label: str, message: int) -> None:
    page.tab.locator(".message").nth(message).get_by_role("button", name=label, exact=True).click()


def sent_texts(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_an_answer_that_was_cut_goes_on(scripted_page: OpenPage) -> None:
    first, second = steps_of("One, two, **th"), steps_of("ree**, four.")
    sent = answer_with(scripted_page, stream_of(first, "length"), stream_of(second))
    scripted_page.ask("Count.")
    assert "cut at the longest answer" in scripted_page.tab.locator(".figures").text_content()
    press(scripted_page, "Go on", 1)
    scripted_page.until_answered()
    assert texts(scripted_page) == ["Count.", "One, two, **three**, four."]
    assert scripted_page.tab.locator(".message.assistant strong").text_content() == "**three**"
    assert sent_texts(sent[1]) == [("user", "Count."), ("assistant", "One, two, **th")]
    tokens = sum(len(each["tokens"]) for each in (*first, *second))
    assert f"{tokens} tokens · " in scripted_page.tab.locator(".figures").text_content()
    assert scripted_page.tab.get_by_role("button", name="Go on").count() == 0, "it is complete"


def test_a_real_answer_goes_on_where_it_was_cut(page: OpenPage) -> None:
    """Two halves are the whole."""
    whole = {"temperature": "0", "max_tokens": "24", "spec": "ngram+suffix"}
    page.configure(**whole)
    expected = page.ask("Name the days of the week.")
    page.tab.click("#new-conversation")
    page.configure(max_tokens="12")
    page.ask("Name the days of the week.")
    press(page, "Go on", 1)
    page.until_answered()
    assert page.answer() == expected


def test_regenerate(scripted_page: OpenPage) -> None:
    sent = answer_with(scripted_page, *(stream_of(steps_of(text)) for text in ("red", "blue", "green")))
    scripted_page.ask("A colour?")
    scripted_page.ask("Another?")
    press(scripted_page, "Regenerate", 1)
    scripted_page.until_answered()
    assert texts(scripted_page) == ["A colour?", "green"], "what followed is gone"
    assert sent_texts(sent[2]) == [("user", "A colour?")]


def test_edit_a_turn(scripted_page: OpenPage) -> None:
    sent = answer_with(scripted_page, stream_of(steps_of("one")), stream_of(steps_of("two")))
    scripted_page.ask("First?")
    press(scripted_page, "Edit", 0)
    box = scripted_page.tab.get_by_label("Change the message")
    assert box.input_value() == "First?"
    box.press("Escape")
    assert texts(scripted_page) == ["First?", "one"] and box.count() == 0
    press(scripted_page, "Edit", 0)
    box.fill("Second?")
    scripted_page.tab.get_by_role("button", name="Send").first.click()
    scripted_page.until_answered()
    assert texts(scripted_page) == ["Second?", "two"]
    assert sent_texts(sent[1]) == [("user", "Second?")]


def test_delete_a_turn_and_a_conversation_and_have_them_back(scripted_page: OpenPage) -> None:
    answer_with(scripted_page, stream_of(steps_of("yes")), stream_of(steps_of("no")))
    scripted_page.ask("One?")
    scripted_page.ask("Two?")
    press(scripted_page, "Delete", 0)
    assert texts(scripted_page) == ["Two?", "no"]
    scripted_page.tab.click("#undo")
    assert texts(scripted_page) == ["One?", "yes", "Two?", "no"]
    press(scripted_page, "Delete", 2)
    scripted_page.tab.reload()
    assert texts(scripted_page) == ["One?", "yes"]
    scripted_page.tab.click("#conversation-list .remove")
    assert texts(scripted_page) == []
    scripted_page.tab.click("#undo")
    assert texts(scripted_page) == ["One?", "yes"]
    scripted_page.tab.reload()
    assert texts(scripted_page) == ["One?", "yes"]


def test_an_export_can_be_imported(scripted_page: OpenPage, tmp_path: Path) -> None:
    answer_with(scripted_page, stream_of(steps_of("A **bold** answer.")))
    scripted_page.ask("A question")
    tab = scripted_page.tab
    with tab.expect_download() as waiting:
        tab.click("#export-all")
    waiting.value.save_as(tmp_path / "export.json")
    before = scripted_page.kept()
    tab.click("#conversation-list .remove")
    assert texts(scripted_page) == []
    tab.set_input_files("#import-file", tmp_path / "export.json")
    tab.wait_for_selector(".message.assistant")
    after = scripted_page.kept()
    assert [each["messages"] for each in after] == [each["messages"] for each in before]
    assert tab.locator(".message.assistant .token").count() > 0, "with its tokens"


def test_messages_of_others_are_imported(scripted_page: OpenPage, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    looping = {
        **step([("a", "suffix"), ("b", "target")]),
        "draft": {"tokens": ["a"], "parents": [0], "scores": [1], "origins": ["x"]},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": "ab", "steps": [looping]},
        {"role": "<b>", "content": "unknown"},
        "no message",
    ]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages}))
    scripted_page.tab.set_input_files("#import-file", tmp_path / "chat.json")
    scripted_page.tab.wait_for_selector(".message.assistant")
    assert texts(scripted_page) == ["Be brief.", "Rain?\n", "", "no", "ab"]
    assert scripted_page.tab.locator(".call").text_content() == 'Calls weather({"town":"Ulm"})'
    assert scripted_page.tab.locator(".token").count() == 0, "steps that are not whole are left out"
    sent = answer_with(scripted_page, stream_of(steps_of("Bye.")))
    scripted_page.ask("Thanks")
    assert [message["role"] for message in sent[0]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert sent[0]["messages"][2]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"conversations": 3}', '{"conversations": [null, {"messages": 1}]}']
)
def test_files_without_conversations_are_refused(scripted_page: OpenPage, tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    scripted_page.tab.set_input_files("#import-file", tmp_path / "bad.json")
    scripted_page.tab.wait_for_selector("#problem:not([hidden])")
    assert scripted_page.tab.locator("#problem-text").text_content().startswith("bad.json ")
    assert scripted_page.tab.locator(".message").count() == 0


def test_the_model_and_the_settings_in_force_are_shown(scripted_page: OpenPage) -> None:
    line = scripted_page.tab.locator("#effective")
    scripted_page.until_text("#effective", "tiny · ngram+suffix · the model's own sampling · at most 1024 tokens")
    scripted_page.configure(temperature="0.7", top_p="0.9", spec="auto", max_tokens="50", seed="3")
    assert line.text_content() == "tiny · auto · temperature 0.7 · top_p 0.9 · seed 3 · at most 50 tokens"
    sent = answer_with(scripted_page, stream_of(steps_of("yes")))
    scripted_page.ask("And?")
    assert (sent[0]["temperature"], sent[0]["top_p"], sent[0]["spec"], sent[0]["max_tokens"]) == (0.7, 0.9, "auto", 50)
    scripted_page.tab.click(".message.assistant summary")
    shown = scripted_page.tab.locator(".message.assistant .settings").inner_text().split("\n")
    text = " ".join(part.strip() for part in shown)
    for name, value in {"Model": "tiny", "Speculation": "auto", "Temperature": "0.7", "Longest answer": "50"}.items():
        assert f"{name}{value}" in text
    line.click()
    assert scripted_page.tab.locator("#settings").is_visible()


def test_a_refused_request_leaves_the_question(scripted_page: OpenPage) -> None:
    scripted_page.configure(spec="draft_model:model=/etc/passwd")
    scripted_page.tab.fill("#prompt", "hello")
    scripted_page.tab.click("#send")
    scripted_page.tab.wait_for_selector("#problem:not([hidden])")
    assert texts(scripted_page) == ["hello"]
    scripted_page.problems.clear()
    scripted_page.configure(spec="")
    answer_with(scripted_page, stream_of(steps_of("hi")))
    press(scripted_page, "Edit", 0)
    scripted_page.tab.get_by_role("button", name="Send").first.click()
    scripted_page.until_answered()
    assert texts(scripted_page) == ["hello", "hi"]


def test_the_strip_says_in_words_what_the_controller_does(scripted_page: OpenPage) -> None:
    drafted = step([("a", "eagle"), ("b", "target")], reasons=["eagle: drafted", "drafted"])
    alone = [("c", "target")]
    rested = step(alone, reasons=["eagle: resting", "nothing proposed"])
    unsure = step(alone, reasons=["eagle: drafted", "would not pay"])
    why = "#strip .why > :last-child"
    answer_with(scripted_page, stream_of([drafted, rested, rested, unsure]))
    scripted_page.ask("Why?")
    assert scripted_page.tab.locator(why).text_content() == (
        "1 of 4 runs had a draft that was expected to save time. "
        "2 had none: eagle rests, because querying does not pay now. "
        "1 had none: checking the draft would have cost more time than it saves. This saved 0.25 s."
    )
    answer_with(scripted_page, stream_of([step([("a", "eagle"), ("b", "target")], reasons=[])]))
    scripted_page.ask("And fixed?")
    assert scripted_page.tab.locator(why).text_content() == (
        "The spec is fixed, so there is nothing to decide. 1 of 1 run had a draft."
    )


@pytest.mark.parametrize(
    ("kind", "text", "field", "value"),
    [
        (
            "schema",
            '{"type": "object"}',
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object"}}},
        ),
        ("gbnf", 'root ::= "a"', "grammar", {"gbnf": 'root ::= "a"'}),
        ("lark", 'start: "a"', "grammar", {"lark": 'start: "a"'}),
    ],
)
def test_a_grammar_of_the_settings_is_sent(
    scripted_page: OpenPage, kind: str, text: str, field: str, value: dict[str, Any]
) -> None:
    scripted_page.configure(grammar_kind=kind, grammar=text)
    sent = answer_with(scripted_page, stream_of(steps_of("a")))
    scripted_page.ask("And?")
    assert sent[0][field] == value


def test_a_gbnf_grammar_shapes_an_answer(scripted_page: OpenPage) -> None:
    """By the server itself, with any model."""
    scripted_page.configure(grammar_kind="gbnf", grammar='root ::= "yes, " "yes"', max_tokens="40")
    assert scripted_page.ask("And?") == "yes, yes"
