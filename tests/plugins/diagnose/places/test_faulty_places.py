"""Places whose kernels are wrong in some steps, or from run to run: what they are wrong by is not taken for noise. What
noise may explain, and no node: green is what nodes hold, or what noise was seen to do where they cannot run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.cli import main
from olive_ext.config import EvaluationConfig
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.step import Step, StepOutput
from olive_ext.report.diagnosis import PlaceFinding
from olive_ext.run.evaluation import record
from tests.exports.cache import once
from tests.exports.edited import changed, edited
from tests.exports.quickstart import TASKS, exported, quantized
from tests.plugins.diagnose.places.planted import WORK, compared, planted

pytestmark = pytest.mark.long

Faulty = Callable[[Callable[[Step], bool], Callable[[Step, StepOutput], StepOutput]], Path]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """A copy of the float model whose place gives something else in some steps, as a wrong kernel would."""

    def make(is_wrong: Callable[[Step], bool], changed: Callable[[Step, StepOutput], StepOutput]) -> Path:
        model = edited(exported(), tmp_path / "model", lambda proto: setattr(proto.graph, "name", "faulty"))
        plain = OrtRunner._run

        def run(runner: Any, step: Step) -> StepOutput:
            output = plain(runner, step)
            name = runner._feed.session.get_modelmeta().graph_name
            return changed(step, output) if name == "faulty" and is_wrong(step) else output

        monkeypatch.setattr(OrtRunner, "_run", run)
        return model

    return make


def place_of(model: Path) -> PlaceFinding:
    """Beside the float model, as the same one."""
    return place_against({"path": str(exported()), "is_same_model": True}, model)


def off(step: Step, output: StepOutput, size: Any = 1.0) -> StepOutput:
    """Log-probabilities that are 0.01 nats off, by token."""
    wrong = np.sin([token for _, token in step.targets]) * 0.01 * size
    return replace(output, target_logprobs=(output.target_logprobs + wrong).astype(np.float32))


def test_fault_of_some_steps_is_no_noise(faulty: Faulty) -> None:
    """Wrong in long steps: its other form is as far from it as the other place is, and excuses nothing."""
    place = place_of(faulty(lambda step: max(len(row.tokens) for row in step.rows) > 24, off))
    assert place.kind == "different"
    assert any(one.rms > 1e-3 for one in place.noise if not one.is_rounding)


def test_fault_of_another_form_alone_is_told(faulty: Faulty) -> None:
    """Right as it was evaluated, and wrong by rows of few tokens: that place is not the same to rounding."""
    place = place_of(faulty(lambda step: step.first_cell is None, off))
    assert place.kind in ("cannot_tell", "different")
    assert place.kind == "different" or "by rows" in place.reason


@pytest.mark.parametrize(("noise", "reason"), [(1.0, "repeat"), (0.04, "no difference")])
def test_place_that_does_not_repeat_itself_is_no_scale(faulty: Faulty, noise: float, reason: str) -> None:
    """Random numbers in place of rounding make every scale that is measured there as large as they are. Those of 3e-4
    nats are a scale as good as rounding's, and no plain pass over the nodes shows them."""
    rng = np.random.default_rng(0)
    model = faulty(lambda _: True, lambda step, out: off(step, out, noise * rng.standard_normal(len(step.targets))))
    place = place_of(model)
    assert (place.kind, reason in place.reason) == ("cannot_tell", True)


def test_what_decoding_steps_alone_make_wrong_is_different(faulty: Faulty, capsys: pytest.CaptureFixture[str]) -> None:
    """Every score is equal, and the generated answers are others where both places are sure of the token: exit 1."""

    def other(step: Step, output: StepOutput) -> StepOutput:
        return replace(output, greedy_ids=np.full_like(output.greedy_ids, 5))

    model = faulty(lambda step: step.rows[0].past > 0 and len(step.rows[0].tokens) == 1, other)
    argv = ["evaluate", model, "--tasks", "quickstart_generate", "--include-path", TASKS, "--limit", "8"]
    place = {"path": str(exported()), "is_same_model": True, "engine": {"num_threads": 1}}
    assert main([*map(str, argv), "--set", f"reference={json.dumps(place)}"]) == 1
    said = capsys.readouterr().out
    assert "different: first at position" in said
    assert "generated answer" in said


GATE = 14


@cache
def dynamic() -> Path:
    """Weights and activations of 8 bits, the activations' scale measured as they come."""

    def build(folder: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        for file in exported().iterdir():
            if not file.name.startswith(("model.onnx", "cache")):
                shutil.copy(file, folder)
        quantize_dynamic(exported() / "model.onnx", folder / "model.onnx", op_types_to_quantize=["MatMul"])

    return once("quickstart-dynamic", [exported().name], build)


def place_against(reference: Any, model: Path, **settings: Any) -> PlaceFinding:
    return compared(reference, model, **settings).comparison.place


def test_fault_within_rounding_of_activations_is_found_by_its_node_and_not_beside_records(tmp_path: Path) -> None:
    """A scale 1 % too large is less than rounding to 8 bits does; on equal inputs one kernel gives one result. The same
    against records cannot be told, with the reason; equal numbers are the same without any node."""
    model = quantized(4, 32, accuracy_level=4)
    node = planted(model, tmp_path / "model", GATE, factor=1.01)
    place = place_against({"path": str(model), "is_same_model": True}, tmp_path / "model")
    assert place.largest < place.kernel_limit
    assert (place.kind, place.first.node, place.reason) == ("different", node.name, "")
    record(EvaluationConfig.of(model, WORK), tmp_path / "float.records")
    reference = {"path": str(tmp_path / "float.records"), "is_same_model": True}
    place = place_against(reference, tmp_path / "model")
    assert (place.kind, "one machine" in place.reason) == ("cannot_tell", True)
    assert place_against(reference, model, engine={"num_threads": 1}).kind == "same"


def test_model_without_a_scale_is_held_by_its_nodes(tmp_path: Path) -> None:
    """Where no product's input can be moved, equal numbers are the same, and a fault is its node's."""
    model = dynamic()
    assert place_against({"path": "same_model", "engine": {"num_threads": 1}}, model).kind == "same"
    name = "model.layers.0.mlp.gate_proj.MatMul.weight_scale"
    shifted = changed(model, tmp_path / "model", name, lambda scale: scale * np.float32(1.01))
    place = place_against({"path": str(model), "is_same_model": True}, shifted)
    assert (place.kind, place.first.node) == ("different", "/model/layers.0/mlp/gate_proj/MatMul_quant_scales_mul")
