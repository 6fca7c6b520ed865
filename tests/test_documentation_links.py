"""Links in the documentation lead somewhere, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
INDEX = ROOT / "docs" / "README.md"


def links(page: Path) -> set[Path]:
    """Files and folders that the page links to."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found if "://" not in link}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in sorted(links(page)) if not link.exists()] == []


def test_every_page_is_in_the_index() -> None:
    others = {page for page in PAGES if page.name != "README.md"}
    assert len(others) > 20
    assert others <= links(INDEX)
