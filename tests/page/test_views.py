"""The views of the page with the default model; their screenshots are those of the documentation."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.params import SamplingParams
from tests.page.conftest import DTYPE, IMAGES
from tests.page.open_page import OpenPage
from tests.page.scripted import answer_in_time, answer_with, step, steps_of, stream_of
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.page

PLUMS = (
    "Write this text again and correct nothing: The plum tree stands in the garden. The plum tree bears plums. "
    "The plums of the plum tree are blue, and the garden of the plum tree is green."
)
WALKING = "What are the benefits of walking? Give me a list."
POINT = "Write a Python class Point with x, y and z, and a property and a setter for each."
HEAD = {"temperature": "0", "max_tokens": "200", "spec": "suffix+eagle:nodes=4", "seed": "1"}


def background(page: OpenPage, selector: str) -> str:
    return page.tab.locator(selector).first.evaluate("node => getComputedStyle(node).backgroundColor")


def offline_text(prompt: str) -> str:
    """As the library answers, without speculation."""
    fresh = LLM("smollm2-135m", dtype=DTYPE, spec="off", max_num_seqs=1, kv_cache_tokens=2048)
    ids = fresh.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return fresh.generate([ids], SamplingParams(max_tokens=int(HEAD["max_tokens"]), temperature=0))[0].text


def test_a_chat_with_tints(page: OpenPage) -> None:
    page.configure(**HEAD)
    assert page.ask(WALKING) == offline_text(WALKING)
    assert float(page.tab.locator("#strip .figure > :last-child").nth(1).text_content()) > 2, "tokens per run"
    drafted = ".message.assistant .token[data-tint]"
    assert page.tab.locator(drafted).count() > 10
    assert background(page, drafted) == "rgba(0, 0, 0, 0)", "tints are off until they are wanted"
    assert not page.tab.locator("#legend").is_visible()
    page.tab.click("#tints")
    assert background(page, drafted) != "rgba(0, 0, 0, 0)"
    assert "eagle" in page.tab.locator("#legend").text_content()
    missed = page.tab.locator(".message.assistant .token.missed")
    missed.nth(missed.count() // 2).hover()
    assert "Rejected here:" in page.tab.locator("#tooltip").text_content()
    assert page.tab.locator("#tooltip").is_visible()
    assert page.tab.locator("#strip .depths i").count() > 0
    page.photograph(IMAGES / "page-chat.png")


def widths(page: OpenPage) -> list[float]:
    """Of the bars, plain first, in percent."""
    return page.tab.locator(".bar > i").evaluate_all("bars => bars.map((bar) => parseFloat(bar.style.width))")


def test_a_race_ends_with_equal_texts(page: OpenPage) -> None:
    page.configure(**{**HEAD, "temperature": "0.4", "seed": "7"})
    page.tab.click("#tab-compare")
    page.tab.fill("#compare-prompt", WALKING)
    verdict = page.race()
    plain, spec = (page.tab.locator(f"#lane-{lane} .text").text_content() for lane in ("plain", "spec"))
    assert plain == spec and f"{len(plain.encode())} bytes compared, all equal (seed 7)" in verdict
    page.photograph(IMAGES / "page-compare.png")
    page.tab.fill("#compare-prompt", PLUMS)
    page.tab.select_option("#compare-mode", "once")
    assert page.race().startswith("✓")


def test_a_race_shows_time_on_one_scale(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    stream = stream_of(steps_of("The plum tree stands in the garden. " * 4))
    answer_in_time(page, plain=(stream, 60), spec=(stream, 15))
    tab.click("#tab-compare")
    tab.evaluate(
        """() => {
            window.seen = []; // the bars while the faster one is done and the slower one is not
            const look = () => {
                const lanes = ".lanes:has(#lane-plain:not(.done)):has(#lane-spec.done)";
                const bars = [...document.querySelectorAll(`${lanes} .bar > i`)];
                if (bars.length) window.seen.push(bars.map((bar) => parseFloat(bar.style.width)));
                requestAnimationFrame(look);
            };
            look();
        }"""
    )
    tab.click("#compare-start")
    tab.wait_for_selector("#verdict.same")
    slower, faster = widths(page)
    assert slower == 100 and faster < 60
    seen = tab.evaluate("window.seen")
    assert seen, "the slower one still runs when the faster one is done"
    assert all(plain < 100 and spec == faster for plain, spec in seen) and seen == sorted(seen)
    tab.click("#compare-replay")
    whole = "The plum tree stands in the garden. " * 4
    assert tab.locator("#lane-plain .text").text_content() != whole, "the replay begins anew"
    page.until_text("#lane-plain .text", whole)


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
    page.configure(**{**HEAD, "spec": "eagle:nodes=8"})
    page.ask(WALKING)
    page.tab.click("#tints")
    page.tab.locator(".message.assistant .token.missed[data-tint]").first.click()
    assert page.tab.locator("#tree").is_visible()
    slider = page.tab.locator("#tree-step")
    richest = page.tab.evaluate(
        """() => {
            const slider = document.getElementById("tree-step");
            let best = [0, 0, 0]; // accepted, all nodes, place: the longest path that has branches beside it
            for (let at = 0; at <= Number(slider.max); at++) {
                slider.value = at;
                slider.dispatchEvent(new Event("input"));
                const nodes = document.querySelectorAll("#tree-canvas g.accepted, #tree-canvas g.rejected").length;
                const accepted = document.querySelectorAll("#tree-canvas g.accepted").length;
                if (accepted < nodes && accepted > best[0]) best = [accepted, nodes, at];
            }
            slider.value = best[2];
            slider.dispatchEvent(new Event("input"));
            return best[1];
        }"""
    )
    assert int(slider.get_attribute("max")) > 0
    about = page.tab.locator("#tree-about").text_content()
    accepted = page.tab.locator("#tree-canvas g.accepted").count()
    assert f" drafted {richest} tokens, {accepted} accepted" in about
    page.photograph(IMAGES / "page-tree.png")
    page.tab.click("#tree-next" if page.tab.locator("#tree-next").is_enabled() else "#tree-previous")
    assert page.tab.locator("#tree-about").text_content() != about


def test_dark(browser: Any, server: RunningServer) -> None:
    with OpenPage.opened(browser, server.url, color_scheme="dark") as page:
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
        page.configure(**{**HEAD, "spec": "auto", "max_tokens": "300"})
        page.ask(POINT)
        page.photograph(IMAGES / "page-dark.png")
        page.tab.click("#theme")
        assert page.tab.locator("#theme-name").text_content() == "light"
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"
        page.tab.reload()
        assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 249, 246)"


def chain(length: int) -> dict[str, Any]:
    """A run whose draft has one path of so many tokens, all of them accepted, and a rejected branch beside each."""
    tokens = [f" t{depth}" for depth in range(length)]
    draft = {
        "tokens": [*tokens, *(f" no{depth}" for depth in range(length))],
        "parents": [*range(-1, length - 1), *range(-1, length - 1)],
        "scores": [0.5] * (2 * length),
        "origins": ["eagle"] * (2 * length),
    }
    return step([*((text, "eagle") for text in tokens), (" own", "target")], draft, accepted=list(range(length)))


def boxes(page: OpenPage, selector: str) -> list[dict[str, float]]:
    return page.tab.locator(selector).evaluate_all(
        "nodes => nodes.map((node) => node.getBoundingClientRect().toJSON())"
    )


def is_inside(inner: dict[str, float], outer: dict[str, float]) -> bool:
    across = outer["left"] <= inner["left"] and inner["right"] <= outer["right"]
    return across and outer["top"] <= inner["top"] and inner["bottom"] <= outer["bottom"]


def test_a_tree_fits_moves_and_zooms(scripted_page: OpenPage) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_with(page, stream_of([step([(" alone", "target")]), chain(9), step([(" end", "target")])]))
    page.ask("tree")
    tab.click("#tab-tree")
    (canvas,) = boxes(page, "#tree-canvas")
    nodes = "#tree-canvas g g"
    fitted = boxes(page, nodes)
    assert len(fitted) == 20 and all(is_inside(node, canvas) for node in fitted)
    tab.mouse.move(canvas["left"] + 300, canvas["top"] + 100)
    tab.mouse.wheel(0, -300)
    tab.wait_for_timeout(100)
    zoomed = boxes(page, nodes)
    assert zoomed[0]["width"] > 1.5 * fitted[0]["width"]
    tab.mouse.down()
    tab.mouse.move(canvas["left"] + 250, canvas["top"] + 140)
    tab.mouse.up()
    moved = boxes(page, nodes)
    assert (round(moved[0]["x"] - zoomed[0]["x"]), round(moved[0]["y"] - zoomed[0]["y"])) == (-50, 40)
    tab.focus("#tree-canvas")
    tab.keyboard.press("0")
    assert boxes(page, nodes) == fitted
    tab.keyboard.press("+")
    tab.keyboard.press("ArrowRight")
    assert boxes(page, nodes)[0]["x"] < fitted[0]["x"]
    tab.click("#tree-fit")
    tab.set_viewport_size({"width": 900, "height": 700})
    tab.wait_for_timeout(100)
    (canvas,) = boxes(page, "#tree-canvas")
    assert all(is_inside(node, canvas) for node in boxes(page, nodes)), "it fits a smaller window, too"


@pytest.mark.parametrize("length", [5, 60])
def test_a_tree_opens_at_the_token_that_was_clicked(scripted_page: OpenPage, length: int) -> None:
    page, tab = scripted_page, scripted_page.tab
    answer_with(page, stream_of([step([("one", "target")]), chain(length), chain(3)]))
    page.ask("tree")
    tab.click("#tints")
    tab.locator(f'.token[data-step="1"][data-place="{length - 2}"]').click()
    (canvas,), (current,) = boxes(page, "#tree-canvas"), boxes(page, "#tree-canvas .current rect")
    assert tab.locator("#tree-canvas .current text").first.text_content() == f"·t{length - 2}"
    assert is_inside(current, canvas) and current["height"] > 20, "in view, and large enough to read"
    tab.click("#tab-chat")
    tab.locator(f'.token[data-step="1"][data-place="{length}"]').click()
    assert tab.locator("#tree-canvas .current text").first.text_content() == "·own"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_one_row_at_the_top_and_no_overflow(browser: Any, tiny_server: RunningServer, width: int) -> None:
    size = {"width": width, "height": 700}
    with OpenPage.opened(browser, tiny_server.url, viewport=size, has_touch=True, is_mobile=True) as page:
        tab = page.tab
        wide = "```py\n" + "x" * 300 + "\n```\n\n| " + " | ".join(["wide"] * 30) + " |\n" + "|-" * 30 + "|\n"
        answer_with(page, stream_of(steps_of(f"{wide}\n\n" + "long" * 100), "length"))
        tab.tap("#prompt")
        tab.keyboard.type("one")
        tab.keyboard.press("Enter")
        tab.keyboard.type("two")
        assert tab.locator(".message").count() == 0, "Enter makes a line"
        tab.tap("#send")
        page.until_answered()
        assert tab.locator(".message.user .body").text_content() == "one\ntwo"
        (top,) = boxes(page, ".top")
        assert top["height"] < 56
        assert all(is_inside(each, top) for each in boxes(page, ".top button:visible"))
        for view in ("compare", "tree", "chat"):
            tab.tap(f"#tab-{view}")
            if view == "compare":
                page.race()
                (verdict,), (axis,) = boxes(page, "#verdict"), boxes(page, "#axis")
                assert verdict["height"] > 30 and axis["top"] >= verdict["bottom"], "lines that wrap push others down"
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            shown = boxes(
                page, "button:visible, .lane:visible, .message:visible, .foot:visible, #strip .figure:visible"
            )
            assert max(each["right"] for each in shown) <= width
        tab.tap("#open-settings")
        assert tab.locator("#settings-fields").evaluate("node => node.scrollWidth <= node.clientWidth")
        assert cut_choices(page) == []
        tab.keyboard.press("Escape")
        tab.tap("#toggle-conversations")
        assert tab.locator("#conversations").is_visible()


def cut_choices(page: OpenPage) -> list[str]:
    """The lists of the settings that have not the room for their longest choice."""
    return page.tab.evaluate(
        """() => [...document.querySelectorAll("#settings select")].filter((node) => {
            const given = node.getBoundingClientRect().width;
            node.style.justifySelf = "start";
            const needed = node.getBoundingClientRect().width;
            node.style.justifySelf = "";
            return needed > given;
        }).map((node) => node.id)"""
    )


def test_all_choices_of_the_settings_can_be_read(scripted_page: OpenPage) -> None:
    scripted_page.tab.click("#open-settings")
    assert cut_choices(scripted_page) == []


def test_a_phone(browser: Any, server: RunningServer) -> None:
    size = {"width": 390, "height": 844}
    with OpenPage.opened(browser, server.url, viewport=size, has_touch=True, is_mobile=True) as page:
        page.configure(**{**HEAD, "spec": "auto", "max_tokens": "300"})
        page.tab.click("#tints")
        page.ask(POINT)
        page.photograph(IMAGES / "page-phone.png")
