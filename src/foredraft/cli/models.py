"""`foredraft models`: the catalogue, and what is known of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json
from foredraft.cli.progress import fetched
from foredraft.errors import InvalidModel
from foredraft.models import catalog
from foredraft.proposers.registry import proposer_names

_MODEL = "the model"  # what a head comes with that lies in the model's own file


def models(
    action: Annotated[
        Literal["list", "fetch", "info"], typer.Argument(metavar="[list|fetch|info]", help="What to do.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The model to fetch or to tell about.")] = None,
    model: Annotated[str | None, typer.Option(help="The same as NAME.")] = None,
    head: options.Head = "auto",
    as_json: options.Json = False,
) -> None:
    """List the catalogue, fetch a model, or tell about one and its heads (info)."""
    name = name or model
    if action == "list":
        names = [entry.name for entry in catalog.entries()] if name is None else [name]
        for record in map(_summary, names):
            if as_json:
                print_json(record)
            else:
                size, here = _megabytes(record["size_bytes"]), record["path"] or "not fetched"
                print(f"{record['name']:<16} {size:>8}  {record['licence'] or 'licence unknown':<12} {here}")
        return
    if name is None:
        raise InvalidModel(f"Say which model: foredraft models {action} NAME; foredraft models lists the catalogue.")
    if action == "fetch":
        fetched(name)
    record = _summary(name)
    if action == "info":
        record |= _details(record["path"], head)
    if as_json:
        print_json(record)
    else:
        _print_fields(record)


def _summary(name: str) -> dict[str, Any]:
    """What is known without opening the model: of the catalogue's models all of it, of a file its size."""
    for entry in catalog.entries():
        if name.lower() in (entry.name, *entry.aliases):
            path = str(entry.path) if entry.path else None
            known = {"name": entry.name, "size_bytes": entry.size_bytes, "licence": entry.licence, "path": path}
            break
    else:
        place = catalog.resolve(name)
        files = place.rglob("*") if place.is_dir() else [place]
        size = sum(file.stat().st_size for file in files if file.is_file())
        known = {"name": name, "size_bytes": size, "licence": None, "path": str(place)}
    return {**known, "proposers": list(proposer_names())}


def _details(path: str | None, head: str) -> dict[str, Any]:
    """What the model's own header says, and which backend would serve it here; nothing while it is not fetched."""
    if path is None:
        return {"dtype": None, "backend": None, "note": None, "heads": None, "config": None}
    from foredraft.backends.choose import choose_backend, choose_device, how_to_get_kernels
    from foredraft.engine.kept_acceptance import with_kept_acceptance
    from foredraft.heads.catalog import SHIPPED, find_heads
    from foredraft.heads.files import HeadFiles

    checkpoint = catalog.open_checkpoint(Path(path))

    def comes_with(files: HeadFiles) -> str:
        return "Foredraft" if SHIPPED in files.folder.parents else _MODEL if files.folder == Path(path) else "--head"

    found = find_heads(None if head == "none" else head, checkpoint)
    backend = choose_backend("auto", checkpoint.precision, choose_device("auto"), None)
    is_slow = backend.name == "torch" and backend.device.type == "cpu"
    return {
        "dtype": checkpoint.precision,
        "backend": backend.name,
        "note": f"The fast kernels are missing. {how_to_get_kernels()}" if is_slow else None,
        "heads": [
            {
                "kind": kind,
                "layout": files.layout,
                "comes_with": comes_with(files),
                "path": str(files.folder),
                "size_bytes": None if comes_with(files) == _MODEL else files.size_bytes,
                "bits": None if comes_with(files) == _MODEL else round(files.bits, 1),
                # so often draft tokens were accepted: on text not trained on, or of the first requests
                "acceptance": [round(rate, 3) for rate in files.config.acceptance],
            }
            for kind, files in with_kept_acceptance(found).items()
        ],
        "config": asdict(checkpoint.config),
    }


def _print_fields(record: dict[str, Any]) -> None:
    """One field a line; heads and the config's fields below theirs, without those that are not set."""
    shown = {
        **record,
        "size_bytes": _megabytes(record["size_bytes"]),
        "licence": record["licence"] or "unknown",
        "proposers": ", ".join(record["proposers"]),
    }
    for field, value in shown.items():
        if field == "heads" and value:
            print("heads")
            for head in value:
                print(f"  {head['kind']:<24} {_readable_head(head)}")
        elif field == "config" and value is not None:
            print("config")
            for key, setting in value.items():
                if setting not in (None, (), False):
                    print(f"  {key:<24} {setting}")
        elif field != "note" or value is not None:
            print(f"{field.removesuffix('_bytes'):<10} {'not fetched' if value is None else value or 'none'}")


def _readable_head(head: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.2f}" for rate in head["acceptance"])
    measured = f"accepted by depth: {rates}" if rates else "not measured"
    given = "given by --head" if head["comes_with"] == "--head" else f"comes with {head['comes_with']}"
    size = "" if head["size_bytes"] is None else f", {_megabytes(head['size_bytes'])}, {head['bits']} bits"
    return f"{head['layout']} layout, {given}{size}, {measured}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
