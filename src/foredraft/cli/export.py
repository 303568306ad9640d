"""`foredraft export`: a trained head in the layout of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json
from foredraft.cli.progress import fetched
from foredraft.heads.engines import Engine
from foredraft.models import catalog


def export(
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="A folder that `foredraft train` has written.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it: a new or empty folder.")],
    to: Annotated[Engine, typer.Option(help="Whose layout.")],
    model: options.Model = catalog.DEFAULT_MODEL,
    verifier: Annotated[
        str | None,
        typer.Option(help="The model's name for the other engine; as --model names it when not given."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a trained head or draft model in the layout that vLLM, SGLang or speculators load, or an MTP layer into a
    copy of its model, with the names of DeepSeek or Qwen."""
    catalog.check_name(model)
    from foredraft.heads.export import export as export_head

    target = catalog.open_checkpoint(fetched(model))
    done = export_head(head.expanduser(), to, out.expanduser(), target, verifier or catalog.hub_name(model))
    if as_json:
        record = {"kind": done.kind, "engine": done.engine.value, "folder": str(done.folder), "command": done.command}
        print_json(record)
    else:
        print(f"The {done.kind} is in {done.folder}, in the layout of {done.engine.value}; use it with:")
        print(f"  {done.command}")
