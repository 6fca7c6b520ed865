"""What is read of ONNX Runtime's profiles, and what the benchmark's script says of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docs.benchmarks.ort_profile import large_copies, read_runs

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
HIDDEN, IDS, MASK = {"float16": [1, 150, 2048]}, {"int64": [1, 150]}, {"int64": [64, 1000]}
Entry = dict[str, list[int]]


def run(at: int) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ts": at, "dur": 90, "args": {}}


def node(at: int, op: str, provider: str, into: list[Entry], out: list[Entry], micros: int = 10) -> dict[str, Any]:
    args = {"op_name": op, "provider": provider, "input_type_shape": into, "output_type_shape": out}
    return {"cat": "Node", "name": f"n_{op}_kernel_time", "ts": at, "dur": micros, "args": args}


def step(at: int, *, copies: list[Entry], rows: int = 1, tokens: int = 150) -> list[dict[str, Any]]:
    """A run with a sum on the host, an attention and copies to the host."""
    attention = node(at + 2, "GroupQueryAttention", CUDA, [{"float16": [rows, tokens, 2048]}], [HIDDEN], 40)
    copied = [node(at + 3, "MemcpyToHost", CUDA, [entry], [entry]) for entry in copies]
    return [attention, *copied, node(at + 1, "ReduceSum", CPU, [IDS], [{"int64": [1]}]), run(at)]


def written(folder: Path, *steps: list[dict[str, Any]]) -> Path:
    file = folder / "profile.json"
    file.write_text(json.dumps([event for events in reversed(steps) for event in events]))
    return file


def test_log_probabilities_and_masks_may_cross_and_states_may_not(tmp_path: Path) -> None:
    small = step(0, copies=[IDS, MASK, {"float": [640]}])
    assert large_copies(read_runs(written(tmp_path, small))) == []
    large = step(100, copies=[HIDDEN, HIDDEN, {"float": [1, 2048]}])
    expected = ["MemcpyToHost float16[1, 150, 2048]", "MemcpyToHost float[1, 2048]"]
    assert large_copies(read_runs(written(tmp_path, small, large))) == expected


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import host_device_copies

    return host_device_copies


@pytest.mark.parametrize(
    ("copies", "kv_cache", "host_bytes", "problem"),
    [
        ([IDS], "in_place", 96, None),
        ([HIDDEN], "in_place", 96, "float16[1, 150, 2048] crosses"),
        ([], "returned", 96, "not written in place but returned"),
        ([], "in_place", 5000, "5000 bytes are read on the host, where 100 are wanted"),
    ],
)
def test_script_has_a_problem_where_something_large_crosses(
    script: ModuleType,
    tmp_path: Path,
    copies: list[Entry],
    kv_cache: str,
    host_bytes: int,
    problem: str | None,
) -> None:
    written(tmp_path, step(0, copies=[]), step(100, copies=copies))
    phases = {"scoring": {"begin": 0, "end": 1, "host_bytes": host_bytes}}
    facts = {"kv_cache": kv_cache, "counters": {"steps": 1}}
    found = script._summary(tmp_path, phases, facts, allowed=100)
    assert found["profiles"]["profile.json"]["scoring"][0]["steps"] == 1
    assert len(found["profiles"]["profile.json"]["scoring"][0]["copies"]) == len(copies)
    assert [problem in said for said in found["problems"]] == ([True] if problem else [])
