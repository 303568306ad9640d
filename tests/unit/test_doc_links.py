"""Links between pages lead to files that there are, and to headings that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
    for place, anchor in links:
        if not place.startswith("http"):
            target = page.parent / place if place else page
            assert target.exists(), f"there is no {place}"
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{place} has no heading {anchor}"
