"""Chat templates: what they are told, what they may use, and clear words for messages that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import InvalidPrompt
from foredraft.models.chat_template import ChatTemplate
from foredraft.models.tokenizer import Tokenizer
from foredraft.tool_calls import with_tool_prompt
from tests.gguf_files import TOKENIZER

HERE = Path("model.gguf")


def test_no_chat_template() -> None:
    with pytest.raises(InvalidPrompt, match="no chat template; use generate"):
        Tokenizer.from_gguf(TOKENIZER, HERE).render_chat([{"role": "user", "content": "x"}])


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def with_template(template: str) -> Tokenizer:
    return Tokenizer.from_gguf({**TOKENIZER, "tokenizer.chat_template": template}, HERE)


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_template(PLAIN).render_chat([{"role": "user", "content": parts}]) == "user:a\nb;"


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ([], "list of at least one message"),
    ("hello", "list of at least one message"),
    (["hello"], "Message 0 must be a dict with a 'role'"),
    ([{"content": "x"}], "Message 0 must be a dict with a 'role'"),
    ([{"role": 3, "content": "x"}], "Message 0 must be a dict with a 'role'"),
    ([{"role": "user", "content": "x"}, {"role": "user"}], "Message 1 must have a string 'content'"),
    ([{"role": "user", "content": []}], "Message 0 must have a string 'content'"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "Message 0 must have a string 'content'"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "Message 0 must have a string 'content'"),
]


@pytest.mark.parametrize(("messages", "message"), WRONG_MESSAGES)
def test_wrong_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        with_template(PLAIN).render_chat(messages)


TEMPLATES = {
    "tojson": ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
    "loop controls": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "blocks are trimmed": ("{% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    "special tokens": ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    "generation": ("{% generation %}x{{ 1 + 1 }}{% endgeneration %}", "x2"),
    "undeclared": ("{{ tools is none }}{{ nothing is defined }}", "TrueFalse"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_what_templates_may_use(case: str) -> None:
    template, expected = TEMPLATES[case]
    assert with_template(template).render_chat([{"role": "user", "content": "x"}]) == expected


def test_strftime_now() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([], False)
    assert rendered.isdigit() and int(rendered) > 2024


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{% for %}", "refused these messages"),
        ("{{ 'a' + 1 }}", "refused these messages"),
        ("{{ messages[7].content + 'x' }}", "refused these messages"),
        ("{{ ''.__class__.__mro__ }}", "refused these messages"),
        ("{{ messages.append(1) }}", "refused these messages"),
    ],
)
def test_templates_that_fail(template: str, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        with_template(template).render_chat([{"role": "user", "content": "x"}])


def test_a_template_may_not_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.models.chat_template.MAX_RENDER_S", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidPrompt, match="took too long"):
        with_template(loops).render_chat([{"role": "user", "content": "x"}])


def test_tools_are_in_the_system_prompt_where_the_template_has_no_place_for_them() -> None:
    tokenizer = with_template("{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}")
    messages = [{"role": "user", "content": "x"}]
    tools = [{"name": "aabba"}]
    assert tokenizer.encode_chat(messages, tools) == tokenizer.encode_chat(with_tool_prompt(messages, tools))
    assert tokenizer.encode_chat(messages, tools) != tokenizer.encode_chat(messages)


def test_a_message_of_calls_needs_no_content() -> None:
    tokenizer = with_template("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert tokenizer.render_chat([call]) == "[]"
    with pytest.raises(InvalidPrompt, match="Message 0"):
        tokenizer.render_chat([{"role": "assistant", "content": None, "tool_calls": []}])


def test_tools_are_rendered_by_the_template_and_are_text() -> None:
    """Control tokens in the description of a tool are ordinary text, as in messages."""
    tokenizer = with_template("{% for tool in tools %}{{ bos_token }}{{ tool.name }}{% endfor %}")
    plain, spelled = ([{"name": name}] for name in ("x", "<s>"))
    messages = [{"role": "user", "content": "x"}]
    bos = tokenizer.encode_chat(messages, plain)[0]
    assert tokenizer.encode_chat(messages, spelled).count(bos) == 1
