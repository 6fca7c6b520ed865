from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from olive_ext.config import EngineConfig
from olive_ext.errors import ProviderError
from olive_ext.model.providers.compiled import Compiled, facts_of, keep_within, key_of
from olive_ext.model.providers.devices import Provider
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.table import CPU, FOLDER, TABLE
from tests.model.tiny import graph
from tests.refusals import tells

GRAPH = b"a graph"
QNN = (Provider("QNNExecutionProvider", "cpu", {"backend_path": "x"}), Provider(CPU, "cpu"))
TENSORRT = (Provider("TensorrtExecutionProvider", "cuda"), Provider(CPU, "cpu"))
BY_FILES = [row for row in TABLE if row.compiled_cache is not None and row.compiled_cache.options]


class Compiler:
    """Stands for ONNX Runtime with a provider that compiles: writes EP context, or files in its options' folder."""

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = fails
        self.compiled = 0
        self.asked: list[Mapping[str, str]] = []

    def __call__(self, graph: bytes | Path, providers: Sequence[Provider], entries: Mapping[str, str]) -> Any:
        self.asked.append(providers[0].options)
        if isinstance(graph, Path):
            if graph.read_bytes() != b"compiled":
                raise ProviderError("this is no EP context")
            return SimpleNamespace()
        target = entries.get("ep.context_file_path")
        if target is not None:
            Path(target).write_bytes(b"compiled"[: 3 if "writing" in self.fails else None])
        if "writing" in self.fails and target is not None:
            raise ProviderError("the disk is full")
        folder = next((Path(value) for value in providers[0].options.values() if Path(value).is_dir()), None)
        if folder is not None and (file := folder / "graph_0.engine").is_file():
            if file.read_bytes() != b"engine":
                raise ProviderError("this is no engine")
            return SimpleNamespace(folder=folder)
        self.compiled += 1
        if folder is not None:
            (folder / "graph_0.engine").write_bytes(b"engine")
        return SimpleNamespace(folder=folder)


def run(root: Path | bool, providers: Sequence[Provider], compiler: Compiler, **config: Any) -> dict[str, Any]:
    """The counters of an engine that opens one graph."""
    compiled = Compiled(EngineConfig(compiled_dir=str(root) if root else False, **config))
    compiled.opened(GRAPH, [], providers, compiler)
    return dict(compiled.describe())


def counts(found: Mapping[str, Any]) -> tuple[int, int]:
    return found["compiled_new"], found["compiled_kept"]


@pytest.mark.parametrize("providers", [QNN, TENSORRT], ids=["context", "files"])
def test_second_run_compiles_nothing_but_what_cannot_be_opened(tmp_path: Path, providers: Sequence[Provider]) -> None:
    compiler = Compiler()
    assert counts(run(tmp_path, providers, compiler)) == (1, 0)
    assert counts(run(tmp_path, providers, compiler)) == (0, 1)
    assert compiler.compiled == 1
    assert not list(tmp_path.glob(".new-*"))
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock")
    kept.write_bytes(b"half")
    found = run(tmp_path, providers, compiler)
    assert counts(found) == (1, 0)
    assert "compiled anew: this is no" in found["compiled_problem"]
    assert counts(run(tmp_path, providers, compiler)) == (0, 1)


def test_two_at_once_compile_once(tmp_path: Path) -> None:
    compiler, both = Compiler(), Barrier(2)

    def slow(graph: bytes | Path, providers: Sequence[Provider], entries: Mapping[str, str]) -> Any:
        sleep(0.1)  # in which the other one would begin, too
        return compiler(graph, providers, entries)

    def engine(_: int) -> tuple[int, int]:
        compiled = Compiled(EngineConfig(compiled_dir=str(tmp_path)))
        both.wait(10)
        compiled.opened(GRAPH, [], QNN, slow)
        return counts(compiled.describe())

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(engine, range(2))) == [(0, 1), (1, 0)]
    assert compiler.compiled == 1


