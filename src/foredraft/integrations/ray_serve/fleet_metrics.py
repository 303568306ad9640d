"""The metrics of all replicas as one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable


def merged(pages: Iterable[str]) -> str:
    """The samples of all pages by family, as the text format wants it. Samples must differ in a label, such as
    `engine`, which names the replica."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page in pages:
        family, is_new = "", False
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                is_new = family not in heads
                heads.setdefault(family, [])
                samples.setdefault(family, [])
            if not line.startswith("#"):
                samples[family].append(line)
            elif is_new:
                heads[family].append(line)
    return "".join(f"{line}\n" for family in heads for line in (*heads[family], *samples[family]))
