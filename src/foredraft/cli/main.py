"""The command `foredraft`: finds the command that was named, and turns every way to end into an exit code.

0 is success, 1 a request or check that failed, 2 bad arguments (one sentence on stderr), 130 Ctrl-C. A command is
imported when it is named: to import all of them would triple the time of `--help`.
"""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from foredraft import __version__
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    import typer
    from typer.exceptions import TyperException

INTERRUPTED = 130  # what typer, too, makes of Ctrl-C inside a command


class Command(NamedTuple):
    module: str  # in this folder; its function has the name of the command
    help: str  # in one line


COMMANDS = {
    "demo": Command("demo", "Fetch the default model, and show live what speculation does."),
    "run": Command("chat", "Talk with MODEL, or have it answer one PROMPT."),
    "pull": Command("models", "Fetch MODEL."),
    "models": Command("models", "List the catalogue, or tell about a model."),
    "generate": Command("generate", "Continue prompts, or answer them with --chat."),
    "chat": Command("chat", "Talk with a model; /help tells what else there is."),
    "serve": Command("serve", "Serve a model over HTTP, with a page."),
    "audit": Command("audit", "Prove on this machine that speculation changes no text."),
    "bench": Command("bench", "Measure plain decoding and speculation, interleaved."),
    "plan": Command("plan", "Say whether speculation pays, and how long drafts should be."),
    "simulate": Command("simulate", "Say what a fleet of servers would carry."),
    "train": Command("train", "Train proposers for a model on text that it writes itself."),
    "export": Command("export", "Write a head as vLLM, SGLang or speculators load it."),
}

HELP = """\
Usage: foredraft [OPTIONS] COMMAND [ARGS]...

  Lossless speculative decoding: several tokens per run of the model, and never
  a different text.

Options:
  --version  Print the version and leave.
  --help     Show this message and exit.

Commands:
{commands}

foredraft COMMAND --help tells all about a command."""


def command_app(name: str) -> typer.Typer:
    """One command as a program of its own."""
    import typer

    # Plain help: the boxes that rich draws would triple the time of `--help`.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(getattr(import_module(f"foredraft.cli.{COMMANDS[name].module}"), name))
    return app


def run() -> None:
    """The entry point of the command; it always ends in SystemExit."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "--help":
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {each:<{width}}  {COMMANDS[each].help}" for each in COMMANDS)))
        sys.exit(0)
    if name == "--version":
        print(f"foredraft {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        print(f"No such command {name[:40]!r}{suggestion}; foredraft --help lists them.", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run_command(name, arguments))


def _run_command(name: str, arguments: list[str]) -> int:
    from typer.exceptions import TyperException

    from foredraft.cli.output import library_remarks, say, show_cursor

    try:
        with library_remarks():
            code = command_app(name)(arguments, prog_name=f"foredraft {name}", standalone_mode=False)
    except (TyperException, ForedraftError) as error:
        say(one_sentence(error))
        return 2
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        show_cursor()
    return code if isinstance(code, int) else 0


def one_sentence(error: TyperException | ForedraftError) -> str:
    """The error's message on one line, ended like a sentence."""
    message = str(error) if isinstance(error, ForedraftError) else error.format_message()
    line = " ".join(message.split())
    return line if line.endswith((".", "?", "!")) else line + "."
