"""The documentation's site: built strictly, a link or an anchor that leads nowhere fails, and without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.chromium import Chromium, find_chromium

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.other_env


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder; `python -m mkdocs build` as the documentation has it."""
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_published(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    html = {page.relative_to(ROOT).with_suffix(".html").as_posix().replace("README", "index") for page in pages}
    assert len(html) > 20
    assert [name for name in sorted(html) if not (site / name).is_file()] == []


def test_docstrings_are_the_reference(site: Path) -> None:
    page = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("olive_ext.session.Session.generate", "olive_ext.evaluate", "olive_ext.backends.lm_eval.OrtLM"):
        assert f'id="{name}"' in page
    assert "Opens the model at" in page


def test_schemas_are_published(site: Path) -> None:
    for kind in ("recipe", "evaluator", "pass"):
        schema = json.loads((site / "docs" / "reference" / f"schema-{kind}.json").read_text(encoding="utf-8"))
        assert "json-schema.org" in schema["$schema"]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="(https?:)?//|<link[^>]+rel="(?:stylesheet|icon)"[^>]+href="https?:'
    )
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_keys_of_tables_are_not_split_and_settings_begin_with_the_model(site: Path) -> None:
    page = (site / "docs" / "reference" / "config.html").read_text(encoding="utf-8")
    assert "assets/tables.css" in page
    assert "nowrap" in (site / "assets" / "tables.css").read_text(encoding="utf-8")
    keys = re.findall(r"<td><code>(\w+)</code></td>", page)
    assert keys[:3] == ["model", "tasks", "reference"]


@pytest.fixture
def browser() -> Iterator[Chromium]:
    if (path := find_chromium()) is None:
        pytest.skip("no Chromium")
    with Chromium(path) as opened:
        yield opened


def test_both_commands_are_on_the_first_screen(site: Path, browser: Chromium) -> None:
    browser.show(1280, 900)
    browser.open(site / "index.html")
    ends = browser.run("[...document.querySelectorAll('article pre')].map((one) => one.getBoundingClientRect().bottom)")
    assert ends[1] < 900


def test_no_key_of_a_table_is_split(site: Path, browser: Chromium) -> None:
    browser.show(1280, 900)
    for name in ("cli", "config"):
        browser.open(site / "docs" / "reference" / f"{name}.html")
        keys = "[...document.querySelectorAll('td:nth-child(-n+2):not(:last-child) code')]"
        assert browser.run(f"{keys}.filter((one) => one.getClientRects().length > 1).length") == 0
        assert browser.run("document.documentElement.scrollWidth") == 1280


def test_search_works_from_a_folder(site: Path, browser: Chromium) -> None:
    browser.show(1200, 900)
    browser.open(site / "index.html")
    browser.run(
        "(() => { const field = document.querySelector('.md-search__input');"
        "document.querySelector('#__search').click(); field.dispatchEvent(new FocusEvent('focus'));"
        "field.value = 'mend'; field.dispatchEvent(new Event('keyup')); })()"
    )
    browser.wait("/matching documents/.test(document.querySelector('.md-search-result__meta').textContent)")
