"""The command `foredraft`: registers the commands and turns every way to end into an exit code.

0 is success, 1 a request or check that failed, 2 bad arguments (one sentence on stderr), 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from foredraft import __version__
from foredraft.cli.audit import audit
from foredraft.cli.bench import bench
from foredraft.cli.chat import chat
from foredraft.cli.demo import demo
from foredraft.cli.export import export
from foredraft.cli.generate import generate
from foredraft.cli.models import models
from foredraft.cli.output import library_remarks, say, show_cursor
from foredraft.cli.plan import plan
from foredraft.cli.serve import serve
from foredraft.cli.simulate import simulate
from foredraft.cli.train import train
from foredraft.errors import ForedraftError

INTERRUPTED = 130  # what typer, too, makes of Ctrl-C inside a command

# Plain help: the boxes that rich draws would triple the time of `--help`.
app = typer.Typer(
    name="foredraft",
    help="Lossless speculative decoding: several tokens per run of the model, and never a different text.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (demo, generate, chat, serve, audit, bench, plan, simulate, train, export, models):
    app.command()(command)


@app.callback(invoke_without_command=True)
def foredraft(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"foredraft {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run() -> None:
    """The entry point of the command; it always ends in SystemExit."""
    try:
        with library_remarks():
            code = app(standalone_mode=False)
    except (TyperException, ForedraftError) as error:
        say(one_sentence(error))
        sys.exit(2)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        show_cursor()
    sys.exit(code if isinstance(code, int) else 0)


def one_sentence(error: TyperException | ForedraftError) -> str:
    """The error's message on one line, ended like a sentence."""
    message = error.format_message() if isinstance(error, TyperException) else str(error)
    line = " ".join(message.split())
    return line if line.endswith((".", "?", "!")) else line + "."
