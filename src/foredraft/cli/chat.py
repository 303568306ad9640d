"""`foredraft chat` and `foredraft run`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options
from foredraft.cli.conversation import Conversation
from foredraft.cli.output import answer_record, dim, figures, follow, print_json, say
from foredraft.errors import ForedraftError
from foredraft.outputs import CompletionOutput, TokenEvent
from foredraft.params import SamplingParams

if TYPE_CHECKING:
    from foredraft.llm import LLM

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
    """Talk with MODEL, or have it answer PROMPT; chat has more options, and models lists the catalogue."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    wanted = opening()
    lines = [" ".join(prompt)] if prompt else []
    _converse(wanted, Conversation(wanted.model, params, wanted.spec, system), lines, show_drafts, as_json)


def _converse(
    wanted: options.ModelOptions, conversation: Conversation, lines: list[str], show_drafts: bool, as_json: bool
) -> None:
    """Answer these lines, or, where there are none, what is typed or piped in."""
    on_terminal = sys.stdin.isatty() and not lines
    numbers = count()
    with wanted.open() as llm:
        if on_terminal:
            say(dim(f"{wanted.model} ({llm.dtype}, {llm.backend_name}). /help tells what else there is.", sys.stderr))
        for line in lines or _typed(prompted=on_terminal and sys.stdout.isatty()):
            if not lines and line.startswith("/"):
                if not conversation.obey(line):
                    break
            else:
                conversation.ask(line)
            if not conversation.is_asked:
                continue
            colour_drafts = show_drafts and sys.stdout.isatty()
            try:
                output = _answer(llm, conversation, not as_json, colour_drafts, stops=on_terminal)
            except ForedraftError as error:
                if not on_terminal:
                    raise
                conversation.take_back()
                say(f"{error} (/reset starts anew.)")
                continue
            if output is None:
                say(dim("Stopped; /regen answers again.", sys.stderr))
                continue
            if as_json:
                print_json(answer_record(next(numbers), [output]))
            say(dim(figures(output, colour_drafts=show_drafts and sys.stderr.isatty()), sys.stderr))


def _answer(
    llm: LLM, conversation: Conversation, show: bool, colour_drafts: bool, stops: bool
) -> CompletionOutput | None:
    """Answers what was asked last. None: it was stopped, and the conversation goes on with what there is of it."""
    texts: list[str] = []
    with _stopped_by_ctrl_c(stops) as is_stopped:

        def until_stopped() -> Generator[TokenEvent, None, None]:
            for event in llm.stream(conversation.messages, conversation.params, spec=conversation.spec):
                texts.append(event.text)
                yield event
                if is_stopped():
                    return

        with closing(until_stopped()) as events:
            output = follow(events, show, colour_drafts)
    conversation.answer("".join(texts) if output is None else output.content)
    if output is not None and output.error is not None:
        raise ForedraftError(output.error)
    return output


@contextmanager
def _stopped_by_ctrl_c(stops: bool) -> Iterator[_Flag]:
    """While an answer is written, the first Ctrl-C only says so, so that no step is torn apart; the second one is as
    usual. Elsewhere than on a terminal already the first one is."""
    flag = _Flag()
    if not stops:
        yield flag
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if flag():
            raise KeyboardInterrupt
        flag.is_set = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class _Flag:
    is_set = False

    def __call__(self) -> bool:
        return self.is_set


def _typed(prompted: bool) -> Iterator[str]:
    """What the person types, without empty lines, until the end of stdin. Several lines are one between \"\"\", and
    where a line ends with a backslash."""
    if prompted:
        import readline  # noqa: F401  gives input() its editing and history
    while True:
        try:
            text = input("> " if prompted else "")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{input('. ' if prompted else '')}"
            if text.lstrip().startswith(QUOTES):
                text = text.lstrip().removeprefix(QUOTES)
                while QUOTES not in text:
                    text = f"{text}\n{input('. ' if prompted else '')}"
                text = text.partition(QUOTES)[0]
        except EOFError:
            if prompted:
                print()
            return
        except KeyboardInterrupt:
            if not prompted:
                raise
            say("\nCtrl-D or /exit leaves.")
            continue
        if text.strip():
            yield text.strip()
