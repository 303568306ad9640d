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


def models(
    action: Annotated[
        Literal["list", "fetch", "info"], typer.Argument(metavar="[list|fetch|info]", help="What to do.")
    ] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The model to fetch or to tell about.")] = None,
    model: Annotated[str | None, typer.Option(help="The same as NAME.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the catalogue, fetch a model, or tell about one (info)."""
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
        record |= _details(record["path"])
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


def _details(path: str | None) -> dict[str, Any]:
    """What the model's own header says, and which backend would serve it here; nothing while it is not fetched."""
    if path is None:
        return {"dtype": None, "backend": None, "note": None, "heads": None, "config": None}
    from foredraft.backends.choose import choose_backend, choose_device, how_to_get_kernels
    from foredraft.heads.catalog import find_heads

    checkpoint = catalog.open_checkpoint(Path(path))
    backend = choose_backend("auto", checkpoint.precision, choose_device("auto"), None)
    is_slow = backend.name == "torch" and backend.device.type == "cpu"
    return {
        "dtype": checkpoint.precision,
        "backend": backend.name,
        "note": f"The fast kernels are missing. {how_to_get_kernels()}" if is_slow else None,
        "heads": [  # that `auto` finds; draft tokens were accepted so often on text not trained on
            {"kind": kind, "path": str(files.folder), "acceptance": list(files.config.acceptance)}
            for kind, files in find_heads("auto", checkpoint).items()
        ],
        "config": asdict(checkpoint.config),
    }


def _print_fields(record: dict[str, Any]) -> None:
    """One field a line; the config's fields below it, without those that are not set."""
    shown = {
        **record,
        "size_bytes": _megabytes(record["size_bytes"]),
        "licence": record["licence"] or "unknown",
        "proposers": ", ".join(record["proposers"]),
    }
    if shown.get("heads") is not None:
        shown["heads"] = "; ".join(map(_readable_head, shown["heads"])) or "none"
    for field, value in shown.items():
        if field == "config" and value is not None:
            print("config")
            for key, setting in value.items():
                if setting not in (None, (), False):
                    print(f"  {key:<24} {setting}")
        elif field != "note" or value is not None:
            print(f"{field.removesuffix('_bytes'):<10} {'not fetched' if value is None else value}")


def _readable_head(head: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.2f}" for rate in head["acceptance"])
    return f"{head['kind']} (accepted by depth: {rates})" if rates else f"{head['kind']} (not measured)"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