def test_half_written_context_is_not_kept(tmp_path: Path) -> None:
    compiler = Compiler(fails=["writing"])
    found = run(tmp_path, QNN, compiler)
    assert "disk is full" in found["compiled_problem"]
    assert compiler.compiled == 1  # opened without keeping
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert counts(run(tmp_path, QNN, Compiler())) == (1, 0)


def test_files_that_a_session_writes_are_kept_and_counted(tmp_path: Path) -> None:
    compiled = Compiled(EngineConfig(compiled_dir=str(tmp_path)))
    session = compiled.opened(GRAPH, [], TENSORRT, Compiler())
    (session.folder / "graph_1.engine").write_bytes(b"engine")
    (session.folder / "graph_1.profile").write_bytes(b"no engine")
    assert counts(compiled.describe()) == (2, 0)
    assert counts(run(tmp_path, TENSORRT, Compiler())) == (0, 2)


@pytest.mark.parametrize("row", BY_FILES, ids=lambda row: row.short)
def test_options_name_one_folder_and_a_user_s_own_stay(tmp_path: Path, row: Any) -> None:
    compiler = Compiler()
    run(tmp_path, (Provider(row.name, row.device),), compiler)
    (given,) = compiler.asked
    assert given.keys() == row.compiled_cache.options.keys()
    folders = {given[name] for name, value in row.compiled_cache.options.items() if value == FOLDER}
    assert [Path(folder).parent for folder in folders] == [tmp_path]
    own = {next(iter(row.compiled_cache.options)): "0"}
    assert run(tmp_path, (Provider(row.name, row.device, own),), compiler) == {}
    assert compiler.asked[1] == own


def test_users_who_keep_it_themselves_or_do_not_want_it_are_left_alone(tmp_path: Path) -> None:
    compiler = Compiler()
    openvino = (Provider("OpenVINOExecutionProvider", "cpu", {"cache_dir": "mine"}),)
    assert run(tmp_path, openvino, compiler) == {}
    assert run(tmp_path, QNN, compiler, session_options={"ep.context_enable": "1"}) == {}
    assert run(False, QNN, compiler) == {}
    compiled = Compiled(EngineConfig(compiled_dir=str(tmp_path)))
    open_session(graph().SerializeToString(), (Provider(CPU, "cpu"),), compiled=compiled)
    assert compiled.describe() == {}, "it compiles nothing"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="modes of folders")
def test_a_folder_that_cannot_be_made_or_that_others_may_write_into_is_told_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "open").mkdir(mode=0o700)
    assert run(tmp_path / "open", QNN, Compiler())["compiled_new"] == 1
    (tmp_path / "open").chmod(0o777)
    for name, reason in (("file", ""), ("open", "(chmod go-w)")):
        compiler = Compiler()
        told = run(tmp_path / name, QNN, compiler)
        assert tells(told["compiled_problem"], f"'{tmp_path / name}' {reason}")
        assert compiler.compiled == 1
    assert (counts(told), told["compiled_bytes"]) == ((0, 0), 0)


def test_key_changes_with_all_that_decides_what_is_compiled(tmp_path: Path) -> None:
    weight = tmp_path / "weights"
    weight.write_bytes(b"1")
    config, other = EngineConfig(), (replace(QNN[0], options={"backend_path": "y"}), QNN[1])
    facts = facts_of(QNN, config)
    all_facts = [
        *(facts, {**facts, "onnxruntime": "0"}, facts_of(other, config), facts_of(TENSORRT, config)),
        facts_of(QNN, EngineConfig(session_options={"session.x": "1"})),
    ]
    keys = [key_of(b"another", [weight], facts), *(key_of(GRAPH, [weight], one) for one in all_facts)]
    assert key_of(GRAPH, [weight], facts_of(QNN, EngineConfig(chunk_size=7))) == keys[1]
    weight.write_bytes(b"2")
    assert len({*keys, key_of(GRAPH, [weight], facts)}) == len(keys) + 1


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "middle", "old"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / ".new-dead").mkdir()
    os.utime(tmp_path / ".new-dead", (1e9, 1e9))
    (tmp_path / ".new-alive").mkdir()
    keep_within(tmp_path, limit=20)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "middle", ".new-alive"}
