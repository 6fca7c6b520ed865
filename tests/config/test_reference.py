"""What may be said about a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig, EvaluationSettings, ReferenceConfig
from olive_ext.errors import ConfigError
from tests.refusals import refused


def parsed(reference: Any) -> ReferenceConfig | None:
    return EvaluationConfig.parse({"model": {"path": "m"}, "tasks": ["a"], "reference": reference}).reference


def test_a_text_is_the_path() -> None:
    assert parsed("models/float") == parsed({"path": "models/float"})
    assert parsed(None) is None


@pytest.mark.parametrize("word", ["auto", "export"])
def test_folder_with_the_name_of_a_word_is_never_taken_for_the_word(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Olive makes the word an absolute path where such a folder is in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / word).mkdir()
    own = str(tmp_path / word)
    with refused(ConfigError, "wrong_value", "reference.float_model", own, holds=word):
        EvaluationSettings.parse({"tasks": ["a"], "reference": {"path": "hf", "float_model": own}})
    for inside in (f"./{word}", str(tmp_path / word / "model.onnx"), word):
        settings = EvaluationSettings.parse({"tasks": ["a"], "reference": {"path": "hf", "float_model": inside}})
        assert settings.reference is not None
        assert settings.reference.float_model == inside
