"""Which heads a model has: what its own file brings, those that come with Foredraft, and those that a user names."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from foredraft.errors import InvalidModel
from foredraft.heads.base import CONFIG_FILE, HeadConfig
from foredraft.heads.files import HeadFiles, check_target, read_weights
from foredraft.heads.formats import holds_head, open_head
from foredraft.heads.formats.mtp import find_mtp
from foredraft.heads.kinds import SHIPPED
from foredraft.models.catalog import check_name, resolve
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.sources import Progress


def find_heads(head: str | None, checkpoint: Checkpoint, progress: Progress | None = None) -> dict[str, HeadFiles]:
    """Heads by kind. `head` is "auto" for the layer that the model brings along, or without one for the heads that come
    with Foredraft and belong to this model; None for none, else the folder or GGUF file of a head, a folder of such
    folders, or a hub id, whose download `progress` watches. Whatever is wrong with a head that was named or brought is
    an error."""
    if head is None:
        return {}
    if head == "auto":
        brought = find_mtp(checkpoint)
        return shipped_heads(checkpoint) if brought is None else {brought.config.kind: brought}
    place = resolve(check_name(head, "head"), progress)
    folders = [place]
    if place.is_dir() and not (place / CONFIG_FILE).is_file():
        # Training may have written a draft model beside the heads: that is a model, which a spec names.
        configs = sorted(place.glob(f"*/{CONFIG_FILE}"))
        folders = [file.parent for file in configs if holds_head(file.parent)]
    if not folders:
        raise InvalidModel(
            f"head={head!r} has no {CONFIG_FILE}, neither itself nor in its folders; give a folder that `foredraft "
            "train` has written, a hub id, auto or None."
        )
    found: dict[str, HeadFiles] = {}
    for folder in folders:
        files = open_head(folder, checkpoint)
        kind = files.config.kind
        if kind in found:
            raise InvalidModel(
                f"head={head!r} has two {kind} heads, {found[kind].folder.name} and {folder.name}; name the folder of "
                "one of them."
            )
        found[kind] = files
    return found


def shipped_heads(checkpoint: Checkpoint, shipped: Path = SHIPPED) -> dict[str, HeadFiles]:
    """The heads of this model that come with Foredraft, by kind."""
    found: dict[str, HeadFiles] = {}
    for file in sorted(shipped.glob(f"*/*/{CONFIG_FILE}")):
        config = HeadConfig.read(file.parent)
        with suppress(InvalidModel):
            check_target(file.parent, config, checkpoint)
            found[config.kind] = HeadFiles(file.parent, config, partial(read_weights, file.parent, config))
    return found
