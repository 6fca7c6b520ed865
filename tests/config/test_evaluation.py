"""What is accepted, and what becomes of words that Olive made paths of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError


def parsed(**values: Any) -> EvaluationSettings:
    return EvaluationSettings.parse({"tasks": ["a"], **values})


def test_values_are_taken_as_others_write_them_and_long_ones_cut_in_messages() -> None:
    """Counts in text, providers with options in their order."""
    for written, value in (("8", 8), (8, 8), ("auto", "auto"), ("auto:4", "auto:4")):
        assert parsed(batch_size=written).batch_size == value
    providers = ["webgpu", ("CUDAExecutionProvider", {"device_id": 1})]
    assert parsed(execution_provider=providers).execution_provider == providers
    with pytest.raises(ConfigError) as raised:
        parsed(batch_size="x" * 10_000)
    assert len(str(raised.value)) < 250


def test_words_that_olive_made_paths_of_are_put_right_and_paths_stay(tmp_path: Path) -> None:
    """A word that is also a folder of the working directory comes back as that folder's absolute path. A task's file, a
    path that does not exist, for the error about it, and options that are folders keep theirs."""
    for name in ("mmlu", "cuda", "cpu", "auto", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.yaml").touch()
    here = {name: str(tmp_path / name) for name in ("mmlu", "cuda", "cpu", "auto", "hf", "mine.yaml", "missing")}
    written = {
        "tasks": [here["mmlu"], "arc", here["mine.yaml"], here["missing"]],
        "execution_provider": [here["cuda"], [here["cpu"], {}]],
        "device": here["cpu"],
        "batch_size": here["auto"],
        "model_class": here["hf"],
        "engine": {"num_slots": here["auto"]},
        "include_path": str(tmp_path),
        "output_dir": str(tmp_path),
    }
    settings = EvaluationSettings.parse(written)
    assert settings.tasks == ["mmlu", "arc", here["mine.yaml"], here["missing"]]
    assert settings.execution_provider == ["cuda", ("cpu", {})]
    assert (settings.device, settings.batch_size, settings.model_class) == ("cpu", "auto", "hf")
    assert settings.engine.num_slots == "auto"
    assert (settings.include_path, settings.output_dir) == (str(tmp_path), str(tmp_path))


def test_every_field_is_described() -> None:
    for model in (EvaluationConfig, *_nested(EvaluationConfig)):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def _nested(model: Any) -> list[Any]:
    fields = [field.annotation for field in model.model_fields.values()]
    return [annotation for annotation in fields if hasattr(annotation, "model_fields")]
