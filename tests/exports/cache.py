"""A folder of things made once and kept between test runs, and how they are made: in processes of their own."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """`.cache/exports` in the checkout, or $OLIVE_EXT_TEST_CACHE. Can be deleted at any time."""
    root = os.environ.get("OLIVE_EXT_TEST_CACHE")
    return Path(root) if root else ROOT / ".cache" / "exports"


def once(name: str, recipe: object, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` fills on first use.

    `recipe` is everything the content depends on, as JSON: with another recipe it is made anew. An interrupted or
    failed make leaves nothing, and of several processes that want the same one makes it.
    """
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _fill(folder, make)
    return folder


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    work = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        make(work)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@functools.cache
def packages(*requirements: str) -> Path:
    """A folder for PYTHONPATH with these releases and not their dependencies, beside what is installed.

    Skips the test where they cannot be had: no package index, or no wheel for this Python.
    """
    reason = _try_packages(requirements)
    if isinstance(reason, str):
        pytest.skip(f"{', '.join(requirements)} cannot be installed here: {reason}")
    return reason


@functools.cache
def _try_packages(requirements: tuple[str, ...]) -> Path | str:
    """The folder, or why there is none; asked once a process, because an index out of reach costs minutes."""

    def install(folder: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder))
        done = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
            raise _CannotInstall(lines[-1])

    name = re.sub(r"[^\w.]+", "-", requirements[0])
    try:
        return once(f"pip-{name}", [requirements, sys.version_info[:2]], install)
    except _CannotInstall as error:
        return str(error)


class _CannotInstall(Exception):
    pass


def run_python(arguments: Sequence[str | Path], *, path: Sequence[Path] = ()) -> None:
    """Run `python ARGUMENTS`, which begin with -m, from the checkout's root, offline, the folders of `path` before what
    is installed."""
    words = [str(argument) for argument in arguments]
    status, said = _forked({"arguments": words}, tuple(map(str, path)))
    if status:
        raise RuntimeError(f"python {' '.join(words)} ended with {status}:\n{said[-3000:]}")


def run_forked(arguments: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python ARGUMENTS`, which begin with -m, here and in this environment: in a fork of a
    process that has imported what exporters do."""
    place = {"folder": str(Path.cwd()), "environment": {**os.environ}}
    status, said = _forked({"arguments": [*arguments], **place}, ())
    return subprocess.CompletedProcess(arguments, status, said, said)


def _forked(request: dict[str, object], path: tuple[str, ...]) -> tuple[int, str]:
    """The exit status, and what was printed."""
    is_other_base = any(Path(folder, "transformers").is_dir() for folder in path)
    maker = _maker(path if is_other_base else ())
    request = {**request, "path": () if is_other_base else path, "imported": EXPORTERS}
    assert maker.stdin is not None
    assert maker.stdout is not None
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        maker.stdin.write(json.dumps({**request, "log": str(log)}) + "\n")
        maker.stdin.flush()
        status = int(maker.stdout.readline())
        return status, log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


IMPORTED = ("torch", "onnxruntime", "onnxscript", "tests.exports", "transformers.models.llama.modeling_llama")
"""What exporters import, and with it what every model of transformers imports."""

EXPORTERS = ("onnxruntime_genai.models.builders", "mobius")
"""What is imported for each path."""


@functools.cache
def _maker(path: tuple[str, ...]) -> subprocess.Popen[str]:
    """The process that runs Python with these folders before what is installed; it ends with this one."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONWARNINGS="ignore")
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT)])
    environment.setdefault("OMP_NUM_THREADS", "2")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.export_maker", *IMPORTED],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def source_of(*files: str) -> str:
    """A digest of these files beside this one: part of a recipe whose maker they are."""
    texts = [(Path(__file__).parent / file).read_bytes() for file in files]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()
