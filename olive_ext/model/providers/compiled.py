"""What execution providers compile of graphs, kept on disk by content: a graph that is opened again with the same
weights, provider, options, versions and device is not compiled again. Knows no decoder.

    <root>/<key>/       of a graph: complete, it got this name when all was in it; else the files that a provider keeps
    <root>/.new-.../    what one session writes of a graph; nobody else reads it
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from olive_ext.config import EngineConfig
from olive_ext.errors import OliveExtError, first_line
from olive_ext.model.files.content import digest_of
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.resolution import build_facts
from olive_ext.model.providers.table import FOLDER, TABLE
from olive_ext.package_versions import installed
from olive_ext.records.files import cache_folder, make_own_folder, refuse_shared

logger = logging.getLogger(__name__)

Open = Callable[[bytes | Path, Sequence[Provider], Mapping[str, str]], Any]
"""Opens a graph on providers, with entries of the session's configuration."""

Files: TypeAlias = Mapping[Path, tuple[int, int]]
"""Size and time of files."""

LIMIT_BYTES = 50 << 30
"""The most bytes that are kept."""

NEW = ".new-"
_DAY_S = 86400
_GRAPH = "graph.onnx"
_CONTEXT = "ep.context_"
_WRITTEN = {"enable": "1", "embed_mode": "0", "model_external_initializers_file_name": "weights.bin"}
"""Whether in files beside the graph, which may itself have 2 GB at most."""

_CACHES = {row.name: row.compiled_cache for row in TABLE if row.compiled_cache is not None}


class Compiled:
    """What was compiled for the sessions of one engine, and what an earlier session had compiled."""

    def __init__(self, config: EngineConfig) -> None:
        folder = config.compiled_dir
        self._root = None if folder is False else Path(folder) if folder else cache_folder("compiled")
        self._config = config
        self._folders: list[tuple[Path, str, Files]] = []
        """Folders in which providers keep files, the pattern of these files, and the files that were there before."""

        self._new = self._kept = self._bytes = 0
        self._problem = ""

    def describe(self) -> Mapping[str, Any]:
        """Graphs or files that were compiled, those that an earlier session compiled, and bytes of the former; where
        something was compiled or found."""
        new, kept, num_bytes = self._new, self._kept, self._bytes
        for folder, pattern, first in self._folders:
            now = _files(folder, pattern)
            written = dict(now.items() - first.items())
            new, kept = new + len(written), kept + len(now) - len(written)
            num_bytes += sum(size for size, _ in written.values())
        if not new + kept + len(self._problem):
            return {}
        problem = {"compiled_problem": self._problem} if self._problem else {}
        return {"compiled_new": new, "compiled_kept": kept, "compiled_bytes": num_bytes, **problem}

    def opened(self, graph: bytes, weights: Iterable[Path], providers: Sequence[Provider], open_graph: Open) -> Any:
        """A session by `open_graph` for `graph`, whose external data is in `weights`. Raises what `open_graph` does."""
        keeper = next((provider for provider in providers if provider.name in _CACHES), None)
        if keeper is None or self._root is None:
            return open_graph(graph, providers, {})
        cache = _CACHES[keeper.name]
        is_kept_by_user = any(name in keeper.options for name in (*cache.options, *cache.user_options))
        if is_kept_by_user or any(name.startswith(_CONTEXT) for name in self._config.session_options):
            return open_graph(graph, providers, {})
        folder = self._root / key_of(graph, weights, facts_of(providers, self._config))
        try:
            refuse_shared(make_own_folder(self._root))
            keep_within(self._root)
            if cache.options:
                return self._with_files(folder, keeper, graph, providers, open_graph)
            with FileLock(f"{folder}.lock"):  # another process compiles the same once
                return self._with_context(folder, graph, providers, open_graph)
        except OSError as error:
            self._tell(f"nothing can be kept in '{self._root}': {first_line(error)}")
            return open_graph(graph, providers, {})

    def _with_context(self, folder: Path, graph: bytes, providers: Sequence[Provider], open_graph: Open) -> Any:
        """A session for what was compiled of the graph; else for the graph, whose compiled form is then kept."""
        if (folder / _GRAPH).is_file():
            try:
                session = open_graph(folder / _GRAPH, providers, {})
            except OliveExtError as error:
                self._tell(f"what was compiled cannot be opened and is compiled anew: {first_line(error)}")
                delete(folder)
            else:
                folder.touch()
                self._kept += 1
                return session
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=NEW, ignore_cleanup_errors=True) as scratch:
            written = make_own_folder(Path(scratch, "compiled"))
            entries = {_CONTEXT + name: value for name, value in _WRITTEN.items()}
            entries[f"{_CONTEXT}file_path"] = str(written / _GRAPH)
            try:
                session = open_graph(graph, providers, entries)
            except OliveExtError as error:
                session = open_graph(graph, providers, {})
                self._tell(f"what is compiled cannot be kept: {first_line(error)}")
                return session
            if (written / _GRAPH).is_file():  # else the provider takes no node of it
                self._new += 1
                self._bytes += sum(file.stat().st_size for file in written.iterdir())
                written.rename(folder)
        return session

    def _with_files(
        self, folder: Path, keeper: Provider, graph: bytes, providers: Sequence[Provider], open_graph: Open
    ) -> Any:
        """A session of a provider that keeps files by its own options, in the folder."""
        cache = _CACHES[keeper.name]
        options = {name: value.replace(FOLDER, str(folder)) for name, value in cache.options.items()}
        chosen = replace(keeper, options={**options, **keeper.options})
        chain = [chosen if link is keeper else link for link in providers]
        make_own_folder(folder).touch()
        first = _files(folder, cache.files)
        try:
            session = open_graph(graph, chain, {})
        except OliveExtError as error:
            if not first:
                raise
            delete(folder)
            make_own_folder(folder)
            first = {}
            session = open_graph(graph, chain, {})
            self._tell(f"what was compiled cannot be opened and is compiled anew: {first_line(error)}")
        self._folders.append((folder, cache.files, first))
        return session

    def _tell(self, problem: str) -> None:
        if not self._problem:
            logger.warning("%s", problem)
            self._problem = problem


