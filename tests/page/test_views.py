"""The views of the page with the default model; their screenshots are those of the documentation."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.page.conftest import IMAGES
from tests.page.open_page import OpenPage
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.page

PLUMS = (
    "Write this text again and correct nothing: The plum tree stands in the garden. The plum tree bears plums. "
    "The plums of the plum tree are blue, and the garden of the plum tree is green."
)
GREEDY = {"temperature": "0", "max_tokens": "120", "spec": "ngram+suffix", "seed": "1"}


def background(page: OpenPage, selector: str) -> str:
    return page.tab.locator(selector).first.evaluate("node => getComputedStyle(node).backgroundColor")


def offline_text(llm: LLM, prompt: str) -> str:
    """As the library answers; the engine is the server's, so its thread must be idle."""
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    fresh = LLM("smollm2-135m", spec="off", max_num_seqs=1, kv_cache_tokens=2048)
    return fresh.generate([ids], SamplingParams(max_tokens=120, temperature=0))[0].text


def test_a_chat_with_tints(page: OpenPage, llm: LLM) -> None:
    page.configure(**GREEDY)
    assert page.ask(PLUMS) == offline_text(llm, PLUMS)
    drafted = ".message.assistant .token[data-tint]"
    assert page.tab.locator(drafted).count() > 10
    assert background(page, drafted) == "rgba(0, 0, 0, 0)", "tints are off until they are wanted"
    assert not page.tab.locator("#legend").is_visible()
    page.tab.click("#tints")
    assert background(page, drafted) != "rgba(0, 0, 0, 0)"
    assert "suffix" in page.tab.locator("#legend").text_content()
    missed = page.tab.locator(".message.assistant .token.missed")
    missed.nth(missed.count() // 2).hover()
    assert "Rejected here:" in page.tab.locator("#tooltip").text_content()
    assert page.tab.locator("#tooltip").is_visible()
    assert page.tab.locator("#strip .depths i").count() > 0
    page.photograph(IMAGES / "page-chat.png")


def test_a_race_ends_with_equal_texts(page: OpenPage) -> None:
    page.configure(**{**GREEDY, "temperature": "0.4", "seed": "7"})
    page.tab.click("#tab-compare")
    page.tab.fill("#compare-prompt", PLUMS)
    verdict = page.race()
    plain, spec = (page.tab.locator(f"#lane-{lane} .text").text_content() for lane in ("plain", "spec"))
    assert plain == spec and f"{len(plain.encode())} bytes compared, all equal (seed 7)" in verdict
    page.photograph(IMAGES / "page-compare.png")
    page.tab.click("#compare-replay")
    assert page.tab.locator("#lane-plain .text").text_content() != plain, "the replay begins anew"
    page.until_text("#lane-plain .text", plain)
    page.tab.select_option("#compare-mode", "once")
    assert page.race().startswith("✓")


def test_a_race_between_two_seeds_ends_with_different_texts(page: OpenPage) -> None:
    """The comparison can fail."""
    page.configure(temperature="1.5", max_tokens="40", spec="ngram+suffix", seed="3")
    page.tab.click("#tab-compare")
    page.tab.evaluate(
        """() => {
            const send = window.fetch;
            window.fetch = (path, options) => {
                const isPlain = options?.body?.includes('"spec":"off"');
                if (isPlain) options.body = options.body.replace('"seed":3', '"seed":4');
                return send(path, options);
            };
        }"""
    )
    assert page.race().startswith("✗ The texts differ at byte ")


def test_the_tree_of_a_draft(page: OpenPage) -> None:
    page.configure(**GREEDY)
    page.ask(PLUMS)
    page.tab.click("#tints")
    page.tab.locator(".message.assistant .token.missed[data-tint]").first.click()
    assert page.tab.locator("#tree").is_visible()
    slider = page.tab.locator("#tree-step")
    richest = page.tab.evaluate(
        """() => {
            const slider = document.getElementById("tree-step");
            let best = [0, 0];
            for (let at = 0; at <= Number(slider.max); at++) {
                slider.value = at;
                slider.dispatchEvent(new Event("input"));
                const nodes = document.querySelectorAll("#tree-canvas g.accepted, #tree-canvas g.rejected").length;
                const accepted = document.querySelectorAll("#tree-canvas g.accepted").length;
                if (accepted && accepted < nodes && nodes > best[0]) best = [nodes, at];
            }
            slider.value = best[1];
            slider.dispatchEvent(new Event("input"));
            return best[0];
        }"""
    )
    assert int(slider.get_attribute("max")) > 0
    about = page.tab.locator("#tree-about").text_content()
    assert f"drafted {richest} tokens" in about
    accepted = page.tab.locator("#tree-canvas g.accepted").count()
    assert f" {accepted} accepted, " in about
    page.photograph(IMAGES / "page-tree.png")
    page.tab.click("#tree-next" if page.tab.locator("#tree-next").is_enabled() else "#tree-previous")
    assert page.tab.locator("#tree-about").text_content() != about


def test_dark(browser: Any, server: RunningServer) -> None:
    with OpenPage.opened(browser, server.url, color_scheme="dark") as page:
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
        page.configure(**{**GREEDY, "spec": "auto(ngram+suffix)"})
        page.tab.keyboard.press("Alt+t")
        page.ask(PLUMS)
        page.photograph(IMAGES / "page-dark.png")
        page.tab.click("#theme")
        assert page.tab.locator("#theme-name").text_content() == "light"
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"
        page.tab.reload()
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"


def test_a_phone(browser: Any, server: RunningServer) -> None:
    size = {"width": 390, "height": 844}
    with OpenPage.opened(browser, server.url, viewport=size, has_touch=True, is_mobile=True) as page:
        page.configure(**GREEDY)
        page.tab.click("#tints")
        page.ask(PLUMS)
        page.photograph(IMAGES / "page-phone.png")
        for view in ("compare", "tree", "chat"):
            page.tab.click(f"#tab-{view}")
            assert page.tab.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert not page.tab.locator("#conversations").is_visible()
        page.tab.click("#toggle-conversations")
        assert page.tab.locator("#conversations").is_visible()
