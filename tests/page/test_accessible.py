"""What axe-core finds in every view, in both themes and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.page.open_page import OpenPage
from tests.page.scripted import answer_with, steps_of, stream_of
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.page

AXE = (Path(__file__).parent / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
ANSWER = """# Points

A *point* has **three** coordinates, see [the pages](https://example.org) and `Point`.

## How

1. Write a class.
   - with `x`
2. Test it.

| axis | colour |
|------|-------:|
| x    | red    |

```python
def norm(p):  # a comment
    return (p.x ** 2 + 0.5) ** 0.5, "text"
```

> Quoted.
"""
WINDOWS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}


def violations(page: OpenPage) -> list[str]:
    page.tab.evaluate(AXE)
    found = page.tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [f"{each['id']}: {node['html'][:120]}" for each in found["violations"] for node in each["nodes"]]


@pytest.mark.parametrize("window", WINDOWS)
def test_no_view_has_a_violation(browser: Any, tiny_server: RunningServer, window: str) -> None:
    with OpenPage.opened(browser, tiny_server.url, reduced_motion="reduce", **WINDOWS[window]) as page:
        tab = page.tab
        found = {"empty": violations(page)}
        answer_with(page, stream_of(steps_of(ANSWER), "length", thoughts=steps_of("They want points.")))
        page.ask("Tell me of points.")
        found["chat"] = violations(page)
        tab.click("#tints")
        tab.locator(".body .token").first.hover()
        assert tab.locator("#tooltip").is_visible()
        found["tints"] = violations(page)
        tab.get_by_role("button", name="Edit").click()
        for summary in tab.locator(".message.assistant summary").all():
            summary.click()
        found["edit"] = violations(page)
        tab.get_by_role("button", name="Cancel").click()
        tab.click("#tab-tree")
        found["tree"] = violations(page)
        tab.click("#tab-compare")
        page.race()
        found["compare"] = violations(page)
        tab.click("#open-settings")
        found["settings"] = violations(page)
        tab.keyboard.press("Escape")
        tab.keyboard.press("?")
        found["shortcuts"] = violations(page)
        tab.keyboard.press("Escape")
        tab.click("#tab-chat")
        if window == "phone":
            tab.click("#toggle-conversations")
        tab.locator("#conversation-list .remove").click()
        found["deleted"] = violations(page)
        assert {view: each for view, each in found.items() if each} == {}


@pytest.mark.parametrize("window", WINDOWS)
def test_the_page_of_routes_has_none(browser: Any, tiny_server: RunningServer, window: str) -> None:
    with OpenPage.opened(browser, tiny_server.url, **WINDOWS[window]) as page:
        page.tab.goto(f"{tiny_server.url}/docs")
        assert violations(page) == []


def test_axe_finds_what_is_wrong(scripted_page: OpenPage) -> None:
    scripted_page.tab.evaluate("document.getElementById('prompt').labels[0].remove()")
    scripted_page.tab.evaluate("document.getElementById('prompt').removeAttribute('placeholder')")
    assert any(each.startswith("label: ") for each in violations(scripted_page))
