"""Sources: how a session turns texts, ids and features into what an encoder-decoder's engine is asked. What Whisper's
decoder begins with for a language and a task: as transformers' `generate` has it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import olive_ext
from olive_ext.config.model import ModelSettings
from olive_ext.errors import ConfigError, OliveExtError, TaskError
from olive_ext.model.resolve import resolve
from olive_ext.run.model_facts import ends_of, stops_of
from olive_ext.session import Session
from olive_ext.session.placeholders import Encoding
from olive_ext.session.requests import GenerationRequest
from tests.agreement.references import features, noise
from tests.exports import genai_export, hf_model
from tests.exports.genai import whisper_export
from tests.refusals import refused
from tests.session.fake_engine import FakeEngine
from tests.session.tiny import byte_level

START = (7,)


def _session(takes_features: bool = False, start: tuple[int, ...] = START, context_length: int = 32) -> Session:
    sound: Any = object()
    return Session(
        FakeEngine(context_length), byte_level(), encoding=Encoding(start, sound if takes_features else None)
    )


def _asked(session: Session) -> object:
    (request,) = session.executor.requests
    return request


def test_text_goes_to_the_encoder_with_special_tokens_and_the_decoder_begins_with_its_start() -> None:
    session = _session()
    session.generate([GenerationRequest(source="the cat", max_new_tokens=4)])
    request = _asked(session)
    assert request.source.array.tolist() == session.tokenizer.encode("the cat")
    assert request.tokens == START


@pytest.mark.parametrize(
    ("takes_features", "start", "request_", "code", "field"),
    [
        (False, START, GenerationRequest("a prompt"), "unsupported", "source"),
        (True, START, GenerationRequest([5]), "incomplete", ""),
        (False, START, GenerationRequest(source=np.ones((2, 2))), "wrong_value", "source"),
        (True, START, GenerationRequest(source="a text"), "wrong_value", "source"),
        (False, (), GenerationRequest(source="a text"), "missing", "decoder_start_token_id"),
        (False, START, GenerationRequest([{"role": "user", "content": "a"}], source="a"), "unsupported", "prompt"),
    ],
)
def test_request_that_does_not_fit_is_refused(takes_features, start, request_, code, field) -> None:
    with refused(OliveExtError, code, field):
        _session(takes_features, start).generate([request_])


def test_text_alone_has_no_likelihood() -> None:
    with refused(TaskError, "unsupported"):
        _session().loglikelihood_rolling(["a text"])


LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50, "<|de|>": 51},
    "task_to_id": {"transcribe": 60, "translate": 61},
    "no_timestamps_token_id": 1023,
}


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
        assert list(session.encoding.start) == [2, *expected] == seen[0]
        outputs = session.generate([GenerationRequest(source=one, max_new_tokens=10) for one in sources])
        ends = session.stop_ids | {model.config.pad_token_id}
    for row, output in zip(found, outputs, strict=True):
        assert tuple(token for token in row if token not in ends)[-len(output.tokens) :] == output.tokens


def test_other_first_tokens_are_another_search(package: Path, tmp_path: Path) -> None:
    """By the tokens, not by the files: a language makes the forced ones void."""
    forcing = shutil.copytree(package, tmp_path / "forcing")
    file = forcing / "generation_config.json"
    forced = json.loads(file.read_text(encoding="utf-8")) | {"forced_decoder_ids": [[1, 50], [2, 60]]}
    file.write_text(json.dumps(forced), encoding="utf-8")

    def search(reference: Path, candidate: Path, **given: Any) -> tuple[str, ...]:
        models = [resolve(ModelSettings(model=str(path), **given)) for path in (reference, candidate)]
        stops = stops_of(*map(ends_of, models))
        assert stops is not None
        return stops.search

    assert search(forcing, package) == ("decoder_input_ids [2] for [2, 50, 60]",)
    assert search(package, forcing) == ("decoder_input_ids [2, 50, 60] for [2]",)
    assert search(forcing, package, language="en") == ()


def test_language_that_nothing_names_is_told(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), olive_ext.open(package) as session:
        assert session.encoding.start == (2,)
    assert "'language'" in caplog.text


@pytest.mark.parametrize(
    ("make", "given", "error"),
    [
        (None, {"language": "fr"}, {"code": "wrong_value", "field": "language", "value": "fr"}),
        (None, {"speech_task": "translate"}, {"code": "wrong_value", "field": "language"}),
        (
            whisper_export,
            {"language": "en"},
            {"code": "unsupported", "field": "language", "holds": ("lang_to_id", "generation_config.json")},
        ),
        (lambda: genai_export("llama"), {"language": "en"}, {"code": "unsupported", "field": "language"}),
    ],
    ids=["another language", "a task alone", "no languages", "no speech"],
)
def test_what_the_model_does_not_name_is_refused(
    package: Path, make: Callable[[], Path] | None, given: dict[str, Any], error: dict[str, Any]
) -> None:
    with refused(ConfigError, **error):
        olive_ext.open(make() if make else package, **given)
