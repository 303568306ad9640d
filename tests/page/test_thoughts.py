"""What a reasoning model thinks before it answers: shown folded, kept, and no part of the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.open_page import OpenPage
from tests.page.scripted import answer_in_time, answer_with, answer_without_end, steps_of, stream_of
from tests.page.test_conversations import texts

pytestmark = pytest.mark.page

THOUGHTS = "Is it <b>two</b>?\nYes, *two*."
STREAM = stream_of(steps_of("It is **two**, and no more."), thoughts=steps_of(THOUGHTS))
TITLE, TEXT = ".thoughts summary", ".thoughts .thought"


def test_thoughts_are_folded_above_the_answer(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_in_time(page, plain=(STREAM, 0), spec=(STREAM, 400))
    assert page.ask("How many?") == "It is **two**, and no more."
    seconds = int(tab.locator(TITLE).text_content().removeprefix("Thought for ").removesuffix(" s"))
    assert 1 <= seconds < 60
    assert not tab.locator(TEXT).is_visible()
    (above,), (below,) = (
        tab.locator(selector).evaluate_all("nodes => nodes.map((node) => node.getBoundingClientRect().bottom)")
        for selector in (".thoughts", ".message.assistant .body")
    )
    assert above < below
    tab.focus(TITLE)
    tab.keyboard.press("Enter")
    assert tab.locator(TEXT).is_visible()
    assert tab.locator(TEXT).text_content() == THOUGHTS and tab.locator(".thoughts b").count() == 0
    tab.locator(".message.assistant").get_by_role("button", name="Copy").last.click()
    tab.wait_for_selector("[data-label=Copied]")
    assert tab.evaluate("navigator.clipboard.readText()") == "It is **two**, and no more."


def test_a_model_that_thinks_says_so(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_without_end(page, STREAM, events=2)
    tab.fill("#prompt", "How many?")
    tab.click("#send")
    page.until_text(TITLE, "Thinking …")
    page.until_text(TEXT, THOUGHTS[:24])
    tab.click("#stop")
    page.until_answered()
    assert tab.locator(TITLE).text_content().startswith("Thought")
    assert texts(page) == ["How many?", ""] and tab.get_by_role("button", name="Go on").count() == 0
    tab.reload()
    assert tab.locator(TEXT).text_content() == THOUGHTS[:24], "it is kept without an answer, too"


def test_tokens_of_thoughts_are_not_those_of_the_answer(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_with(page, STREAM)
    page.ask("How many?")
    tab.click("#tints")
    assert "".join(tab.locator(".body .token").all_text_contents()) == "It is **two**, and no more."
    tab.focus(".message.assistant .body")
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".token.current").text_content() == "It i"
    page.tab.reload()
    assert tab.locator(".body .token").first.text_content() == "It i"


def test_thoughts_are_exported_imported_and_sent_again(scripted_page: OpenPage, tmp_path: Path) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_with(page, STREAM)
    page.ask("How many?")
    with tab.expect_download() as waiting:
        tab.click("#export-all")
    waiting.value.save_as(tmp_path / "export.json")
    tab.click("#conversation-list .remove")
    tab.set_input_files("#import-file", tmp_path / "export.json")
    tab.wait_for_selector(TITLE)
    assert tab.locator(TEXT).text_content() == THOUGHTS
    sent = answer_with(page, stream_of(steps_of("Bye.")))
    page.ask("Thanks")
    answer = {"role": "assistant", "content": "It is **two**, and no more.", "reasoning_content": THOUGHTS}
    assert sent[0]["messages"][1] == answer
    assert "reasoning_content" not in sent[0]["messages"][0]
    assert tab.locator(TITLE).count() == 1


def test_a_race_compares_thoughts_too(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    tab.emulate_media(reduced_motion="reduce")
    answer_with(page, STREAM, stream_of(steps_of("It is **two**, and no more."), thoughts=steps_of("Is it three?")))
    tab.click("#tab-compare")
    assert page.race().startswith("✗ The texts differ at byte 6.")
    assert tab.locator("#lane-plain .text").text_content() == f"{THOUGHTS}\n\nIt is **two**, and no more."
