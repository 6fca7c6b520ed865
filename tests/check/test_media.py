"""What `check` tells of a package that sees: the encoder, what stands for a picture, positions, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig

PACKAGE = Path(__file__).parents[2] / "recipes" / "vision" / "model"


def _facts(**settings: Any) -> dict[str, tuple[str, str]]:
    findings = check_model(EvaluationConfig.parse({"tasks": ["x"], "model": {"path": str(PACKAGE)}, **settings}))
    assert findings.problems == []
    (section,) = (section for section in findings.sections if section.title == "Pictures and sound")
    return {fact.name: (str(fact.value), fact.reason) for fact in section.facts}


@pytest.mark.slow
def test_section_on_pictures_tells_encoder_placeholder_positions_and_budgets() -> None:
    facts = _facts()
    assert facts["image encoder"][0].endswith("vision_encoder/model.onnx")
    assert facts["image provider"][0] == "CPUExecutionProvider"
    assert "pixel_values" in facts["image inputs"][0]
    assert "image_grid_thw" in facts["image inputs"][0]
    assert facts["image features"][0].startswith("image_features [")
    assert facts["image processor"][0].startswith("Qwen2VLImageProcessor")
    assert facts["images in a run"][0] == "one"
    assert facts["positions"][0] == "time, height, width"
    assert facts["per-layer inputs"][0] == "no"
    assert facts["features kept"][0] == "256 MiB on the device"
    assert facts["tokens of an item"][0] == "any number"
    assert facts["image placeholder"][0].endswith("'<|image_pad|>'")


@pytest.mark.slow
def test_section_on_pictures_tells_what_settings_allow() -> None:
    facts = _facts(engine={"chunk_size": 32, "encoder_batch_rows": 64})
    assert facts["tokens of an item"] == ("32", "'engine.chunk_size' = 32 allows fewer")
    assert facts["images in a run"][0] == "up to 64 rows of features"
