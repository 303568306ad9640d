"""Conversations are not lost: not to another tab, and not to a reload while an answer is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.open_page import OpenPage
from tests.page.scripted import answer_with, answer_without_end, steps_of, stream_of
from tests.page.test_conversations import press, texts
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.page

NAMES = "#conversation-list .name"


def names(page: OpenPage) -> list[str]:
    return page.tab.locator(NAMES).all_text_contents()


def until_names(page: OpenPage, wanted: list[str]) -> None:
    for _ in range(500):
        if names(page) == wanted:
            return
        page.tab.wait_for_timeout(20)
    assert names(page) == wanted


@pytest.fixture
def other(scripted_page: OpenPage, tiny_server: RunningServer) -> Iterator[OpenPage]:
    """A second tab of the same browser."""
    page = OpenPage(scripted_page.tab.context.new_page(), tiny_server.url)
    page.tab.goto(tiny_server.url)
    yield page
    assert page.problems == []


def test_tabs_show_and_keep_what_others_save(scripted_page: OpenPage, other: OpenPage) -> None:
    for page, question in ((scripted_page, "From one"), (other, "From two")):
        answer_with(page, stream_of(steps_of("Yes.")))
        page.ask(question)
    both = ["From two", "From one"]
    until_names(scripted_page, both)
    assert texts(scripted_page) == ["From one", "Yes."], "what is open stays open"
    scripted_page.ask("And again")
    until_names(other, both)
    scripted_page.tab.reload()
    assert names(scripted_page) == both
    assert texts(scripted_page) == ["From one", "Yes.", "And again", "Yes."], "a tab stays where it was"


def test_a_conversation_in_two_tabs_has_its_newest_state_in_both(scripted_page: OpenPage, other: OpenPage) -> None:
    answer_with(scripted_page, stream_of(steps_of("Yes.")))
    answer_with(other, stream_of(steps_of("No.")))
    scripted_page.ask("One?")
    until_names(other, ["New conversation", "One?"])
    other.tab.locator(NAMES).nth(1).click()
    other.ask("Two?")
    scripted_page.tab.wait_for_selector("text=Two?")
    scripted_page.tab.wait_for_selector("text=No.")
    scripted_page.ask("Three?")
    other.tab.wait_for_selector("text=Three?")
    whole = ["One?", "Yes.", "Two?", "No.", "Three?", "Yes."]
    other.tab.reload()
    assert texts(other) == texts(scripted_page) == whole


def test_what_one_tab_deletes_stays_deleted(scripted_page: OpenPage, other: OpenPage) -> None:
    answer_with(scripted_page, stream_of(steps_of("Yes.")))
    scripted_page.ask("One?")
    until_names(other, ["New conversation", "One?"])
    other.tab.locator(NAMES).nth(1).click()
    answer_without_end(scripted_page, stream_of(steps_of("Going on and on.")), events=1)
    scripted_page.tab.fill("#prompt", "Two?")
    scripted_page.tab.click("#send")
    scripted_page.tab.wait_for_selector("text=Going")
    other.tab.locator("#conversation-list li.current .remove").click()
    until_names(scripted_page, ["New conversation"])
    scripted_page.tab.wait_for_selector("#stop", state="hidden")
    assert texts(scripted_page) == [], "the answer that was written in it is stopped"
    for page in (scripted_page, other):
        page.tab.reload()
        assert names(page) == ["New conversation"]


def test_a_deletion_can_be_undone_for_all_tabs(scripted_page: OpenPage, other: OpenPage) -> None:
    answer_with(scripted_page, stream_of(steps_of("Yes.")))
    scripted_page.ask("One?")
    scripted_page.tab.click("#conversation-list .remove")
    until_names(other, ["New conversation"])
    scripted_page.tab.click("#undo")
    until_names(other, ["New conversation", "One?"])
    scripted_page.tab.reload()
    assert texts(scripted_page) == ["One?", "Yes."]


def send(page: OpenPage, text: str) -> None:
    page.tab.fill("#prompt", text)
    page.tab.click("#send")


def test_a_reload_keeps_the_question_and_what_was_written(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_without_end(page, stream_of(steps_of("Half of an answer, and the rest.")), events=2)
    send(page, "Tell me.")
    tab.wait_for_selector(".message.assistant :text('Half of an answer, and t')")
    tab.reload()
    assert texts(page) == ["Tell me.", "Half of an answer, and t"]
    assert (
        "interrupted" in tab.locator(".figures").text_content() or "stopped" in tab.locator(".figures").text_content()
    )
    sent = answer_with(page, stream_of(steps_of("he rest.")))
    press(page, "Go on", 1)
    page.until_answered()
    assert [message["content"] for message in sent[0]["messages"]] == ["Tell me.", "Half of an answer, and t"]
    assert texts(page) == ["Tell me.", "Half of an answer, and the rest."]
    assert tab.get_by_role("button", name="Go on").count() == 0


def test_a_question_is_kept_before_it_is_answered(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_without_end(page, "", events=0)
    send(page, "Tell me.")
    tab.wait_for_selector("#stop:not([hidden])")
    (kept,) = page.kept()
    assert kept["messages"][0] == {"role": "user", "content": "Tell me."}
    tab.reload()
    assert texts(page) == ["Tell me.", ""]
    assert tab.get_by_role("button", name="Go on").count() == 0, "there is nothing to continue"
    answer_with(page, stream_of(steps_of("Yes.")))
    press(page, "Regenerate", 1)
    page.until_answered()
    assert texts(page) == ["Tell me.", "Yes."]


def test_an_answer_is_saved_now_and_then_while_it_is_written(scripted_page: OpenPage) -> None:
    """After a crash of the browser, which ends no page in an orderly way, little is lost."""
    page, tab = scripted_page, scripted_page.tab
    tab.evaluate(
        """() => {
            const set = Storage.prototype.setItem;
            window.saves = 0;
            Storage.prototype.setItem = function (key, value) {
                window.saves += key.startsWith("foredraft.conversation.");
                return set.call(this, key, value);
            };
        }"""
    )
    answer_without_end(page, stream_of(steps_of("word " * 600)), events=200, pause_ms=20)
    send(page, "Tell me.")
    for _ in range(1000):
        (kept,) = page.kept() or [{"messages": []}]
        if kept["messages"] and kept["messages"][-1]["content"].startswith("word "):
            break
        tab.wait_for_timeout(20)
    assert kept["messages"][-1]["content"].startswith("word ")
    assert tab.locator("#stop").is_visible(), "it is still being written"
    tab.wait_for_timeout(1000)
    events = len(tab.locator(".message.assistant .body").text_content()) / 12
    assert events > 30 and tab.evaluate("window.saves") < events / 4, "not with every event"


def test_a_list_of_conversations_becomes_entries(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes.", "finish": "stop"}]
    given = [{"id": f"{place}-1", "created": "2026-01-01T00:00:00Z", "messages": messages} for place in range(2)]
    given[0]["messages"] = [{"role": "user", "content": "Two?"}]
    tab.evaluate("(given) => localStorage.setItem('foredraft.conversations', JSON.stringify(given))", given)
    for _ in range(2):
        tab.reload()
        assert names(page) == ["Two?", "One?"] and texts(page) == ["Two?"]
    assert len(page.kept()) == 2
