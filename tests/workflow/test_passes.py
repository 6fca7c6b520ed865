"""The pass as Olive drives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from olive.model import ONNXModelHandler
from olive.package_config import OlivePackageConfig
from olive.passes.olive_pass import create_pass_from_dict

from olive_ext.config import PASS_TYPE, EvaluationSettings
from olive_ext.report import from_json
from olive_ext.workflow import OrtLMEvaluation, register
from olive_ext.workflow.preflight import FINGERPRINT
from tests.exports import genai_export
from tests.workflow.recipes import REPORT, Measure


def make(fake: Measure, **settings: Any) -> Any:
    class Faked(OrtLMEvaluation):
        measure = staticmethod(fake)

    return create_pass_from_dict(Faked, {"tasks": ["tiny_choice"], **settings}, disable_search=True)


@pytest.fixture
def model() -> ONNXModelHandler:
    package = genai_export("llama")
    files = [str(package / name) for name in ("genai_config.json", "tokenizer.json")]
    return ONNXModelHandler(str(package), model_attributes={"additional_files": files, "own": 1})


def names(handler: Any) -> list[str]:
    return [Path(file).name for file in handler.model_attributes["additional_files"]]


def test_model_is_handed_on_unchanged_with_the_reports_of_all_measurements(
    model: ONNXModelHandler, tmp_path: Path
) -> None:
    before = json.dumps(model.to_json())
    output = make(Measure()).run(model, str(tmp_path))
    assert output is not model
    assert json.dumps(model.to_json()) == before
    assert output.model_path == model.model_path
    assert output.model_attributes["own"] == 1
    assert {"genai_config.json", "report.json", "report.md", "tokenizer.json"} <= set(names(output))
    assert from_json((tmp_path / "report.json").read_text()).metrics == REPORT.metrics
    second = make(Measure()).run(output, str(tmp_path / "b"))
    assert {"report-2.json", "report-2.md", "report.json", "report.md"} <= set(names(second))
    assert len(names(second)) == len(set(names(second)))


def test_settings_and_accelerator_reach_the_measurement(model: ONNXModelHandler, tmp_path: Path) -> None:
    """Size alone is measured without a run."""
    fake = Measure()
    make(fake, limit=3, engine={"num_slots": 2}).run(model, str(tmp_path))
    settings = fake.calls[0]["settings"]
    asked = ["tiny_choice", "size_on_disk", "tokens_per_second"]
    assert settings == EvaluationSettings.parse({"tasks": asked, "limit": 3, "engine": {"num_slots": 2}})
    assert str(fake.calls[0]["device"]) == "cpu"
    assert fake.calls[0]["execution_providers"] == "CPUExecutionProvider"
    make(fake, tasks=["size_on_disk"]).run(model, str(tmp_path))
    assert fake.calls[1]["settings"].tasks == ["size_on_disk"]


def test_parameters_are_the_settings() -> None:
    assert set(OrtLMEvaluation.parameters()) == {*EvaluationSettings.model_fields, FINGERPRINT}
    assert OrtLMEvaluation.parameters()["tasks"].required
    assert OrtLMEvaluation.parameters()["limit"].description.startswith("Documents per task")


def test_configuration_survives_the_trip_through_json() -> None:
    made = make(Measure(), engine={"num_slots": 2}, execution_provider=["cpu"])
    again = create_pass_from_dict(OrtLMEvaluation, made.config.to_json(), disable_search=True)
    assert again.config.to_json() == made.config.to_json()


def test_cache_key_follows_no_bounds() -> None:
    low, high = (make(Measure(), require=[{"metric": "acc", "min": least}]).config for least in (0.1, 0.2))
    assert low.to_json() == high.to_json()
    assert [bound.min for bound in low.require + high.require] == [0.1, 0.2]


@pytest.mark.parametrize("type_name", [PASS_TYPE, PASS_TYPE.lower(), f"olive_ext.workflow.{PASS_TYPE}"])
@pytest.mark.parametrize("table", ["olives own", "a package config"])
def test_pass_is_found_with_and_without_a_package_config(type_name: str, table: str) -> None:
    register()
    own = {"passes": {"Mine": {"module_path": "mine.Mine"}}}
    config = OlivePackageConfig.load_default_config() if table == "olives own" else OlivePackageConfig(**own)
    assert config.get_pass_module_config(type_name).run_on_target is True
    assert config.import_pass_module(type_name) is OrtLMEvaluation
    with pytest.raises(ValueError, match="'nothing' not found"):
        config.get_pass_module_config("nothing")


def test_model_given_as_a_file_is_saved_with_its_external_data(tmp_path: Path) -> None:
    file = genai_export("llama") / "model.onnx"
    output = make(Measure()).run(ONNXModelHandler(str(file)), str(tmp_path))
    assert (Path(output.get_resource("model_path")), output.onnx_file_name) == (file.parent, "model.onnx")
    assert Path(output.model_path) == file


def test_files_that_travel_along_stay_where_they_are(tmp_path: Path) -> None:
    package = tmp_path / "users own"
    package.mkdir()
    (package / "model.onnx").touch()
    first = make(Measure()).run(ONNXModelHandler(str(package), "model.onnx"), str(tmp_path / "a"))
    make(Measure()).run(first, str(tmp_path / "b"))
    assert [path.name for path in package.iterdir()] == ["model.onnx"]
