"""The page as a person uses it, and what must never happen while they do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

MOST_BYTES = 200_000  # of a screenshot
_ANSWER_MS = 120_000


class OpenPage:
    """A tab. `tab` is Playwright's page; `problems` are errors of its console and requests to other servers."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab = tab
        self.problems: list[str] = []
        tab.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.on("request", lambda request: self._check_request(request.url, url))

    def _check_request(self, target: str, url: str) -> None:
        if not target.startswith((url, "blob:")):
            self.problems.append(f"a request went to {target}")

    @classmethod
    @contextmanager
    def opened(cls, browser: Any, url: str, **options: Any) -> Iterator[Self]:
        context = browser.new_context(
            **{"viewport": {"width": 1240, "height": 800}, "color_scheme": "light", **options}
        )
        try:
            page = cls(context.new_page(), url)
            page.tab.goto(url)
            yield page
            assert not page.problems, page.problems
        finally:
            context.close()

    def configure(self, **fields: str) -> None:
        """Through the settings dialog, as a person would."""
        self.tab.click("#open-settings")
        for name, value in fields.items():
            control = self.tab.locator(f"#set-{name}")
            if control.evaluate("node => node.tagName") == "SELECT":
                control.select_option(value)
            else:
                control.fill(value)
        self.tab.click("#settings-form button[type=submit]")

    def ask(self, text: str) -> str:
        """Send a message and wait for the answer, as it is shown."""
        self.tab.fill("#prompt", text)
        self.tab.click("#send")
        self.until_answered()
        return self.answer()

    def until_answered(self) -> None:
        self.tab.wait_for_selector(".message.assistant:last-child .figures", state="attached", timeout=_ANSWER_MS)
        self.tab.wait_for_selector("#stop", state="hidden")

    def until_text(self, selector: str, text: str) -> None:
        """Playwright's own wait evaluates strings in the page, which its policy forbids."""
        end = time.monotonic() + 30
        while (found := self.tab.locator(selector).text_content()) != text:
            assert time.monotonic() < end, f"{selector} shows {found!r}, not {text!r}"
            self.tab.wait_for_timeout(20)

    def until_attribute(self, selector: str, name: str, value: str) -> None:
        self.tab.wait_for_selector(f'{selector}[{name}="{value}"]', timeout=10_000)

    def answer(self) -> str:
        return self.tab.locator(".message.assistant .body").last.evaluate("node => node.textContent")

    def kept(self) -> list[dict[str, Any]]:
        """The conversations as the browser keeps them."""
        found = self.tab.evaluate("Object.entries(localStorage)")
        return [json.loads(value) for key, value in found if key.startswith("foredraft.conversation.")]

    def race(self) -> str:
        """Run the race in the compare view; returns the verdict."""
        self.tab.click("#compare-start")
        self.tab.wait_for_selector("#verdict:is(.same, .different)", timeout=_ANSWER_MS)
        return self.tab.locator("#verdict").text_content()

    def photograph(self, path: Path) -> None:
        self.tab.evaluate("document.fonts.ready")
        self.tab.screenshot(path=path, animations="disabled")
        assert 5_000 < path.stat().st_size < MOST_BYTES, f"{path.name} has {path.stat().st_size} bytes"
