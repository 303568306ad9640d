"""Which layouts of heads can be read: one file for each, which translates config and tensor names into ours. What comes
out is a HeadConfig and the tensors that it describes, whatever the files were.

A file here has two functions: `fits`, whether a folder holds a head in its layout, and `read`, the translation, which
is checked: every field fits the others and the target, every tensor is used, and none is missing. GGUF files are known
by their name and need no `fits`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from foredraft.errors import InvalidModel
from foredraft.heads.base import HeadConfig
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats import dflash, eagle1, eagle3, foredraft, gguf, medusa, mtp
from foredraft.heads.formats.published import Published
from foredraft.models.checkpoint import Checkpoint
from foredraft.models.fields import shown

_UNSUPPORTED = {  # by what the name of an architecture contains, in small letters
    "dflash2": "a DFlash2 head with convolutions and a selector",
    "domino": "a Domino head with a GRU",
    "jetspec": "a JetSpec head with a causal head of its own",
    "xpress": "an Xpress head",
    "mlp_speculator": "an MLP speculator",
    "hydra": "a Hydra head",
    "mtp": "a layer for multi-token prediction",
    "assistant": "an assistant that reads the target's keys and values",
}
READERS = (foredraft, eagle3, dflash, medusa, mtp, eagle1)


def holds_head(folder: Path) -> bool:
    """Whether some reader knows what lies in a folder with a config.json."""
    return any(reader.fits(Published(folder)) for reader in READERS)


def open_head(place: Path, target: Checkpoint) -> HeadFiles:
    """The head in a folder with a config.json, or in a GGUF file; raises InvalidModel with what is wrong with it, or
    why it does not belong to the target."""
    if place.suffix.lower() == ".gguf":
        read = partial(gguf.read, place, target)
    else:
        published = Published(place)
        reader = next((reader for reader in READERS if reader.fits(published)), None)
        if reader is None:
            raise _unknown(published)
        read = partial(reader.read, published, target)
    config, _ = read()
    # Its tensors are read again when the head is used, which may be never.
    return HeadFiles(place, config, lambda: read()[1], _layout(place, config))


def _layout(place: Path, config: HeadConfig) -> str:
    """The name under which people know a layout, and the format of the file where there are several."""
    if config.target_digest:
        return "Foredraft"
    if config.kind == "eagle":
        name = "EAGLE" if config.fuses_embedding else "P-EAGLE" if config.block_input == "masked" else "EAGLE-3"
    else:
        names = {"medusa": "Medusa", "dflash": "DSpark" if config.correction == "markov" else "DFlash"}
        name = names.get(config.kind, config.kind.upper())
    if place.suffix.lower() == ".gguf":
        return f"{name}, GGUF"
    return f"{name}, speculators" if Published(place).speculators_type is not None else name


def _unknown(published: Published) -> InvalidModel:
    names = [*published.architectures, *filter(None, [published.speculators_type, published.projector])]
    what = (text for part, text in _UNSUPPORTED.items() if any(part in name.lower() for name in names))
    found = f"architectures is {shown(published.architectures)}"
    if published.speculators_type is not None:
        found = f"speculators_model_type is {shown(published.speculators_type)}"
    return published.refuse(
        f"{found}, {next(what, 'no head that Foredraft knows')}, which is not supported; give a folder that `foredraft "
        "train` has written, or an EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark or Medusa head, or one of these kinds or "
        "mtp in the speculators format."
    )
