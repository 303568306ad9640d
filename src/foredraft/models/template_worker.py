"""Renders one chat template in a process of its own, which the operating system ends.

A template comes with a model's file, and inside Python nothing limits what one expression takes: `9 ** (9 ** 9)` holds
the interpreter, and strings grow by multiplication. So `chat_template.py` starts this file as a program. It imports the
standard library and Jinja only. Its input is lines of JSON: first a `Setup`, then conversations, that is, the variables
of the template, each of which is answered with a line. `null` asks whether the template has a place for tools. It ends
when its input does.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import jinja2

MAX_CHARACTERS = 1 << 25  # of a prompt: more than any context holds
_MAX_MESSAGE = 500  # characters of an error


class Setup(TypedDict):
    """What a worker is told first."""

    path: list[str]  # sys.path of the process that started it
    seconds: float  # the longest time for an answer
    memory_bytes: int
    source: str
    variables: dict[str, str | None]  # that every conversation sees


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process, whatever the interpreter is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    setup: Setup = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = setup["path"]
    with suppress(ValueError, OSError):  # a system that has a lower limit, or none
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    import jinja2.meta  # now, while no conversation waits
    import jinja2.sandbox

    template: jinja2.Template | None = None
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
        try:
            conversation = json.loads(line)
            template = template or compiled(setup["source"])
            if conversation is None:
                names = jinja2.meta.find_undeclared_variables(template.environment.parse(setup["source"]))
                answer = _answer(takes_tools="tools" in names)
            else:
                answer = _answer(text=_rendered(template, {**setup["variables"], **conversation}))
        except MemoryError:
            answer = _answer(refused=f"it needs more than {setup['memory_bytes'] >> 20} MiB of memory")
        except Exception as error:  # whatever an expression raises
            answer = _answer(refused=str(error)[:_MAX_MESSAGE] or type(error).__name__)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _answer(**fields: str | bool) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def compiled(source: str) -> jinja2.Template:
    """The template in a sandbox, with what transformers offers to templates."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks what to train on; here it is its content."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    text = template.render(variables)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it makes {len(text)} characters of them, but {MAX_CHARACTERS} are allowed")
    return text


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
