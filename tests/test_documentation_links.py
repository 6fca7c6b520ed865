"""Links in the documentation lead somewhere, and every page is linked from the README."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
INDEX = ROOT / "README.md"


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


def test_diffs_of_the_pages_are_of_the_code() -> None:
    """Lines that begin with a plus in a diff of CONTRIBUTING.md stand in the sources, wherever they lie today."""
    folders = (ROOT / "olive_ext", ROOT / "tests")
    files = [*(path for folder in folders for path in folder.rglob("*.py")), ROOT / "docs" / "comparison.md"]
    lines = {line.strip() for path in files for line in path.read_text(encoding="utf-8").splitlines()}
    added = [
        (page.name, line[1:].strip())
        for page in (ROOT / "CONTRIBUTING.md",)
        for block in re.findall(r"^```diff\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
        for line in block.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert len(added) > 20
    assert [line for line in added if line[1] not in lines] == []


def test_members_that_the_python_reference_names_are_there() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)\n    options: .*members: \[(.*?)\]", page, re.M)
    named = [(path, member) for path, members in listed for member in members.split(", ")]
    assert named
    assert [item for item in named if not hasattr(pkgutil.resolve_name(item[0]), item[1])] == []


def test_the_readmes_commands_come_before_its_picture() -> None:
    """They are on the first screen: `tests/test_site.py` measures that in a browser."""
    assert INDEX.read_text(encoding="utf-8").partition("<img")[0].count("```sh\n") == 2
