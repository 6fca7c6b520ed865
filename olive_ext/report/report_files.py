"""Reports on disk, each file replaced as a whole or not at all. Knows no form but by the functions that make it."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from olive_ext.errors import ConfigError, RunError, special_kind
from olive_ext.report.html.render import render, to_html
from olive_ext.report.page import Page
from olive_ext.report.plain_text import ChainStep, chain_table, markdown_page, to_eval_results, to_markdown
from olive_ext.report.report import Report, to_json

logger = logging.getLogger(__name__)
_PROBE_BYTES = 1 << 16
_NUMBERED = re.compile(r"(?:report|eval_results)(?:-(\d+))?\.(?:json|md|html|yaml)")


def report_number(path: Path) -> int | None:
    """The number that the pass of a workflow has given a report's file, 1 where the name has none; None for a file that
    is called otherwise than `write` calls them."""
    match = _NUMBERED.fullmatch(path.name)
    return None if match is None else int(match[1] or 1)


def write(report: Report, directory: str | Path, to_html: Callable[[Report], str] = to_html) -> tuple[Path, ...]:
    """Writes report.json, report.md, report.html and, of tasks on the Hugging Face Hub, eval_results.yaml into
    `directory`, made where missing; returns their paths.

    Each file is written under another name in the folder and renamed, so that a reader never sees half a file. Raises
    `RunError` where the disk refuses; the files of an earlier report then stay as they were. A page that cannot be made
    is left out with a warning: the numbers may have taken hours. An earlier file that is not written anew is removed.
    """
    directory = Path(directory)
    page, scores = directory / "report.html", directory / "eval_results.yaml"
    texts = {directory / "report.json": to_json(report), directory / "report.md": to_markdown(report)}
    try:
        texts[page] = to_html(report)
    except Exception as error:  # noqa: BLE001 - whatever a template throws
        logger.warning("no report.html: %s: %s", type(error).__name__, error)
    if scored := to_eval_results(report):
        texts[scores] = scored
    write_texts(texts, directory)
    for path in {page, scores} - texts.keys():
        path.unlink(missing_ok=True)
    return tuple(texts)


def page_of_report(report: Report) -> Path | None:
    """The page of a report that was written into its `output_dir`; None without one."""
    page = Path(str(report.config.get("output_dir") or "")) / "report.html"
    return page if report.config.get("output_dir") and page.is_file() else None


def write_page(page: Page, directory: str | Path) -> Path:
    """Writes compare.html as `write` does; returns its path."""
    path = Path(directory) / "compare.html"
    write_texts({path: render(page)}, path.parent)
    return path


def write_chain(steps: Sequence[ChainStep], directory: str | Path) -> tuple[Path, ...]:
    """Writes chain.json, {"steps": [{"name": ..., "values": {column: number}, "documents": {column: text}}]}, and
    chain.md as `write` does."""
    directory = Path(directory)
    page = markdown_page((), chain_table(steps))
    texts = {directory / "chain.json": to_json({"steps": steps}), directory / "chain.md": page}
    write_texts(texts, directory)
    return tuple(texts)


def check_writable(directory: str | Path, setting: str = "output_dir") -> None:
    """Raises `ConfigError` where `write` could not make or fill `directory`: it writes a small file to the nearest
    folder that exists, and removes it."""
    path = Path(directory).absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists() or folder.is_symlink())
    if not nearest.exists():
        raise ConfigError(f"'{nearest}' is a link to '{nearest.readlink()}', which does not exist", setting, directory)
    if not nearest.is_dir():
        raise ConfigError(f"'{nearest}' is not a folder", setting, directory, code="no_access")
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".olive_ext.") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"cannot write in '{nearest}': {error.strerror or error}"
        raise ConfigError(problem, setting, directory, code="no_access") from error


def refuse_filled(folder: Path, setting: str = "output_dir") -> None:
    """Raises `ConfigError` for a folder that is there and not empty, or that cannot be made or filled."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("is there already: give a folder that is new or empty", setting, folder, code="exists")
    check_writable(folder, setting)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill within the block, which then becomes `folder`: all of it or nothing. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as scratch:
        made = Path(scratch, folder.name)
        made.mkdir()
        yield made
        take_place(made, folder)


def take_place(made: Path, folder: Path) -> None:
    """Moves a complete folder to its place, where there may be at most an empty one."""
    if folder.is_dir():
        folder.rmdir()  # only POSIX renames over an empty folder
    made.replace(folder)


def write_texts(texts: Mapping[Path, str], directory: Path, what: str = "the report") -> None:
    """Writes files into `directory`, made where missing, every one in full before the first is renamed.

    Half a surrogate pair, which UTF-8 cannot hold, becomes its escape, which JSON reads back. Raises `RunError`, which
    names `what`, where the disk refuses, and where a file is a device or a pipe, which a rename would replace.
    """
    if special := next(((path, kind) for path in texts if (kind := special_kind(path))), None):
        raise RunError(f"cannot write {what} to '{special[0]}': it is {special[1]}, give a file", code="no_access")
    temporary = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}") for path in texts}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with temporary[path].open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for path, written in temporary.items():
            written.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {what} to '{directory}': {error.strerror or error}", code="no_access") from error
    finally:
        with suppress(OSError):
            for written in temporary.values():
                written.unlink(missing_ok=True)
