"""`foredraft models`: the catalogue, and what is known of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foredraft.cli import options
from foredraft.cli.output import print_json
from foredraft.cli.progress import fetched
from foredraft.errors import InvalidModel
from foredraft.heads.kinds import shipped_kinds
from foredraft.models import catalog
from foredraft.models.known_models import MODELS
from foredraft.models.sources import HubFile
from foredraft.proposers.registry import proposer_names
from foredraft.reports.facts import memory_bytes

if TYPE_CHECKING:
    from foredraft.heads.files import HeadFiles


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
        names = [entry.name for entry in MODELS] if name is None else [name]
        for record in map(_summary, names):
            if as_json:
                print_json(record)
            else:
                size, licence = _readable_size(record["size_bytes"]), record["licence"] or "licence unknown"
                head = "head" if record.get("shipped_heads") else ""
                print(f"{record['name']:<20} {size:>8}  {licence:<20} {head:<5} {_where(record)}")
        return
    if name is None:
        raise InvalidModel(f"Say which model: foredraft models {action} NAME; foredraft models lists the catalogue.")
    if action == "fetch":
        fetched(name)
    record = _summary(name)
    if action == "info":
        if "fits" in record:
            record["fits_gpu"] = _fits_gpu(record["memory_bytes"])
        record |= _details(record["path"], head)
    if as_json:
        print_json(record)
    else:
        _print_fields(record)


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalogue name or a hub id.")],
    as_json: options.Json = False,
) -> None:
    """Fetch a model, so that it is here when it is needed."""
    models("fetch", model, as_json=as_json)


def _summary(name: str) -> dict[str, Any]:
    """What is known without opening the model: of the catalogue's models all of it, of a file its size."""
    if entry := catalog.in_catalogue(name):
        known = {
            "name": entry.name,
            "size_bytes": entry.size_bytes,
            "licence": entry.licence,
            "path": str(entry.path) if entry.path else None,
            "original": entry.original,
            "file": f"{entry.source.repository}/{entry.source.file}" if isinstance(entry.source, HubFile) else None,
            "shipped_heads": list(shipped_kinds(entry.name)),
            "known_heads": list(entry.heads),
            "draft_model": entry.draft,
            "memory_bytes": entry.memory_bytes,
            "fits": entry.memory_bytes <= memory_bytes(),
        }
    else:
        place = catalog.resolve(name)
        files = place.rglob("*") if place.is_dir() else [place]
        size = sum(file.stat().st_size for file in files if file.is_file())
        known = {"name": name, "size_bytes": size, "licence": None, "path": str(place)}
    return {**known, "proposers": list(proposer_names())}


def _where(record: dict[str, Any]) -> str:
    """Where a model is, or what hinders."""
    if record.get("fits") is False:
        need, have = _readable_size(record["memory_bytes"]), _readable_size(memory_bytes())
        return f"needs about {need} of memory, and this machine has {have}"
    return str(record["path"] or "fits, not fetched")


def _fits_gpu(memory: int) -> bool | None:
    """Whether the CUDA device that `auto` takes has so much memory; None where there is none."""
    import torch

    return memory <= torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def _details(path: str | None, head: str) -> dict[str, Any]:
    """What the model's own header says, and which backend would serve it here; nothing while it is not fetched."""
    if path is None:
        return {"dtype": None, "backend": None, "note": None, "kv_cache": None, "heads": None, "config": None}
    from foredraft.backends.choose import choose_backend, choose_device, how_to_get_kernels
    from foredraft.engine.kept_acceptance import with_kept_acceptance
    from foredraft.heads.catalog import find_heads

    checkpoint = catalog.open_checkpoint(Path(path))
    found = find_heads(None if head == "none" else head, checkpoint)
    backend = choose_backend("auto", checkpoint.precision, choose_device("auto"), None)
    kv = checkpoint.config.kv_bytes(backend.kv_dtype.itemsize)
    is_slow = backend.name == "torch" and backend.device.type == "cpu"
    return {
        "dtype": checkpoint.precision,
        "backend": backend.name,
        "note": f"The fast kernels are missing. {how_to_get_kernels()}" if is_slow else None,
        "kv_cache": {
            "bytes_per_token": kv.per_token,
            "window": kv.window,
            "bytes_per_window": kv.per_window,  # of a sequence, in layers with a window
        },
        "heads": [
            {
                "kind": kind,
                "layout": files.layout,
                "comes_with": _giver(files, head),
                "path": str(files.folder),
                "size_bytes": None if files.is_in_target else files.size_bytes,
                "bits": None if files.is_in_target else round(files.bits, 1),
                # so often draft tokens were accepted: on text not trained on, or of the first requests
                "acceptance": [round(rate, 3) for rate in files.config.acceptance],
            }
            for kind, files in with_kept_acceptance(found).items()
        ],
        "config": asdict(checkpoint.config),
    }


def _giver(files: HeadFiles, named: str) -> str:
    """Who brings a head along."""
    return "the model" if files.is_in_target else "Foredraft" if named == "auto" else "--head"


def _print_fields(record: dict[str, Any]) -> None:
    """One field a line; heads and the config's fields below theirs, without those that are not set."""
    shown = {
        **record,
        "size_bytes": _readable_size(record["size_bytes"]),
        "licence": record["licence"] or "unknown",
        "proposers": ", ".join(record["proposers"]),
    }
    if "memory_bytes" in shown:
        fits = "fits this machine" if shown.pop("fits") else "more than this machine has"
        on_gpu = {None: "", True: ", and fits its GPU", False: ", and more than its GPU has"}[
            shown.pop("fits_gpu", None)
        ]
        shown["memory_bytes"] = f"about {_readable_size(record['memory_bytes'])}: {fits}{on_gpu}"
        shown["shipped_heads"] = ", ".join(record["shipped_heads"]) or "none"
        shown["known_heads"] = ", ".join(record["known_heads"]) or "none"
        shown["file"] = record["file"] or "in a wheel on PyPI"
        shown["draft_model"] = record["draft_model"] or "none"
    for field, value in shown.items():
        if field == "heads" and value:
            print("heads")
            for head in value:
                print(f"  {head['kind']:<24} {_readable_head(head)}")
        elif field == "kv_cache" and value is not None:
            print(f"{'kv cache':<13} {_readable_kv(value)}")
        elif field == "config" and value is not None:
            print("config")
            for key, setting in value.items():
                if setting not in (None, (), False):
                    print(f"  {key:<24} {setting}")
        elif field != "note" or value is not None:
            name = field.removesuffix("_bytes").replace("_", " ")
            print(f"{name:<13} {'not fetched' if value is None else value or 'none'}")


def _readable_head(head: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.2f}" for rate in head["acceptance"])
    measured = f"accepted by depth: {rates}" if rates else "not measured"
    given = "given by --head" if head["comes_with"] == "--head" else f"comes with {head['comes_with']}"
    size = "" if head["bits"] is None else f"{_readable_size(head['size_bytes'])}, {head['bits']} bits, "
    return f"{head['layout']} layout, {given}, {size}{measured}"


def _readable_kv(kv: dict[str, Any]) -> str:
    per_token = f"{kv['bytes_per_token']:,} bytes per token"
    if not kv["window"]:
        return per_token
    return f"{per_token}, and {kv['bytes_per_window']:,} per sequence for windows of {kv['window']:,} tokens"


def _readable_size(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
