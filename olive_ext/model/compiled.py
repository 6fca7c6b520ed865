"""What execution providers compile of graphs, kept on disk by content: a graph that is opened again with the same
weights, provider, options, versions and device is not compiled again. Knows no decoder.

    <root>/<key>/       complete: it got this name when all was in it
    <root>/.new-.../    what one session writes, or its own copy of a provider's files; nobody else reads it
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from olive_ext.config import EngineConfig
from olive_ext.errors import OliveExtError, first_line
from olive_ext.model.compiled_files import NEW, ProviderFiles, delete, keep_within
from olive_ext.model.content import digest_of
from olive_ext.model.provider_table import FOLDER, TABLE
from olive_ext.model.providers import build_facts
from olive_ext.model.types import Provider
from olive_ext.records.cache_folder import cache_folder, make_own_folder, refuse_shared

logger = logging.getLogger(__name__)

Open = Callable[[bytes | Path, Sequence[Provider], Mapping[str, str]], Any]
"""Opens a graph on providers, with entries of the session's configuration."""

_GRAPH = "graph.onnx"
_CONTEXT = "ep.context_"
_WRITTEN = {"enable": "1", "embed_mode": "0", "model_external_initializers_file_name": "weights.bin"}
"""In files beside the graph, which may have 2 GB at most."""

_KEEPING = {row.name: row.keeping for row in TABLE if row.keeping is not None}


class Compiled:
    """What was compiled for the sessions of one engine, and what was found compiled."""

    def __init__(self, config: EngineConfig) -> None:
        given = config.compiled_dir
        self._root = None if given is False else Path(given) if given else cache_folder("compiled")
        self._config = config
        self._files: list[ProviderFiles] = []
        self._new = self._kept = self._bytes = 0
        self._problem = ""

    @property
    def new(self) -> int:
        """Graphs, or files of a provider that keeps these by its own options, that were compiled."""
        return self._new + sum(len(files.new()) for files in self._files)

    @property
    def kept(self) -> int:
        """Those that were compiled by an earlier session, and used."""
        return self._kept + sum(files.num_kept() for files in self._files)

    def describe(self) -> Mapping[str, Any]:
        """Counters, where something was compiled or found."""
        if not self.new + self.kept + len(self._problem):
            return {}
        num_bytes = self._bytes + sum(sum(files.new().values()) for files in self._files)
        told = {"compiled_problem": self._problem} if self._problem else {}
        return {"compiled_new": self.new, "compiled_kept": self.kept, "compiled_bytes": num_bytes, **told}

    def opened(self, graph: bytes, weights: Iterable[Path], providers: Sequence[Provider], open_graph: Open) -> Any:
        """A session by `open_graph` for `graph`, whose external data is in `weights`. Raises what `open_graph` does."""
        keeper = next((provider for provider in providers if provider.name in _KEEPING), None)
        if keeper is None or self._root is None or self._is_kept_by_user(keeper):
            return open_graph(graph, providers, {})
        place = self._root / key_of(graph, weights, facts_of(providers, self._config))
        try:
            refuse_shared(make_own_folder(self._root))
            if _KEEPING[keeper.name].options:
                return self._with_files(place, keeper, graph, providers, open_graph)
            with FileLock(f"{place}.lock"):  # another process compiles the same once
                return self._with_context(place, graph, providers, open_graph)
        except OSError as error:
            self._tell(f"nothing can be kept in '{self._root}': {first_line(error)}")
            return open_graph(graph, providers, {})

    def put_away(self) -> None:
        """Keeps the files that providers have written so far."""
        try:
            for files in self._files:
                files.put_away()
            if self._files:
                keep_within(self._files[0].place.parent)
        except OSError as error:
            self._tell(f"nothing can be kept in '{self._root}': {first_line(error)}")

    def close(self) -> None:
        """Keeps what was written, and deletes the session's copies. The sessions are not used any more."""
        self.put_away()
        for files in self._files:
            files.close()

    @contextmanager
    def bucket(self, shape: str) -> Iterator[None]:
        """Logs the seconds and the bytes of running a shape bucket for the first time, and what was compiled for it."""
        process, begin = psutil.Process(), time.perf_counter()
        memory, new, kept = process.memory_info().rss, self.new, self.kept
        yield
        seconds, grown = time.perf_counter() - begin, process.memory_info().rss - memory
        counts = self.new - new, self.kept - kept
        self.put_away()
        line = "shape bucket %s: %.3f s, %+d bytes of memory, %d compiled, %d found compiled"
        logger.info(line, shape, seconds, grown, *counts)

    def _is_kept_by_user(self, keeper: Provider) -> bool:
        keeping = _KEEPING[keeper.name]
        return any(name in keeper.options for name in (*keeping.options, *keeping.own)) or any(
            name.startswith(_CONTEXT) for name in self._config.session_options
        )

    def _with_context(self, place: Path, graph: bytes, providers: Sequence[Provider], open_graph: Open) -> Any:
        """A session for what was compiled of the graph, or for the graph, whose compiled form is then put away."""
        if (place / _GRAPH).is_file():
            try:
                session = open_graph(place / _GRAPH, providers, {})
            except OliveExtError as error:
                self._tell(f"what was compiled cannot be opened and is compiled anew: {first_line(error)}")
                delete(place)
            else:
                place.touch()
                self._kept += 1
                return session
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=NEW, ignore_cleanup_errors=True) as scratch:
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
                written.rename(place)
        keep_within(place.parent)
        return session

    def _with_files(
        self, place: Path, keeper: Provider, graph: bytes, providers: Sequence[Provider], open_graph: Open
    ) -> Any:
        """A session of a provider that keeps files, in a folder with a copy of what is there of them."""

        def attempt() -> Any:
            files = ProviderFiles(place, _KEEPING[keeper.name].files)
            options = {name: value.replace(FOLDER, str(files.folder)) for name, value in given.items()}
            chosen = replace(keeper, options={**options, **keeper.options})
            try:
                session = open_graph(graph, [chosen if one is keeper else one for one in providers], {})
            except OliveExtError:
                files.close()
                raise
            self._files.append(files)
            return session

        given = _KEEPING[keeper.name].options
        try:
            return attempt()
        except OliveExtError as error:
            if not place.is_dir():
                raise
            delete(place)
            session = attempt()
            self._tell(f"what was compiled cannot be opened and is compiled anew: {first_line(error)}")
            return session

    def _tell(self, problem: str) -> None:
        if not self._problem:
            logger.warning("%s", problem)
            self._problem = problem


def key_of(graph: bytes, weights: Iterable[Path], facts: Mapping[str, Any]) -> str:
    """Digest (32 hex digits) of all that decides what is compiled: the graph, its weights by content, and `facts`."""
    parts: list[tuple[str, Path | bytes]] = [("facts", json.dumps(facts).encode()), ("graph", graph)]
    return digest_of([*parts, *((f"weights {place}", path) for place, path in enumerate(weights))])


def facts_of(providers: Sequence[Provider], config: EngineConfig) -> Mapping[str, Any]:
    """Providers with their options, versions and devices, and ONNX Runtime's own options."""
    names = [provider.name for provider in providers]
    libraries = {name: _version(name) for one in names if one in _KEEPING for name in _KEEPING[one].libraries}
    return {
        "libraries": libraries,
        "machine": [platform.system(), platform.machine()],
        **build_facts(names),
        "providers": [(provider.name, sorted(provider.options.items())) for provider in providers],
        "options": sorted(config.session_options.items()),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
