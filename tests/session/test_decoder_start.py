"""What Whisper's decoder begins with for a language and a task: as transformers' `generate` has it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import olive_ext
from olive_ext.errors import ConfigError
from olive_ext.session.requests import GenerationRequest
from tests.agreement.references import features, noise
from tests.exports import genai_export, hf_model
from tests.exports.genai import whisper_export
from tests.refusals import refused

LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50, "<|de|>": 51},
    "task_to_id": {"transcribe": 60, "translate": 61},
    "no_timestamps_token_id": 1023,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As newer checkpoints have it: `forced_decoder_ids` with a gap where the language belongs."""
    folder = tmp_path_factory.mktemp("languages") / "package"
    shutil.copytree(whisper_export(), folder)
    file = folder / "generation_config.json"
    more = {**LANGUAGES, "forced_decoder_ids": [[1, None], [2, 60]]}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **more}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"language": "en"}, [50, 60, 1023]),
        ({"language": "<|de|>", "speech_task": "translate"}, [51, 61, 1023]),
    ],
)
def test_decoder_begins_as_in_transformers(package: Path, given: dict[str, Any], expected: list[int]) -> None:
    load: Any = transformers.AutoModelForSpeechSeq2Seq.from_pretrained
    model = load(hf_model("whisper"), dtype=torch.float32).eval()
    for name, value in LANGUAGES.items():
        setattr(model.generation_config, name, value)
    sources = [features(noise(seed, 3)) for seed in range(2)]
    asked = {"language": given["language"], "task": given.get("speech_task", "transcribe")}
    seen: list[list[int]] = []

    def forward(*_: Any, **options: Any) -> None:
        seen.append(options["decoder_input_ids"][0].tolist())

    handle = model.register_forward_pre_hook(lambda _, args, options: forward(*args, **options), with_kwargs=True)
    with torch.inference_mode():
        found = model.generate(torch.tensor(np.stack(sources)), max_new_tokens=10, **asked).tolist()
    handle.remove()
    with olive_ext.open(package, **given) as session:
        assert session.encoding is not None
        assert list(session.encoding.start) == [2, *expected] == seen[0]
        outputs = session.generate([GenerationRequest(source=one, max_new_tokens=10) for one in sources])
        ends = session.stop_ids | {model.config.pad_token_id}
    for row, output in zip(found, outputs, strict=True):
        assert tuple(token for token in row if token not in ends)[-len(output.tokens) :] == output.tokens


def test_language_that_nothing_names_is_told(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), olive_ext.open(package) as session:
        assert session.encoding is not None
        assert session.encoding.start == (2,)
    assert "knows several languages, and none is given" in caplog.text


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"language": "fr"}, {"code": "wrong_value", "field": "language", "value": "fr"}),
        ({"speech_task": "translate"}, {"code": "wrong_value", "field": "language"}),
    ],
)
def test_what_the_model_does_not_name_is_refused(package: Path, given: dict[str, Any], error: dict[str, Any]) -> None:
    with refused(ConfigError, **error):
        olive_ext.open(package, **given)


def test_language_of_a_model_without_languages_is_refused() -> None:
    with refused(ConfigError, "unsupported", "language", holds=("lang_to_id", "generation_config.json")):
        olive_ext.open(whisper_export(), language="en")
    with refused(ConfigError, "unsupported", "language"):
        olive_ext.open(genai_export("llama"), language="en")
