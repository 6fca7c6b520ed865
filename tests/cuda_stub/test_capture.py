"""Captured steps over a paged cache as far as they show without a GPU: what a replay launches and what crosses."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine, open_engine, open_runner
from olive_ext.engine.forms import packed
from olive_ext.engine.forms.packed import PLAIN_RUNS
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.runners import trials
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import LogitsRow, Row, Step
from olive_ext.errors import ConfigError
from olive_ext.model import resolve
from tests.cuda_stub.counts import counts
from tests.cuda_stub.test_cuda import LLAMA, MODELS
from tests.exports import VOCAB, export
from tests.refusals import refused

pytestmark = pytest.mark.cuda_stub

UNHEARD = trials.disagreement
"""As it is where this module is imported: before its verdict is left unheard."""


def _settings(name: str = LLAMA, **engine: Any) -> ModelSettings:
    given = {"num_slots": 5, "graph_capture": "auto", **engine}
    return ModelSettings(model=str(export(name).path), execution_provider="cuda", engine=given)


def _decode(runner: Runner, rows: int, past: int, read: int | None = None) -> None:
    reads = tuple(LogitsRow(row, 0) for row in range(rows if read is None else read))
    assert len(runner.run(Step(tuple(Row(row, past, (7 + past,)) for row in range(rows)), reads)).greedy_ids) == len(
        reads
    )


@pytest.mark.parametrize("name", [name for name in MODELS if "kvfp8" not in name])
def test_replay_is_one_launch_and_sends_three_inputs(name: str) -> None:
    """Tokens, positions (where the graph takes them) and lengths go in, one array of greedy tokens comes out."""
    runner, _ = open_runner(resolve(_settings(name)))
    runner.reserve(64)
    runner.run(Step(tuple(Row(row, 0, (4, 5, 6)) for row in range(5))))
    before = runner.describe()["steps_replayed"]
    for past in range(3, 4 + PLAIN_RUNS):
        _decode(runner, 5, past)
    counts()
    _decode(runner, 5, 4 + PLAIN_RUNS)
    found, facts = counts(), runner.describe()
    runner.close()
    assert facts["steps_replayed"] - before == 2
    assert found.wrong_copies == 0
    assert found.launches == 1
    assert found.copies_to_device <= 3
    assert found.bytes_to_device <= 8 * (8 + 8 + 4)
    assert (found.copies_to_host, found.bytes_to_host) == (1, 8 * 8)  # of the bucket's eight rows


def test_steps_of_up_to_64_rows_are_captured_by_default() -> None:
    """More gain nothing. Products that keep int4 weights packed, which cost scoring a third, are not asked for."""
    model = resolve(ModelSettings(model=str(export(LLAMA).path), execution_provider="cuda", engine={"num_slots": 80}))
    assert "ep.cuda.fpa_intb_gemm" not in model.settings.engine.session_options
    runner, _ = open_runner(model)
    runner.reserve(64)
    replayed = [runner.describe()["steps_replayed"]]
    for rows in (64, 65):
        for past in range(2 + PLAIN_RUNS):
            _decode(runner, rows, past)
        replayed.append(runner.describe()["steps_replayed"])
    runner.close()
    assert [more - less for less, more in pairwise(replayed)] == [2, 0]


def _run(engine: Engine, longest: int) -> None:
    rng = random.Random(longest)
    texts = [tuple(rng.randrange(4, VOCAB) for _ in range(rng.randint(longest // 2, longest))) for _ in range(12)]
    engine.run([Request(text, 0, Generation(rng.randint(3, 30))) for text in texts])


def test_longer_requests_capture_anew() -> None:
    """Slots move where requests grow: steps that were captured for the old ones are forgotten."""
    engine = open_engine(resolve(_settings(num_slots=8)))
    replayed = [engine.describe()["steps_replayed"]]
    for longest in (20, 300, 40):
        _run(engine, longest)
        replayed.append(engine.describe()["steps_replayed"])
    engine.release_memory()
    assert engine.describe()["steps_captured"] == 0
    _run(engine, 20)
    replayed.append(engine.describe()["steps_replayed"])
    engine.close()
    assert all(more - less > 5 for less, more in pairwise(replayed)), replayed


def test_trial_refuses_kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are equal in all steps prove no replay: "auto" says so and runs plainly, true is an error."""
    monkeypatch.setattr(packed, "check_packed_steps", lambda *_: None)
    monkeypatch.setattr(packed, "disagreement", UNHEARD)
    with olive_ext.open(export(LLAMA).path, execution_provider="cuda", engine={"graph_capture": "auto"}) as session:
        facts = session.describe_execution()
    assert facts["batching"] == "packed"
    assert "steps_captured" not in facts
    assert any("steps are not captured: replays" in note for note in facts["notes"]), facts["notes"]
    with refused(ConfigError, "wrong_value", "engine.graph_capture"):
        olive_ext.open(export(LLAMA).path, execution_provider="cuda", engine={"graph_capture": True})


def _with_control_flow(folder: Path) -> Path:
    """The export, whose tokens pass through an `If`, which ONNX Runtime captures in no graph."""
    package = folder / "package"
    shutil.copytree(export(LLAMA).path, package)
    model = onnx.load(package / "model.onnx", load_external_data=False)
    (tokens,) = (value for value in model.graph.input if value.name == "input_ids")
    for node in model.graph.node:
        node.input[:] = ["chosen" if name == "input_ids" else name for name in node.input]
    made = helper.make_tensor_value_info("made", onnx.TensorProto.INT64, ["batch_size", "sequence_length"])
    same = helper.make_graph([helper.make_node("Identity", ["input_ids"], ["made"])], "same", [], [made])
    chosen = helper.make_node("If", ["has_any"], ["chosen"], then_branch=same, else_branch=same)
    for node in (chosen, helper.make_node("Greater", ["size", "none"], ["has_any"])):
        model.graph.node.insert(0, node)
    model.graph.node.insert(0, helper.make_node("Size", ["input_ids"], ["size"]))
    model.graph.initializer.append(helper.make_tensor("none", tokens.type.tensor_type.elem_type, [], [0]))
    onnx.save(model, package / "model.onnx")
    return package


@pytest.mark.parametrize("fallback", [False, True])
def test_graph_that_cannot_be_captured_runs_plainly_where_nobody_demands_it(tmp_path: Path, fallback: bool) -> None:
    """With the reason, and on the device, whether or not the model might run on the CPU."""
    given = {"execution_provider": "cuda", "allow_cpu_fallback": fallback}
    with olive_ext.open(_with_control_flow(tmp_path), **given, engine={"graph_capture": "auto"}) as session:
        facts = session.describe_execution()
    assert facts["providers"][0] == "CUDAExecutionProvider"
    assert "steps_captured" not in facts
    assert any(note.startswith("steps are not captured: ") for note in facts["notes"]), facts["notes"]
