"""Answers as Markdown: what becomes which element, that nothing of the source is lost, and that streaming ends as it
would have been drawn at once."""

from __future__ import annotations

import random

import pytest

from tests.page.open_page import OpenPage
from tests.page.scripted import answer_with, steps_of, stream_of

pytestmark = pytest.mark.page

# Elements without attributes and marks.
DRAW = """async (source) => {
    const { Markdown } = await import("/static/markdown.js");
    const body = document.createElement("div");
    new Markdown(body).show(source, []);
    const shape = (node) => {
        if (node.nodeType === 3) return node.data;
        if (node.className === "mark" || node.tagName === "BUTTON") return "";
        const tag = node.tagName.toLowerCase();
        return `<${tag}>${[...node.childNodes].map(shape).join("")}</${tag}>`;
    };
    return [...body.childNodes].map(shape).join("");
}"""
SHAPES = {
    "plain": "<p>plain</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "*a* **b** ***c***": "<p><em>a</em> <strong>b</strong> <em><strong>c</strong></em></p>",
    "~~d~~ `e`": "<p><s>d</s> <code>e</code></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "*unclosed **also": "<p>*unclosed **also</p>",
    r"\*not\* `a\*b`": "<p>*not* <code>a\\*b</code></p>",
    "``a`b``": "<p><code>a`b</code></p>",
    "`a": "<p>`a</p>",
    "# One\n### Two ##\n## Three": "<h3>One</h3><h4>Two</h4><h4>Three</h4>",
    "#no": "<p>#no</p>",
    "- a\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "3. a\n4. b": "<ol><li><p>a</p></li><li><p>b</p></li></ol>",
    "1. a\n   - b\n2. d": "<ol><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>d</p></li></ol>",
    "- a\n\n  b\n- c": "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>",
    "a\n- b": "<p>a</p><ul><li><p>b</p></li></ul>",
    "in\n1986. It was": "<p>in\n1986. It was</p>",
    "> a\n> *b*\n\nc": "<blockquote><p>a\n<em>b</em></p></blockquote><p>c</p>",
    "a\n\n---\nb": "<p>a</p><div></div><p>b</p>",
    "| a | b |\n|--|:-:|\n| 1 | `2` |": (
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>"
    ),
    "a | b\nno table": "<p>a | b\nno table</p>",
    "```\n*a*\n```\nb": ("<div><div><span></span></div><pre><code>*a*\n</code></pre><div></div></div><p>b</p>"),
    "```py\nx": "<div><div><span>py</span></div><pre><code>x</code></pre><div></div></div>",
    "- a:\n  ```\n  b\n    c\n  ```": (
        "<ul><li><p>a:</p><div><div><span></span></div><pre><code>b\n  c\n</code></pre><div></div></div></li></ul>"
    ),
    "<b>a</b> &amp; <script>": "<p><b>a</b> &amp; <script></p>",
    "[a *b*](https://c.d/e_(f)) g": "<p><a>a <em>b</em></a> g</p>",
    "see https://a.b/c_d, or <https://e.f>.": "<p>see <a>https://a.b/c_d</a>, or <a>https://e.f</a>.</p>",
    "![picture](https://a.b/c.png)": "<p><a>picture</a></p>",
    "[a](/local) [b](javascript:alert(1)) [c](data:text/html,x)": "<p><span>a</span> <span>b</span> <span>c</span></p>",
}
PIECES = (
    *(
        "*",
        "**",
        "_",
        "`",
        "``",
        "~~",
        "[",
        "](",
        ")",
        "!",
        "<",
        "\\",
        "#",
        "# ",
        "- ",
        "1. ",
        "2) ",
        "> ",
        "|",
        "---\n",
    ),
    *("|-|-|\n", "x|y\n", "```\n", "```py\n", "~~~", "https://a.b", "def", '"', "a", "b c", " ", "  ", "    ", "\t"),
    *("\n", "\n", "\n\n", "é", "😀", "\u202e", "\x00"),
)
# Grows a source and compares the elements with those that are made at once.
STREAM = """async (sources) => {
    const { Markdown } = await import("/static/markdown.js");
    const wrong = [];
    for (const source of sources) {
        const grown = document.createElement("div");
        const view = new Markdown(grown);
        for (let end = 1; end <= source.length; end++) {
            const part = source.slice(0, end);
            view.show(part, []);
            const whole = document.createElement("div");
            new Markdown(whole).show(part, []);
            if (grown.textContent !== part || !grown.isEqualNode(whole)) {
                wrong.push([part, grown.textContent]);
                break;
            }
        }
    }
    return wrong;
}"""
HOSTILE = [
    *("*" * 20_000, "*a " * 10_000, "_a_b" * 8_000, "[" * 20_000, "[a](" * 5_000, ">" * 20_000, "- " * 20_000 + "x"),
    *("https://a.b/" + ")" * 20_000, "- a" + "\n" * 20_000 + "b", "|" * 20_000 + "\n" + "|-" * 20_000),
    *("`".join("`" * n for n in range(300)), "\n".join("  " * n + "- x" for n in range(300))),
    *("```js\n" + "/* a \" ' ` " * 5_000, "```html\n" + "<a " * 10_000, "```py\n" + '"""' * 10_001),
]


