"""`foredraft chat`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import answer_record, dim, figures, follow, print_json, say
from foredraft.errors import ForedraftError
from foredraft.params import SamplingParams
from foredraft.reports.prompts import Message

HELP = """\
/system TEXT   start anew with this system prompt
/reset         start anew
/help          show this
/exit          leave (so does Ctrl-D)"""


@options.opens_model("spec", "dtype", "activations", "device", "threads", "head", "exact")
def chat(
    opening: options.Opening,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour draft tokens by proposer, on a terminal.")
    ] = False,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    as_json: options.Json = False,
) -> None:
    """Talk with a model; /help tells what else there is."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    on_terminal = sys.stdin.isatty()
    conversation, numbers = Conversation(system), count()
    wanted = opening()
    with wanted.open() as llm:
        if on_terminal:
            say(dim(f"{wanted.model} ({llm.dtype}, {llm.backend_name}). /help tells what else there is.", sys.stderr))
        for line in _lines(prompted=on_terminal and sys.stdout.isatty()):
            if line.startswith("/"):
                if not _obey(line, conversation):
                    break
                continue
            try:
                colour_drafts = show_drafts and sys.stdout.isatty()
                output = follow(llm.stream(conversation.messages(line), params), not as_json, colour_drafts)
                if output.error is not None:
                    raise ForedraftError(output.error)
            except ForedraftError as error:
                if not on_terminal:
                    raise
                say(f"{error} (/reset starts anew.)")
                continue
            conversation.turns += [{"role": "user", "content": line}, {"role": "assistant", "content": output.text}]
            if as_json:
                print_json(answer_record(next(numbers), [output]))
            say(dim(figures(output, colour_drafts=show_drafts and sys.stderr.isatty()), sys.stderr))


@dataclass
class Conversation:
    """The turns so far, and the system prompt in front of them."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self, line: str) -> list[Message]:
        """The conversation with `line` as its next user turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": line}]


def _lines(prompted: bool) -> Iterator[str]:
    """What the person types, line by line and without empty ones, until the end of stdin."""
    if prompted:
        import readline  # noqa: F401  gives input() its editing and history
    while True:
        try:
            line = input("> " if prompted else "").strip()
        except EOFError:
            if prompted:
                print()
            return
        if line:
            yield line


def _obey(line: str, conversation: Conversation) -> bool:
    """Carries out a /command. False means: leave."""
    command, _, argument = line.partition(" ")
    match command:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.turns.clear()
            say("A new conversation.")
        case "/system" if argument.strip():
            conversation.system = argument.strip()
            conversation.turns.clear()
            say("A new conversation with this system prompt.")
        case "/system":
            say(conversation.system or "There is no system prompt.")
        case "/help":
            say(HELP)
        case _:
            say(f"{command} is not known.\n{HELP}")
    return True
