"""Chat templates: the model's own Jinja template, run in a sandbox with what transformers offers to templates."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidPrompt

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
_DEADLINE = "_deadline"  # a variable of every template
# What an expression in a template may raise besides Jinja's own errors.
MAX_RENDER_S = 10.0
_EVALUATION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """A compiled-on-first-use template; `special_tokens` (bos_token, eos_token, ...) are variables of it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        import jinja2.meta

        environment = self._compiled.environment
        return "tools" in jinja2.meta.find_undeclared_variables(environment.parse(self._source))

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Message] | None = None
    ) -> str:
        """Raises InvalidPrompt when the template refuses the conversation, or takes too long."""
        import jinja2

        variables = {"documents": None, **self._special_tokens, _DEADLINE: _Deadline(MAX_RENDER_S)}
        try:
            return self._compiled.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, *_EVALUATION_ERRORS) as error:
            raise InvalidPrompt(f"The model's chat template refused these messages: {error}.") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationTag(jinja2.ext.Extension):
            """`{% generation %}...{% endgeneration %}` marks what to train on; here it is its content."""

            tags = {"generation"}

            def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        class BoundedEnvironment(ImmutableSandboxedEnvironment):
            """Checks the time in every round of every loop: nothing else in a template can take long."""

            def _parse(self, *source: Any) -> jinja2.nodes.Template:
                template = super()._parse(*source)
                for loop in template.find_all(jinja2.nodes.For):
                    check = jinja2.nodes.Call(jinja2.nodes.Name(_DEADLINE, "load"), [], [], None, None)
                    loop.body.insert(0, jinja2.nodes.ExprStmt(check, lineno=loop.lineno))
                return template

        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        return environment.from_string(self._source)


class _Deadline:
    """Raises when it is called after its time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> None:
        if time.monotonic() > self._end:
            raise ValueError("it took too long")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The conversation with each content as one string; raises InvalidPrompt for anything that is not a conversation.

    Content may be a string or OpenAI's list of `{"type": "text", "text": ...}` parts, which are joined by newlines.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidPrompt(
            "A conversation must be a list of at least one message like {'role': 'user', 'content': '...'}."
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidPrompt(
                f"Message {index} must be a dict with a 'role' such as 'system', 'user' or 'assistant'."
            )
        checked.append({**message, "content": _text(message.get("content"), index)})
    return checked


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "\n".join(texts)
    raise InvalidPrompt(
        f"Message {index} must have a string 'content', or a list of parts like {{'type': 'text', 'text': '...'}}."
    )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