def test_what_becomes_what(scripted_page: OpenPage) -> None:
    assert {source: scripted_page.tab.evaluate(DRAW, source) for source in SHAPES} == SHAPES


def test_a_growing_source_is_drawn_as_if_at_once_and_nothing_is_lost(scripted_page: OpenPage) -> None:
    draw = random.Random(7)
    sources = ["".join(draw.choices(PIECES, k=draw.randint(1, 30))) for _ in range(300)]
    assert scripted_page.tab.evaluate(STREAM, [*SHAPES, *sources]) == []


def test_blocks_that_are_complete_are_left_alone(scripted_page: OpenPage) -> None:
    """A reader can select text of an answer that is still being written."""
    kept = """async () => {
        const { Markdown } = await import("/static/markdown.js");
        const body = document.createElement("div");
        const view = new Markdown(body);
        view.show("# a\\n\\nb\\n\\nc\\n", []);
        const before = [...body.children];
        view.show("# a\\n\\nb\\n\\nc\\nd", []);
        return before.map((node, place) => node === body.children[place]);
    }"""
    assert scripted_page.tab.evaluate(kept) == [True, True, False]


def test_an_answer_is_drawn_by_frames_not_by_tokens(scripted_page: OpenPage) -> None:
    steps = steps_of("word " * 2000)
    answer_with(scripted_page, stream_of(steps))
    scripted_page.tab.evaluate(
        """() => {
            window.drawings = 0;
            const count = (changes) => (window.drawings += changes.some(({ target }) => target.className === "body"));
            const messages = document.getElementById("messages");
            new MutationObserver(count).observe(messages, { childList: true, subtree: true });
        }"""
    )
    scripted_page.ask("many tokens")
    assert 0 < scripted_page.tab.evaluate("window.drawings") < len(steps) / 4


def test_hostile_sources_are_drawn(scripted_page: OpenPage) -> None:
    """Each would keep a parser with a quadratic step busy for minutes."""
    lost = """async (sources) => {
        const { Markdown } = await import("/static/markdown.js");
        return sources.filter((source) => {
            const body = document.createElement("div");
            new Markdown(body).show(source, []);
            return body.textContent !== source;
        }).length;
    }"""
    assert scripted_page.tab.evaluate(lost, HOSTILE) == 0


def test_links_leave_nothing_to_the_other_site(scripted_page: OpenPage) -> None:
    answer_with(
        scripted_page, stream_of(steps_of("[a](http://a.b) <mailto:c@d.e> [f](JavaScript:g) [h](//i.j) [k](file:///l)"))
    )
    scripted_page.ask("links")
    links = scripted_page.tab.locator(".message.assistant .body a").evaluate_all(
        "links => links.map((each) => [each.href, each.rel, each.target])"
    )
    both = "noopener noreferrer"
    assert links == [["http://a.b/", both, "_blank"], ["mailto:c@d.e", both, "_blank"]]


def test_code_is_coloured_and_copied(scripted_page: OpenPage) -> None:
    code = "def area(r):  # of a circle\n    return 3.14 * r ** 2, 'r'\n"
    answer_with(scripted_page, stream_of(steps_of(f"Here:\n\n```python\n{code}```\n\nDone.")))
    scripted_page.ask("code")
    tab = scripted_page.tab
    kinds = tab.locator(".code code > span").evaluate_all("spans => spans.map((s) => [s.className, s.textContent])")
    expected = {"keyword": "def", "call": "area", "comment": "# of a circle", "number": "3.14", "string": "'r'"}
    assert {(f"code-{kind}", text) for kind, text in expected.items()} <= {(kind, text) for kind, text in kinds}
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click(".code .copy")
    scripted_page.until_attribute(".code .copy", "data-label", "Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == code.rstrip("\n")
    tab.locator(".message.assistant .actions .copy").click()
    scripted_page.until_attribute(".message.assistant .actions .copy", "data-label", "Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == f"Here:\n\n```python\n{code}```\n\nDone."


def test_tints_reach_every_token_of_rendered_markdown(scripted_page: OpenPage) -> None:
    source = "## A *b*\n\n1. **c**\n2. d `e`\n\n| f | g |\n|---|---|\n| h | i |\n\n```py\nif x: pass\n```\n\n> j"
    steps = steps_of(source, size=2)
    answer_with(scripted_page, stream_of(steps))
    assert scripted_page.ask("tokens") == source
    pieces = scripted_page.tab.locator(".message.assistant .token").evaluate_all(
        "spans => spans.map(({ dataset: d, textContent }) => [+d.step, +d.place, textContent, d.tint ?? null])"
    )
    found: dict[tuple[int, int], str] = {}
    for step, place, text, tint in pieces:
        found[step, place] = found.get((step, place), "") + text
        assert (tint is None) == (steps[step]["tokens"][place]["origin"] == "target")
    expected = {(s, p): token["text"] for s, each in enumerate(steps) for p, token in enumerate(each["tokens"])}
    assert found == expected
    marks = scripted_page.tab.locator(".message.assistant .mark")
    assert marks.count() > 10 and not any(mark.is_visible() for mark in marks.all())
    scripted_page.tab.click("#tints")
    assert marks.first.is_visible()
