"""Nothing that a prompt, a model, a tool or a file says runs: with the policy of the server, and without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.hostile_texts import TEXTS
from tests.page.open_page import OpenPage
from tests.page.scripted import answer_with, step, stream_of
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.page

# What text may become, with the attributes that it may have.
CHECK = """() => {
    const blocks = "P H3 H4 H5 H6 UL OL LI BLOCKQUOTE DIV TABLE THEAD TBODY TR TH TD PRE";
    const allowed = new Set(`${blocks} CODE SPAN EM STRONG S A BUTTON`.split(" "));
    const wrong = [];
    const shown = ".body *, .call *, #tooltip *, #conversation-list *, .foot *, .thoughts *";
    for (const node of document.querySelectorAll(shown)) {
        const isOwn = node.closest(".foot, #tooltip") || node.matches(".thoughts > :is(summary, .thought)");
        if (!isOwn && !allowed.has(node.tagName)) wrong.push(node.tagName);
        for (const { name, value } of node.attributes) {
            if (name.startsWith("on") || name === "style" || name === "src") wrong.push(`${node.tagName} ${name}`);
            if (name === "href" && !/^(https?|mailto):/.test(node.href)) wrong.push(value);
        }
    }
    const own = ":not([src^='/static/'])";
    const foreign = document.querySelectorAll(`script${own}, img${own}, iframe, object, embed, base`);
    return [...wrong, ...[...foreign].map((node) => node.tagName)];
}"""


class Watched:
    """A page with what must not happen on it: dialogs and scripts; errors and foreign requests are the page's own."""

    def __init__(self, page: OpenPage) -> None:
        self.page = page
        self.dialogs: list[str] = []
        page.tab.on("dialog", self._dialog)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def check(self) -> None:
        self.page.tab.wait_for_timeout(50)
        assert self.page.tab.evaluate(CHECK) == []
        assert self.page.tab.evaluate("window.ran === undefined && document.title") == "Foredraft"
        assert (self.dialogs, self.page.problems, len(self.page.tab.context.pages)) == ([], [], 1)


@pytest.fixture(params=[False, True], ids=["policy", "no-policy"])
def watched(browser: Any, tiny_server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Watched]:
    with OpenPage.opened(browser, tiny_server.url, bypass_csp=request.param) as page:
        yield Watched(page)


def hostile_step(text: str) -> dict[str, Any]:
    """The text as an emitted token, as a rejected branch, as the name of a proposer and as a reason."""
    draft = {"tokens": [text, text], "parents": [-1, -1], "scores": [0.9, 0.1], "origins": ["suffix", text]}
    return step([(text, "suffix"), ("\n", "target")], draft, accepted=[0], reasons=[f"{text}: drafted", text])


def touch_all(page: OpenPage) -> None:
    """Tooltips, the tree, the code's buttons, an edit box, settings, and the conversation as it is kept."""
    tab = page.tab
    if tab.locator("#tints").get_attribute("aria-pressed") == "false":
        tab.click("#tints")
    token = tab.locator(".message.assistant .token").first
    if token.count():
        token.hover(force=True)
        tab.keyboard.press("Alt+3")
        tab.keyboard.press("Alt+1")
    for label in ("Edit", "Cancel"):
        button = tab.get_by_role("button", name=label).first
        if button.count():
            button.click()
    for summary in tab.locator(".message summary").all()[:1]:
        summary.click()
    tab.reload()


def test_there_are_fifty() -> None:
    assert len(set(TEXTS)) == 50


def test_prompts_and_answers(watched: Watched) -> None:
    page = watched.page
    for text in TEXTS:
        page.tab.click("#new-conversation")
        answer_with(page, stream_of([hostile_step(text)], thoughts=[hostile_step(text)]))
        assert page.ask(text) == f"{text}\n".replace("\r", "\n")
        watched.check()
    touch_all(page)
    watched.check()


def test_tool_names_and_imports(watched: Watched, tmp_path: Path) -> None:
    conversations = [
        {
            "title": text,
            "created": text,
            "id": text,
            "messages": [
                {"role": "system", "content": text, "name": text},
                {"role": "user", "content": [{"type": text, "text": text}], "name": text},
                {
                    "role": "assistant",
                    "content": text,
                    "tool_calls": [{"id": text, "function": {"name": text, "arguments": text}}],
                    **{
                        "model": text,
                        "error": text,
                        "finish": text,
                        "seed": text,
                        "settings": {text: text, "spec": text},
                    },
                },
                {"role": "tool", "content": text, "name": text, "tool_call_id": text},
                {
                    "role": "assistant",
                    "content": f"{text}\n",
                    "reasoning_content": text,
                    "steps": [hostile_step(text)],
                    "saved": text,
                },
                {"role": text, "content": text},
            ],
        }
        for text in TEXTS
    ]
    file = tmp_path / "<img src=x onerror=alert(1)>.json"
    file.write_text(json.dumps({"conversations": conversations}))
    tab = watched.page.tab
    tab.set_input_files("#import-file", file)
    tab.wait_for_selector(".message.assistant")
    names = tab.locator("#conversation-list .name")
    assert names.count() == len(TEXTS)
    for place, text in enumerate(TEXTS):
        names.nth(place).click()
        calls = tab.locator(".call code").all_text_contents()
        assert calls == [f"{text}({text})"]
        watched.check()
    touch_all(watched.page)
    watched.check()
    file.write_text("<script>alert(1)</script>")
    tab.set_input_files("#import-file", file)
    tab.wait_for_selector("#problem:not([hidden])")
    watched.check()
