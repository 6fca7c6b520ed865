"""Checkpoints that hear: scores and answers are those of whole passes of transformers, and an fp32 export is as far
from them as rounding. Whisper has its sound in an encoder, others among their tokens."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ModelError, OliveExtError
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest, SourceInput
from tests.agreement.references import encoder_decoder, features
from tests.engine.runners.checkpoints import assert_as_far_as_rounding, recorded
from tests.exports import hf_model
from tests.exports.genai import genai_export
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.exports.optimum import optimum_export
from tests.families.pictures import picture
from tests.families.sounds import SoundReference, sound
from tests.refusals import refused

SOUNDS = [sound(0, 9000), sound(1, 24321), sound(2, 50000)]
AMONG_TOKENS = [pytest.param("qwen3_asr"), pytest.param("gemma4_any", marks=pytest.mark.exporters)]

pytestmark = pytest.mark.slow


@cache
def _reference(family: str) -> SoundReference:
    return SoundReference(family, media_export(family)[1])


def _asked(family: str) -> list[tuple[str, str, list[Any]]]:
    """Behind one sound, two of one length, and none."""
    marker = SOUND_FAMILIES[family].marker
    alone = [(f"Ann {verb} the {marker} and", " blue stone", [one]) for one in SOUNDS for verb in ("hears", "paints")]
    pairs = [[SOUNDS[1], sound(3, 24321)], [SOUNDS[1], SOUNDS[1]]]
    both = [(f"Ann hears the {marker} and {marker} here", " a letter", pair) for pair in pairs]
    return [*alone, *both, ("Bob carries the heavy", " wheel", [])]


def _requests(family: str) -> list[ScoringRequest]:
    return [ScoringRequest(context, target, audio=given) for context, target, given in _asked(family)]


@pytest.mark.parametrize("family", AMONG_TOKENS)
def test_scores_and_answers_behind_sounds_are_those_of_whole_passes(family: str) -> None:
    reference = _reference(family)
    expected = [reference.score(*one) for one in _asked(family)]
    text = f"Ann hears the {reference.marker} and"
    for chunk_size in (max(map(reference.num_tokens, SOUNDS)), 256):
        with olive_ext.open(media_export(family)[1], kind="hf", engine={"chunk_size": chunk_size}) as session:
            found = session.loglikelihood(_requests(family))
            outputs = session.generate([GenerationRequest(text, max_new_tokens=8, audio=[one]) for one in SOUNDS])
        for output, logprobs in zip(found, expected, strict=True):
            assert output.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        for one, answer in zip(SOUNDS, outputs, strict=True):
            assert reference.continues(reference.ids(text, [one]), [one], answer.tokens, 8)


@pytest.mark.exporters
def test_picture_and_sound_in_one_prompt_are_fed_together() -> None:
    package, checkpoint = media_export("gemma4_any")
    text = "Ann sees <|image|> and hears <|audio|> here"
    request = ScoringRequest(text, " blue stone", images=[picture(0, 40, 40)], audio=[SOUNDS[0]])
    with olive_ext.open(package, reference=str(checkpoint)) as session:
        compared = session.loglikelihood([request])[0].compared
    assert compared is not None
    assert compared.kl.max() < 1e-5


def _whisper() -> tuple[Path, Path]:
    return genai_export("whisper", "0.18.0"), hf_model("whisper")


def _spoken(start: int) -> list[ScoringRequest]:
    """Two targets behind each of the sounds."""
    return [ScoringRequest([start], target, audio=[one]) for one in SOUNDS for target in ([20, 21, 22], [20, 30])]


def test_whispers_scores_and_answers_are_those_of_whole_passes() -> None:
    reference = encoder_decoder(hf_model("whisper"))
    start = reference.start
    for chunk_size in (1, 64):
        with olive_ext.open(hf_model("whisper"), engine={"chunk_size": chunk_size}) as session:
            found = session.loglikelihood(_spoken(start))
            asked = [GenerationRequest([start], max_new_tokens=12, audio=[one]) for one in SOUNDS]
            outputs = session.generate(asked)
            num_runs = session.describe_execution()["encoder_runs"]
        for request, output in zip(_spoken(start), found, strict=True):
            expected = reference.score([start], request.target, features(request.audio[0][0]))
            assert output.token_logprobs == pytest.approx(expected, abs=1e-5)
        for one, answer in zip(SOUNDS, outputs, strict=True):
            assert reference.continues([start], features(one[0]), answer.tokens, 12)
        assert num_runs == len(SOUNDS)


def _text_sources(family: str) -> list[ScoringRequest]:
    sources: list[SourceInput] = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    return [ScoringRequest("", target, source=one) for one in sources for target in ([20, 21, 22], [20, 30])]


FAMILIES = [
    pytest.param("whisper"),
    pytest.param("qwen3_asr"),
    pytest.param("gemma4_any", marks=pytest.mark.exporters),
    pytest.param("marian", marks=pytest.mark.exporters),
    pytest.param("t5", marks=pytest.mark.exporters),
]


def _compared(family: str) -> tuple[Path, Path, list[ScoringRequest]]:
    """An export in fp32, its checkpoint, and what both are asked."""
    if family == "whisper":
        return (*_whisper(), _spoken(2))
    if family in SOUND_FAMILIES:  # transformers' extractors make other features of a sound beside a longer one
        text = "Ann hears the {0} and {0} here".format(SOUND_FAMILIES[family].marker)
        uneven = [ScoringRequest(text, " a letter", audio=SOUNDS[first:][:2]) for first in range(2)]
        return (*media_export(family), [*_requests(family), *uneven])
    return optimum_export(family), hf_model(family), _text_sources(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_in_fp32_is_as_far_from_its_checkpoint_as_rounding(family: str, tmp_path: Path) -> None:
    package, checkpoint, requests = _compared(family)
    with olive_ext.open(package, reference=str(checkpoint)) as session:
        resident = [output.compared for output in session.loglikelihood(requests)]
    assert_as_far_as_rounding(resident, recorded(package, checkpoint, requests, tmp_path))


def test_checkpoint_with_another_feature_extractor_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package, checkpoint = _whisper()
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    written = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "n_fft": 512}
    (other / "preprocessor_config.json").write_text(json.dumps(written), encoding="utf-8")
    told = "the reference prepares sound otherwise than the model"
    for reference, is_told in ((checkpoint, False), (other, True)):
        with caplog.at_level(logging.WARNING), olive_ext.open(package, reference=str(reference)):
            assert (told in caplog.text) is is_told


def _open_whisper() -> Session:
    return olive_ext.open(hf_model("whisper"))


def test_what_a_checkpoint_of_speech_does_not_take_is_refused() -> None:
    with _open_whisper() as session:
        with pytest.raises(OliveExtError, match="the request gives no sound; this model takes one"):
            session.generate([GenerationRequest("")])
        with refused(OliveExtError, "unsupported", holds=("80", "3000")):
            session.generate([GenerationRequest(source=features(SOUNDS[0][0])[:, :50], max_new_tokens=4)])


def test_encoder_decoder_that_takes_neither_text_nor_whispers_sound_is_refused(tmp_path: Path) -> None:
    shutil.copytree(hf_model("whisper"), tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({"model_type": "moonshine", "is_encoder_decoder": True}), encoding="utf-8")
    with refused(ModelError, "unsupported", holds="moonshine"):
        olive_ext.open(tmp_path / "other", kind="hf")
