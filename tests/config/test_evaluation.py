"""What is accepted, and what becomes of words that Olive made paths of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError


def parsed(**values: Any) -> EvaluationSettings:
    return EvaluationSettings.parse({"tasks": ["a"], **values})


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(batch_size="x" * 10_000)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(("written", "value"), [("8", 8), (8, 8), ("auto", "auto"), ("auto:4", "auto:4")])
def test_batch_size_takes_counts_in_text_too(written: str | int, value: str | int) -> None:
    assert parsed(batch_size=written).batch_size == value


def test_providers_keep_names_and_options_in_order() -> None:
    written = ["webgpu", ("CUDAExecutionProvider", {"device_id": 1})]
    assert parsed(execution_provider=written).execution_provider == written


class TestWordsThatOliveMadePathsOf:
    """A word that is also a folder of the working directory comes back as that folder's absolute path."""

    def test_task_is_put_right(self, tmp_path: Path) -> None:
        (tmp_path / "mmlu").mkdir()
        assert EvaluationSettings.parse({"tasks": [str(tmp_path / "mmlu"), "arc"]}).tasks == ["mmlu", "arc"]

    def test_task_file_keeps_its_path(self, tmp_path: Path) -> None:
        task = tmp_path / "mine.yaml"
        task.touch()
        assert EvaluationSettings.parse({"tasks": [str(task)]}).tasks == [str(task)]

    def test_path_that_does_not_exist_stays_for_the_error_about_it(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing")
        assert EvaluationSettings.parse({"tasks": [missing]}).tasks == [missing]

    def test_provider_device_and_auto_are_put_right(self, tmp_path: Path) -> None:
        for name in ("cuda", "cpu", "auto", "hf"):
            (tmp_path / name).mkdir()
        written = {
            "tasks": ["a"],
            "execution_provider": [str(tmp_path / "cuda"), [str(tmp_path / "cpu"), {}]],
            "device": str(tmp_path / "cpu"),
            "batch_size": str(tmp_path / "auto"),
            "model_class": str(tmp_path / "hf"),
            "engine": {"num_slots": str(tmp_path / "auto")},
        }
        settings = EvaluationSettings.parse(written)
        assert settings.execution_provider == ["cuda", ("cpu", {})]
        assert (settings.device, settings.batch_size, settings.model_class) == ("cpu", "auto", "hf")
        assert settings.engine.num_slots == "auto"

    def test_folder_options_keep_their_paths(self, tmp_path: Path) -> None:
        written = {"tasks": ["a"], "include_path": str(tmp_path), "output_dir": str(tmp_path)}
        settings = EvaluationSettings.parse(written)
        assert (settings.include_path, settings.output_dir) == (str(tmp_path), str(tmp_path))


def test_every_field_is_described() -> None:
    for model in (EvaluationConfig, *_nested(EvaluationConfig)):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def _nested(model: Any) -> list[Any]:
    fields = [field.annotation for field in model.model_fields.values()]
    return [annotation for annotation in fields if hasattr(annotation, "model_fields")]


def test_earlier_names_of_engine_settings_are_taken() -> None:
    settings = parsed(engine={"decode_ahead": True, "scoring": "branches"})
    assert (settings.engine.overlaps_steps, settings.engine.scoring) == (True, "tree")
