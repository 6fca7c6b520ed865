"""Checkpoints that see and hear beside what was exported from them: an fp32 export is as far from them as rounding,
each prepares items by its own processor, and what they do not take is refused. Their scores and answers are rows
of `tests/agreement`."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import LostRequestsError, ModelError, OliveExtError, RecordsError
from olive_ext.model.files.hub import with_configs
from olive_ext.model.files.locate import locate_hf
from olive_ext.model.spec.checkpoint import read_media
from olive_ext.model.types import Modality
from olive_ext.session.requests import GenerationRequest, ScoringRequest, SourceInput
from tests.agreement import asked
from tests.agreement.packages import package
from tests.agreement.references import features
from tests.exports import hf_model
from tests.exports.genai import genai_export
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.exports.optimum import optimum_export
from tests.refusals import refused

FAMILY = "qwen2_5_vl"


def _spoken() -> list[ScoringRequest]:
    """Two targets behind each of the sounds."""
    targets = [20, 21, 22], [20, 30]
    return [ScoringRequest([2], target, audio=[one]) for one in asked.sounds() for target in targets]


def _text_sources() -> list[ScoringRequest]:
    sources: list[SourceInput] = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    return [ScoringRequest("", target, source=one) for one in sources for target in ([20, 21, 22], [20, 30])]


def _seen() -> list[Any]:
    return list(asked.scored_items(package(FAMILY))[0])


def _whisper() -> tuple[Path, Path]:
    return genai_export("whisper", "0.18.0"), hf_model("whisper")


def _compared(family: str) -> tuple[Path, Path, list[Any]]:
    """An export in fp32, its checkpoint, and what both are asked."""
    if family == "whisper":
        return (*_whisper(), _spoken())
    if family == FAMILY:
        return (*media_export(family), _seen())
    if family in SOUND_FAMILIES:  # transformers' extractors make other features of a sound beside a longer one
        text = "Ann hears the {0} and {0} here".format(SOUND_FAMILIES[family].marker)
        uneven = [ScoringRequest(text, " a letter", audio=asked.sounds()[first:][:2]) for first in range(2)]
        return (*media_export(family), [*asked.scored_sounds(package(family))[0], *uneven])
    return optimum_export(family), hf_model(family), _text_sources()


def _recorded(package: Path, checkpoint: Path, requests: Sequence[ScoringRequest], folder: Path) -> list[Any]:
    """What `package` compares with the checkpoint's records, which are made in `folder`."""
    with olive_ext.open(checkpoint, kind="hf", record_to=folder) as session:
        session.loglikelihood(requests)
        records = session.records
    with olive_ext.open(package, reference=records) as session:
        return [output.compared for output in session.loglikelihood(requests)]


FAMILIES = [
    pytest.param(FAMILY),
    pytest.param("whisper", marks=pytest.mark.long),
    pytest.param("qwen3_asr"),
    pytest.param("gemma4_any", marks=pytest.mark.exporters),
    pytest.param("marian", marks=pytest.mark.exporters),
    pytest.param("t5", marks=pytest.mark.exporters),
]


def _other_processor(checkpoint: Path, folder: Path, **changed: Any) -> Path:
    """The checkpoint with another processor."""
    shutil.copytree(checkpoint, folder)
    file = folder / "preprocessor_config.json"
    written = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**written, **changed}), encoding="utf-8")
    return folder


def test_checkpoint_prepares_pictures_by_its_own_processor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resident that shows in the numbers and is told; recorded the requests are not found."""
    package, checkpoint = media_export(FAMILY)
    other = _other_processor(checkpoint, tmp_path / "other", image_mean=[0.1, 0.2, 0.9])
    (request, *_) = _seen()
    with olive_ext.open(other, kind="hf") as session:
        alone = session.loglikelihood([request])[0]
    with caplog.at_level(logging.WARNING), olive_ext.open(package, reference=str(other)) as session:
        compared = session.loglikelihood([request])[0].compared
    assert compared is not None
    assert compared.reference_logprobs == pytest.approx(alone.token_logprobs, abs=1e-5)
    assert compared.kl.max() > 1e-3
    assert "the reference prepares pictures otherwise than the model" in caplog.text
    with olive_ext.open(other, kind="hf", record_to=tmp_path / "records") as session:
        session.loglikelihood([request])
        records = session.records
    with (
        olive_ext.open(package, reference=records) as session,
        refused(RecordsError, "records", holds="1"),
    ):
        session.loglikelihood([request])


def test_picture_of_another_number_of_tokens_is_refused_with_both(tmp_path: Path) -> None:
    package, checkpoint = media_export(FAMILY)
    size = {"shortest_edge": 16 * 16, "longest_edge": 16 * 16}
    other = _other_processor(checkpoint, tmp_path / "other", size=size)
    with (
        olive_ext.open(package, reference=str(other)) as session,
        refused(LostRequestsError, "incomplete", holds=("4", "1")),
    ):
        session.loglikelihood(_seen()[:1])


def test_checkpoint_with_another_feature_extractor_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package, checkpoint = _whisper()
    changed = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "n_fft": 512}
    other = _other_processor(checkpoint, tmp_path / "other", **changed)
    told = "the reference prepares sound otherwise than the model"
    for reference, is_told in ((checkpoint, False), (other, True)):
        with caplog.at_level(logging.WARNING), olive_ext.open(package, reference=str(reference)):
            assert (told in caplog.text) is is_told


def test_what_a_checkpoint_does_not_take_is_refused() -> None:
    with (
        olive_ext.open(hf_model("llama"), kind="hf") as session,
        refused(OliveExtError, "unsupported", holds="1"),
    ):
        session.loglikelihood([ScoringRequest("and", " stone", images=asked.pictures()[:1])])
    with olive_ext.open(hf_model("whisper")) as session:
        with pytest.raises(OliveExtError, match="the request gives no sound; this model takes one"):
            session.generate([GenerationRequest("")])
        with refused(OliveExtError, "unsupported", holds=("80", "3000")):
            short = features(asked.sounds()[0][0])[:, :50]
            session.generate([GenerationRequest(source=short, max_new_tokens=4)])


def test_encoder_decoder_that_takes_neither_text_nor_whispers_sound_is_refused(tmp_path: Path) -> None:
    shutil.copytree(hf_model("whisper"), tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({"model_type": "moonshine", "is_encoder_decoder": True}), encoding="utf-8")
    with refused(ModelError, "unsupported", holds="moonshine"):
        olive_ext.open(tmp_path / "other", kind="hf")


def test_configurations_of_a_checkpoint_on_the_hub_are_the_users_own_copy(tmp_path: Path) -> None:
    kept = tmp_path / "models--some--model"
    shutil.copytree(media_export(FAMILY)[1], kept / "snapshots" / "abc", ignore=shutil.ignore_patterns("*.safetensors"))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    files = with_configs(locate_hf("some/model"), tmp_path)
    assert files.directory == kept / "snapshots" / "abc"
    media = read_media(files.hf_config)
    assert media is not None
    assert media.modalities == (Modality.IMAGE,)
    assert with_configs(locate_hf("some/other"), tmp_path) == locate_hf("some/other")
