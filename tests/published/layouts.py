"""Every layout, by family and name."""

from __future__ import annotations

from tests.published import dflash, eagle1, eagle3, gguf_heads, medusa, mtp
from tests.published.shapes import Layout

FAMILIES: dict[str, dict[str, Layout]] = {
    "eagle3": eagle3.LAYOUTS,
    "eagle1": eagle1.LAYOUTS,
    "dflash": dflash.LAYOUTS,
    "medusa": medusa.LAYOUTS,
    "mtp": mtp.LAYOUTS,
    "gguf": gguf_heads.LAYOUTS,
}
LAYOUTS: dict[str, Layout] = {
    f"{family}/{name}": layout for family, layouts in FAMILIES.items() for name, layout in layouts.items()
}
