"""Using the page: keyboard, settings, storage, keys, screen readers, and text that wants to be more than text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.server.page import FILES
from tests.page.open_page import OpenPage
from tests.server.running_server import RunningServer, load_tiny_model, running, save_tiny_model

pytestmark = pytest.mark.page

SHORT = {"temperature": "0", "max_tokens": "24"}


def test_keyboard(page: OpenPage) -> None:
    tab = page.tab
    assert tab.evaluate("document.activeElement.id") == "prompt"
    page.configure(temperature="1", max_tokens="1500", spec="off", grammar_kind="regex", grammar="(la ){1400}")
    tab.focus("#prompt")
    tab.keyboard.type("one")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("two")
    tab.keyboard.press("Enter")
    assert tab.locator(".message.user .body").text_content() == "one\ntwo"
    tab.wait_for_selector(".message.assistant .token", timeout=60_000)
    tab.keyboard.press("Escape")
    page.until_answered()
    assert "stopped" in tab.locator(".message.assistant .figures").text_content()
    tab.keyboard.press("Alt+2")
    assert tab.locator("#compare").is_visible()
    tab.focus("#tab-compare")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#tree").is_visible() and tab.evaluate("document.activeElement.id") == "tab-tree"
    tab.keyboard.press("?")
    assert tab.locator("#shortcuts").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("#shortcuts").is_visible()
    tab.keyboard.press("/")
    assert tab.locator("#chat").is_visible() and tab.evaluate("document.activeElement.id") == "prompt"
    tab.keyboard.press("Alt+n")
    assert tab.locator(".message").count() == 0


def test_a_stopped_answer_frees_its_cache(page: OpenPage, server: RunningServer) -> None:
    page.configure(temperature="1", max_tokens="1500", spec="off", grammar_kind="regex", grammar="(la ){1400}")
    page.tab.fill("#prompt", "go on")
    page.tab.press("#prompt", "Enter")
    page.tab.wait_for_selector(".message.assistant .token", timeout=60_000)
    page.tab.click("#stop")
    server.until_idle(timeout=20)


def test_the_turns_of_a_tab_share_a_salt_of_their_own(page: OpenPage) -> None:
    sent: list[dict[str, Any]] = []
    page.tab.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.configure(**SHORT)
    for text in ("One.", "Two."):
        page.ask(text)
    first, second = (body["cache_salt"] for body in sent)
    assert first == second == page.tab.evaluate("sessionStorage.getItem('foredraft.salt')") and len(first) > 20


def test_tokens_can_be_walked_through_with_the_keyboard(page: OpenPage) -> None:
    page.configure(**SHORT)
    page.ask("Count to ten.")
    page.tab.keyboard.press("Alt+t")
    page.tab.focus(".message.assistant .body")
    page.tab.keyboard.press("ArrowRight")
    page.tab.keyboard.press("ArrowRight")
    chosen = page.tab.locator(".token.current")
    assert chosen.count() == 1 and "Step " in page.tab.locator("#announcer").text_content()


def test_what_a_model_writes_stays_text(page: OpenPage) -> None:
    evil = '<img src=x id="evil" onerror="document.title=1"><script>document.title=1</script>'
    page.configure(**SHORT, grammar_kind="choice", grammar=evil)
    page.configure(max_tokens="64")
    assert page.ask(evil) == evil
    page.tab.click("#tints")
    page.tab.reload()
    assert page.answer() == evil
    assert page.tab.locator("#evil").count() == 0 and page.tab.title() == "Foredraft"


def test_a_json_schema_shapes_the_answer(page: OpenPage) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["blue", "red"]}}, "required": ["colour"]}
    page.configure(**SHORT, grammar_kind="schema", grammar=json.dumps(schema))
    answer = json.loads(page.ask("Which colour has the sky?"))
    assert answer in ({"colour": "blue"}, {"colour": "red"}), "and nothing else"
    page.configure(grammar="{")
    page.tab.fill("#prompt", "again")
    page.tab.press("#prompt", "Enter")
    assert "no valid JSON" in page.tab.locator("#problem-text").text_content()


def test_the_server_tells_what_is_wrong(page: OpenPage) -> None:
    page.configure(**SHORT, spec="draft_model:model=/etc/passwd")
    page.tab.fill("#prompt", "hello")
    page.tab.press("#prompt", "Enter")
    page.tab.wait_for_selector("#problem:not([hidden])")
    assert "is not allowed here" in page.tab.locator("#problem-text").text_content()
    assert all("400" in problem for problem in page.problems)
    page.problems.clear()


def test_conversations_are_kept_and_exported(page: OpenPage, tmp_path: Path) -> None:
    page.configure(**SHORT)
    answer = page.ask("Name a fruit.")
    page.tab.click("#new-conversation")
    page.ask("Name a tree.")
    page.tab.reload()
    names = page.tab.locator("#conversation-list .name")
    assert names.all_text_contents() == ["Name a tree.", "Name a fruit."]
    names.nth(1).click()
    assert page.answer() == answer
    with page.tab.expect_download() as waiting:
        page.tab.click("#export-all")
    waiting.value.save_as(tmp_path / "export.json")
    exported = json.loads((tmp_path / "export.json").read_text())
    assert [each["title"] for each in exported["conversations"]] == ["Name a tree.", "Name a fruit."]
    assert [message["content"] for message in exported["conversations"][1]["messages"]] == ["Name a fruit.", answer]
    page.tab.locator("#conversation-list .remove").nth(0).click()
    page.tab.locator("#conversation-list .remove").nth(0).click()
    page.tab.reload()
    assert page.tab.locator(".message").count() == 0


def test_a_key_where_the_server_wants_one(browser: Any, tmp_path: Path) -> None:
    with (
        running(load_tiny_model(save_tiny_model(tmp_path)), api_keys=["sesame"]) as locked,
        OpenPage.opened(browser, locked.url) as page,
    ):
        page.tab.wait_for_selector("#key-form:not([hidden])")
        page.tab.fill("#api-key", "sesame")
        page.tab.press("#api-key", "Enter")
        page.until_text("#model", "tiny")
        page.configure(**SHORT)
        page.ask("hello")
        assert "sesame" not in page.tab.evaluate("JSON.stringify(localStorage)")
        assert all("401" in problem for problem in page.problems)
        page.problems.clear()


def test_screen_readers(page: OpenPage) -> None:
    page.configure(**SHORT)
    answer = page.ask("Name a colour.")
    assert page.tab.locator("#announcer").get_attribute("aria-live") == "polite"
    assert page.tab.locator("#announcer").text_content() == f"Answer: {answer}"
    for role in ("banner", "main", "complementary", "contentinfo"):
        assert page.tab.get_by_role(role).count() == 1, role
    unnamed = page.tab.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
            .filter((node) => !(node.labels?.length || node.getAttribute("aria-label") || node.textContent.trim()))
            .map((node) => node.id)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Any, server: RunningServer, scheme: str) -> None:
    """Text and background of every pair that the styles use, as the browser computes them."""
    on_text = ["paper", "surface", "sunken", *(f"tint-{tint}" for tint in range(1, 9))]
    pairs = [("ink", each) for each in on_text]
    pairs += [(each, place) for each in ("muted", "accent", "danger", "good") for place in ("paper", "surface")]
    pairs += [("muted", "sunken"), ("accent", "sunken"), ("on-accent", "accent")]
    pairs += [(f"code-{kind}", "surface") for kind in ("comment", "string", "number", "keyword", "call", "other")]
    assert all(f"--{name}:".encode() in FILES["theme.css"] for pair in pairs for name in pair)
    with OpenPage.opened(browser, server.url, color_scheme=scheme) as page:
        found = page.tab.evaluate(
            """(pairs) => {
                const probe = document.createElement("i");
                document.body.append(probe);
                const light = (name) => {
                    probe.style.color = `var(--${name})`;
                    const channels = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3);
                    const curve = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                    const linear = channels.map((each) => curve(each / 255));
                    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
                };
                return pairs.map(([text, back]) => {
                    const [high, low] = [light(text), light(back)].sort((a, b) => b - a);
                    return (high + 0.05) / (low + 0.05);
                });
            }""",
            pairs,
        )
        assert {pair: round(ratio, 2) for pair, ratio in zip(pairs, found, strict=True) if ratio < 4.5} == {}
