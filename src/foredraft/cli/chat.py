"""`foredraft chat` and `foredraft run`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import answer_record, dim, figures, follow, print_json, say
from foredraft.cli.progress import PROMPT, until_first
from foredraft.errors import ForedraftError, InvalidPrompt

if TYPE_CHECKING:
    from foredraft.cli.conversation import Conversation
    from foredraft.llm import LLM
    from foredraft.outputs import CompletionOutput, TokenEvent

QUOTES = '"""'  # around what has several lines

System = Annotated[str | None, typer.Option(help="The system prompt.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Colour draft tokens by proposer, on a terminal.")]
_OPENED_BY = ("spec", "dtype", "activations", "device", "threads", "head", "exact")


@options.opens_model(*_OPENED_BY)
def chat(
    opening: options.Opening,
    system: System = None,
    show_drafts: ShowDrafts = False,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    as_json: options.Json = False,
) -> None:
    """Talk with a model; /help tells what else there is. Ctrl-C stops an answer, Ctrl-D leaves."""
    from foredraft.cli.conversation import Conversation
    from foredraft.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    wanted = opening()
    _converse(wanted, Conversation(wanted.model, params, wanted.spec, system), [], show_drafts, as_json)


@options.opens_model(
    *_OPENED_BY,
    takes_model=Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A catalogue name, a GGUF file, a safetensors folder or a hub id."),
    ],
)
def run(
    opening: options.Opening,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]", help="Answer this, and leave.")] = None,
    system: System = None,
    show_drafts: ShowDrafts = False,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Talk with MODEL, or have it answer PROMPT and what is piped in; chat has more options, and models lists the
    catalogue."""
    from foredraft.cli.conversation import Conversation
    from foredraft.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    wanted = opening()
    lines = [] if sys.stdin.isatty() and not prompt else [_with_piped(" ".join(prompt or ()))]
    _converse(wanted, Conversation(wanted.model, params, wanted.spec, system), lines, show_drafts, as_json)


def _with_piped(prompt: str) -> str:
    """The prompt, and below it what is piped in; either may be missing."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip("\r\n")
    if not (prompt or piped):
        raise InvalidPrompt("Nothing came in on stdin; give a prompt, or pipe a text in.")
    return "\n\n".join(filter(None, (prompt, piped)))


def _converse(
    wanted: options.ModelOptions, conversation: Conversation, lines: list[str], show_drafts: bool, as_json: bool
) -> None:
    """Answer these lines, or, where there are none, what is typed or piped in."""
    on_terminal = sys.stdin.isatty() and not lines
    numbers = count()
    with wanted.open() as llm, _presses_of_ctrl_c(on_terminal) as presses:
        if on_terminal:
            say(dim(f"{wanted.model} ({llm.dtype}, {llm.backend_name}). /help tells what else there is.", sys.stderr))
        for line in lines or _typed(on_terminal and sys.stdout.isatty(), presses):
            if not lines and line.startswith("/"):
                if not conversation.obey(line):
                    break
            else:
                conversation.ask(line)
            if not conversation.is_asked:
                continue
            colour_drafts = show_drafts and sys.stdout.isatty()
            try:
                output = _answer(llm, conversation, not as_json, colour_drafts, presses)
            except ForedraftError as error:
                if not on_terminal:
                    raise
                conversation.take_back()
                say(f"{error} (/reset starts anew.)")
                continue
            if output is None:
                told = "Stopped; /regen answers again." if conversation.is_answered else "Dropped, question and answer."
                say(dim(told, sys.stderr))
                continue
            if as_json:
                print_json(answer_record(next(numbers), [output]))
            say(dim(figures(output, colour_drafts=show_drafts and sys.stderr.isatty()), sys.stderr))


def _answer(
    llm: LLM, conversation: Conversation, show: bool, colour_drafts: bool, presses: _Presses
) -> CompletionOutput | None:
    """Answers what was asked last. None: it was stopped, and the conversation goes on with what there is of it; or
    stopped twice, and the question is gone too."""
    texts: list[str] = []
    messages, params, spec = conversation.messages, conversation.params, conversation.spec
    presses.count = 0

    def until_stopped(progress: Callable[[int, int], None]) -> Generator[TokenEvent, None, None]:
        def after_run(done: int, total: int) -> None:
            if presses.count:
                raise _Stopped
            progress(done, total)

        with suppress(_Stopped):
            for event in llm.stream(messages, params, spec=spec, progress=after_run):
                texts.append(event.text)
                yield event
                if presses.count:
                    return

    with closing(until_first(PROMPT, until_stopped)) as events:
        output = follow(events, show, colour_drafts)
    if presses.count > 1:
        conversation.take_back()
        return None
    conversation.answer("".join(texts) if output is None else output.content)
    if output is not None and output.error is not None:
        raise ForedraftError(output.error)
    return output


class _Stopped(Exception):
    """Ctrl-C was pressed while a prompt was computed."""


class _Presses:
    count = 0
    interrupts = False  # whether it does what it usually does: while a line is typed


@contextmanager
def _presses_of_ctrl_c(counts: bool) -> Iterator[_Presses]:
    """In a conversation on a terminal, Ctrl-C is only counted except where a line is typed, so that no step is torn
    apart, and a press that comes too late ends nothing. Elsewhere it is as usual."""
    presses = _Presses()
    if not counts:
        yield presses
        return

    def count_one(signum: int, frame: FrameType | None) -> None:
        if presses.interrupts:
            raise KeyboardInterrupt
        presses.count += 1
        if presses.count == 1:
            os.write(2, b"\nStopping\xe2\x80\xa6\n")  # not print: this may interrupt one

    before = signal.signal(signal.SIGINT, count_one)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)


def _typed(prompted: bool, presses: _Presses) -> Iterator[str]:
    """What the person types, without empty lines, until the end of stdin. Several lines are one between \"\"\", and
    where a line ends with a backslash. Ctrl-C twice in a row ends it too."""
    interrupts = 0
    if prompted:
        import readline  # noqa: F401  gives input() its editing and history
    while True:
        try:
            presses.interrupts = True
            text = input("> " if prompted else "")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{input('. ' if prompted else '')}"
            if text.lstrip().startswith(QUOTES):
                text = text.lstrip().removeprefix(QUOTES)
                while QUOTES not in text:
                    text = f"{text}\n{input('. ' if prompted else '')}"
                text = text.partition(QUOTES)[0]
            presses.interrupts = False
        except EOFError:
            if prompted:
                print()
            return
        except KeyboardInterrupt:
            presses.interrupts = False
            if not prompted:
                raise
            interrupts += 1
            if interrupts > 1:
                print()
                return
            say("\nCtrl-C again, Ctrl-D or /exit leaves.")
            continue
        interrupts = 0
        if text.strip():
            yield text.strip()
