"""What `check` tells of a model of speech."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig
from tests.exports.genai import whisper_export

pytestmark = pytest.mark.slow


def test_section_on_speech_tells_windows_start_languages_and_suppressed_tokens(tmp_path: Path) -> None:
    shutil.copytree(whisper_export(), tmp_path / "package")
    file = tmp_path / "package" / "generation_config.json"
    more = {"lang_to_id": {"<|en|>": 50}, "task_to_id": {"transcribe": 60}, "suppress_tokens": [3, 4]}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **more}), encoding="utf-8")
    given = {"path": str(tmp_path / "package")}
    findings = check_model(EvaluationConfig.parse({"tasks": ["x"], "model": given}))
    assert findings.problems == []
    (section,) = (section for section in findings.sections if section.title == "Encoder and decoder")
    facts = {fact.name: fact.value for fact in section.facts}
    assert facts["windows"] == "30 s"
    assert facts["sound"] == "16,000 samples a second"
    assert facts["languages"] == "<|en|>"
    assert facts["tasks"] == "transcribe"
    assert facts["never generated"] == "2 tokens, 0 more as the first"
