"""How a reference is run is decided before anything is opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, ProviderError
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import mode_of
from tests.exports.catalog import export
from tests.refusals import refused
from tests.session.tiny import byte_level


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["logits"])], "g", [given], [value])
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    byte_level(False).hf.save_pretrained(folder)
    return str(folder)


def config(path: str, reference: Any, **settings: Any) -> EvaluationConfig:
    given = {"tasks": ["tiny_choice"], **settings}
    return EvaluationConfig.parse({"model": {"path": path}, "reference": reference, **given})


def test_nothing_is_compared_without_a_reference_nor_before_a_workflow(path: str) -> None:
    assert mode(config(path, None)) == "alone"
    with refused(ConfigError, "contradiction", "reference", "input_model"):
        mode(config(path, "input_model"))


def test_lm_evals_own_model_is_not_compared_with_itself(tmp_path: Path, path: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    byte_level(False).hf.save_pretrained(tmp_path)
    hf = str(tmp_path)
    given = {"model": {"path": hf, "kind": "hf"}, "tasks": ["tiny_choice"]}
    assert mode(EvaluationConfig.parse({**given, "reference": f"{hf}/."})) == "alone"
    assert mode(EvaluationConfig.parse({**given, "reference": path})) == "recorded"


def mode(config: EvaluationConfig) -> str:
    return mode_of(Models(config))


@pytest.mark.parametrize(
    ("reference", "costs", "expected"),
    [
        ({"mode": "recorded"}, [], "recorded"),
        ({"mode": "resident"}, [], "resident"),
        ({}, [], "resident"),
        ({}, ["size_on_disk"], "resident"),
        ({}, ["peak_memory"], "recorded"),
    ],
)
def test_mode_is_as_written_and_small_models_take_turns_for_speed_and_memory(
    path: str, reference: dict[str, str], costs: list[str], expected: str
) -> None:
    assert mode(config(path, {"path": path, **reference}, tasks=["tiny_choice", *costs])) == expected


@pytest.mark.exporters
def test_a_graph_with_states_and_its_checkpoint_take_turns() -> None:
    """Transformers take its texts whole, which a graph that takes a token a step failed on."""
    package = export("mamba-mobius")
    assert mode(config(str(package.path), str(package.hf))) == "recorded"


def test_models_that_do_not_fit_take_turns(path: str, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(path, large)
    with (large / "weights.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # sparse
    (large / "model.onnx").unlink()
    (large / "config.json").write_text("{}")
    assert mode(config(path, str(large), device="cpu")) == "recorded"


def test_missing_provider_and_speed_of_two_resident_models_are_refused(path: str) -> None:
    with pytest.raises(ProviderError, match="TensorrtExecutionProvider"):
        mode(config(path, path, execution_provider="tensorrt"))
    with refused(ConfigError, "contradiction", "tokens_per_second", holds=("reference.mode", "recorded")):
        mode(config(path, {"path": path, "mode": "resident"}, tasks=["tiny_choice", "tokens_per_second"]))


def test_reference_takes_the_models_settings_and_its_own_provider(path: str) -> None:
    given = config(path, path, execution_provider="cuda", provider_options={"device_id": 1}, limit=3)
    other = Models(given).reference.settings
    assert (other.model, other.execution_provider, other.provider_options) == (path, "cuda", {"device_id": 1})
    named = {"path": path, "execution_provider": "cpu"}
    own = Models(config(path, named, provider_options={"device_id": 1})).reference.settings
    assert (own.execution_provider, own.provider_options) == ("cpu", None)