def key_of(graph: bytes, weights: Iterable[Path], facts: Mapping[str, Any]) -> str:
    """Digest (32 hex digits) of all that decides what is compiled: the graph, its weights by content, and `facts`."""
    parts: list[tuple[str, Path | bytes]] = [("facts", json.dumps(facts).encode()), ("graph", graph)]
    return digest_of([*parts, *((f"weights {index}", path) for index, path in enumerate(weights))])


def facts_of(providers: Sequence[Provider], config: EngineConfig) -> Mapping[str, Any]:
    """Providers with their options, versions and devices, and ONNX Runtime's own options."""
    names = [provider.name for provider in providers]
    libraries = {name: installed(name) for one in names if one in _CACHES for name in _CACHES[one].libraries}
    return {
        "libraries": libraries,
        "machine": [platform.system(), platform.machine()],
        **build_facts(names),
        "providers": [(provider.name, sorted(provider.options.items())) for provider in providers],
        "options": sorted(config.session_options.items()),
    }


def keep_within(root: Path, limit: int = LIMIT_BYTES) -> None:
    """Deletes what was used least recently until `limit` bytes are left, and what dead sessions left a day ago."""
    entries: list[tuple[float, Path]] = []
    for path in root.iterdir():
        with suppress(FileNotFoundError):
            entries += [(path.stat().st_mtime, path)] if path.is_dir() else []
    entries.sort()
    sizes = {path: sum(size for size, _ in _files(path).values()) for _, path in entries}
    total, left = sum(sizes.values()), time.time() - _DAY_S
    for used, path in entries:
        is_new = path.name.startswith(NEW)
        if (is_new and used < left) or (not is_new and total > limit):
            with suppress(FileNotFoundError):  # another process deleted it
                delete(path)
            total -= sizes[path]


def delete(folder: Path) -> None:
    """Deletes a folder so that nobody finds it half deleted under its name."""
    gone = folder.with_name(f"{NEW}{os.getpid()}-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _files(folder: Path, pattern: str = "*") -> Files:
    files: dict[Path, tuple[int, int]] = {}
    for path in folder.rglob(pattern):
        with suppress(FileNotFoundError):
            if path.is_file():
                stat = path.stat()
                files[path] = stat.st_size, stat.st_mtime_ns
    return files
