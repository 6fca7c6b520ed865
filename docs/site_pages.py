"""The hook of docs/mkdocs.yml: which files make the site, and what is made for it. Needs `pip install -e '.[docs]'`.

MkDocs takes one folder of pages. Ours lie in three places of the repository and link to each other there, so symbolic
links to them stand in a temporary folder. JSON schemas are made for the site and are not committed.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from olive_ext.config import SCHEMA_KINDS, schema  # noqa: E402

SOURCES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "recipes")
PUBLISHED = re.compile(r".*\.(md|png)|recipes/[^/]+/[^/]+\.(json|yml)")
TABLES = ".md-typeset table:not([class]) td:nth-child(-n+2):not(:last-child) code { white-space: nowrap; }\n"
"""A key in a table is one word."""

WORKER = """
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.hidden = true;
    const inside = frame.contentWindow;
    const load = (src) => new Promise((done, failed) => {
      const script = inside.document.createElement("script");
      Object.assign(script, { src, onload: done, onerror: failed });
      inside.document.head.append(script);
    });
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
    this.inside = inside;
    this.ready = load(new URL(url, location).href);
  }
  postMessage(data) { this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data }))); }
  terminate() { this.inside.frameElement.remove(); }
};
"""
"""Browsers start no worker from a file: search runs in a hidden frame there."""

_folder = tempfile.TemporaryDirectory()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the folder of pages, and puts each folder's pages into the navigation in place of its name."""
    for name in SOURCES:
        link = Path(_folder.name, name)
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    config.docs_dir = _folder.name
    config.nav = _expanded(config.nav or [], set(_pages_named(config.nav)))
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Leaves out the scripts and data that lie beside the pages, and adds what is made for the site."""
    for file in [*files]:
        if not PUBLISHED.fullmatch(file.src_uri) and not file.src_uri.startswith("assets/"):
            files.remove(file)
    for kind in SCHEMA_KINDS:
        text = json.dumps(schema(kind), indent=2, ensure_ascii=False)
        files.append(File.generated(config, f"docs/reference/schema-{kind}.json", content=text))
    files.append(File.generated(config, "docs/reference/modules.md", content=_modules()))
    files.append(File.generated(config, "assets/tables.css", content=TABLES))
    files.append(File.generated(config, "assets/iframe-worker.js", content=WORKER))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes the mark after a block's language away, which tests read and MkDocs does not know."""
    return re.sub(r"^(```\w+) \w+$", r"\1", markdown, flags=re.M)


def _modules() -> str:
    """A page with the first sentence of each module's docstring, by room."""
    package, lines = ROOT / "olive_ext", ["# Modules", "The first lines of the modules' docstrings, room by room."]
    for init in sorted(package.rglob("__init__.py")):
        room = ".".join(init.parent.relative_to(ROOT).parts)
        rows = [f"| `{path.stem}` | {_summary(path)} |" for path in sorted(init.parent.glob("*.py")) if path != init]
        table = "\n".join(["| module | |", "|---|---|", *rows]) if rows else ""
        lines += [f"## {room}", _summary(init), table]
    return "\n\n".join(lines)


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def _pages_named(nav: Any) -> list[str]:
    """The pages that the navigation names one by one."""
    if isinstance(nav, str):
        return [] if nav.endswith("/") else [nav]
    parts = nav.values() if isinstance(nav, dict) else nav or []
    return [name for part in parts for name in _pages_named(part)]


def _expanded(nav: list[Any], named: set[str]) -> list[Any]:
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            entries += _pages_of(entry, named) if entry.endswith("/") else [entry]
            continue
        ((title, value),) = entry.items()
        value = [value] if isinstance(value, str) and value.endswith("/") else value
        entries.append({title: _expanded(value, named) if isinstance(value, list) else value})
    return entries


def _pages_of(folder: str, named: set[str]) -> list[str]:
    pages = sorted((ROOT / folder).rglob("*.md"), key=lambda page: (page.parent, page.name != "README.md", page.name))
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    return [name for name in names if name not in named]
