"""What `check` tells of packages that see, and of a model of speech."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig
from tests.exports.genai import whisper_export

SEEING = Path(__file__).parents[2] / "recipes" / "vision" / "model"
SEEN = {
    "image encoder": ".../vision_encoder/model.onnx",
    "image provider": "CPUExecutionProvider",
    "image inputs": ("pixel_values", "image_grid_thw"),
    "image features": "image_features [...",
    "image processor": "Qwen2VLImageProcessor...",
    "images in a run": "one",
    "positions": "time, height, width",
    "per-layer inputs": "no",
    "features kept": "256 MiB on the device",
    "tokens of an item": "any number",
    "image placeholder": "...'<|image_pad|>'",
}
HEARD = {
    "windows": "30 s",
    "sound": "16,000 samples a second",
    "languages": "<|en|>",
    "tasks": "transcribe",
    "never generated": "2 tokens, 0 more as the first",
}


def section(path: Path, title: str, **settings: Any) -> dict[str, tuple[str, str]]:
    findings = check_model(EvaluationConfig.parse({"tasks": ["x"], "model": {"path": str(path)}, **settings}))
    assert findings.problems == []
    (found,) = (one for one in findings.sections if one.title == title)
    return {fact.name: (str(fact.value), fact.reason) for fact in found.facts}


def assert_told(facts: dict[str, tuple[str, str]], expected: dict[str, Any]) -> None:
    """Values, of which "..." stands for a beginning or an end, and a tuple for parts."""
    for name, value in expected.items():
        parts = value if isinstance(value, tuple) else value.split("...")
        assert [part for part in parts if part not in facts[name][0]] == [], name
        assert "..." in value or isinstance(value, tuple) or facts[name][0] == value


def test_section_on_pictures_tells_encoder_placeholder_positions_and_budgets() -> None:
    assert_told(section(SEEING, "Pictures and sound"), SEEN)
    facts = section(SEEING, "Pictures and sound", engine={"chunk_size": 32, "encoder_batch_rows": 64})
    assert facts["tokens of an item"] == ("32", "'engine.chunk_size' = 32 allows fewer")
    assert facts["images in a run"][0] == "up to 64 rows of features"


def test_section_on_speech_tells_windows_start_languages_and_suppressed_tokens(tmp_path: Path) -> None:
    shutil.copytree(whisper_export(), tmp_path / "package")
    file = tmp_path / "package" / "generation_config.json"
    more = {"lang_to_id": {"<|en|>": 50}, "task_to_id": {"transcribe": 60}, "suppress_tokens": [3, 4]}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **more}), encoding="utf-8")
    assert_told(section(tmp_path / "package", "Encoder and decoder"), HEARD)
