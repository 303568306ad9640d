"""DFlash heads for other engines."""

from __future__ import annotations

from foredraft.errors import InvalidModel
from foredraft.export.engine import Engine
from foredraft.export.layout import Head, Layout


def dflash_layout(head: Head, engine: Engine) -> Layout:
    raise InvalidModel(
        f"{engine.label} has no place for parts of this DFlash head: norms of its taps, and rows that all know the "
        "anchor and the last feature; train a head that it knows with `foredraft train eagle`."
    )
