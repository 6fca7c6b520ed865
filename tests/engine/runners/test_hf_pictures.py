"""Checkpoints that see pictures: scores and answers are those of whole passes, however rows are cut and share prefixes,
and an fp32 export is as far from them as rounding."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import olive_ext
from olive_ext.errors import LostRequestsError, OliveExtError, RecordsError
from olive_ext.model.files.hub import with_configs
from olive_ext.model.files.locate import locate_hf
from olive_ext.model.spec.checkpoint import read_media
from olive_ext.model.spec.media_types import Modality
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.engine.runners.checkpoints import assert_as_far_as_rounding, recorded
from tests.exports import hf_model
from tests.exports.media import MEDIA_FAMILIES, media_export
from tests.families.pictures import PictureReference, picture
from tests.refusals import refused

FAMILY = "qwen2_5_vl"
PICTURES = [picture(0, 40, 40), picture(1, 60, 30), picture(2, 24, 70)]
Asked = tuple[str, str, Sequence[Image.Image]]

pytestmark = pytest.mark.slow


@cache
def _reference(family: str) -> PictureReference:
    return PictureReference(family, media_export(family)[1], is_as_exported=False)


def _asked(family: str) -> list[Asked]:
    marker = MEDIA_FAMILIES[family].marker
    asked: list[Asked] = [
        (f"Ann {verb} the {marker} and", target, [one])
        for one in PICTURES[:2]
        for verb in ("sees", "paints")
        for target in (" blue stone", " of the garden number")
    ]
    pairs = [[PICTURES[0], PICTURES[1]], [PICTURES[0], PICTURES[0]], [PICTURES[2], PICTURES[1]]]
    asked += [(f"Ann sees the {marker} and {marker} here", " a letter", pair) for pair in pairs]
    return [*asked, ("Bob carries the heavy", " wheel", []), ("Ann sees the", " quiet engine", [])]


def _requests(family: str) -> list[ScoringRequest]:
    return [ScoringRequest(context, target, images=images) for context, target, images in _asked(family)]


def _open(family: str, **engine: object) -> Session:
    return olive_ext.open(media_export(family)[1], kind="hf", engine=engine)


def _marked(family: str) -> object:
    return pytest.param(family, marks=() if family == FAMILY else pytest.mark.exporters)


@pytest.mark.parametrize("family", [_marked(family) for family in MEDIA_FAMILIES])
def test_scores_and_answers_are_those_of_whole_passes(family: str) -> None:
    reference = _reference(family)
    text = f"Ann sees the {MEDIA_FAMILIES[family].marker} and"
    expected = [reference.score(*one) for one in _asked(family)]
    for chunk_size in (max(map(reference.num_tokens, PICTURES)), 128):
        with _open(family, chunk_size=chunk_size) as session:
            found = session.loglikelihood(_requests(family))
            outputs = session.generate([GenerationRequest(text, max_new_tokens=8, images=[one]) for one in PICTURES])
        for output, logprobs in zip(found, expected, strict=True):
            assert output.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        for one, answer in zip(PICTURES, outputs, strict=True):
            assert reference.continues(reference.ids(text, [one]), [one], answer.tokens, 8)


def test_export_in_fp32_is_as_far_from_its_checkpoint_as_rounding(tmp_path: Path) -> None:
    package, checkpoint = media_export(FAMILY)
    requests = _requests(FAMILY)
    asked = [GenerationRequest(f"{MEDIA_FAMILIES[FAMILY].marker} and", max_new_tokens=8, images=PICTURES[:1])]
    with olive_ext.open(package, reference=str(checkpoint)) as session:
        resident = [output.compared for output in session.loglikelihood(requests)]
        assert session.reference is not None
        assert session.reference.generate(asked)[0].tokens == session.generate(asked)[0].tokens
    assert_as_far_as_rounding(resident, recorded(package, checkpoint, requests, tmp_path))


def test_checkpoint_prepares_pictures_by_its_own_processor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resident that shows in the numbers and is told; recorded the requests are not found."""
    package, checkpoint = media_export(FAMILY)
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    file = other / "preprocessor_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**written, "image_mean": [0.1, 0.2, 0.9]}), encoding="utf-8")
    (request, *_) = _requests(FAMILY)
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
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    file = other / "preprocessor_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    size = {"shortest_edge": 16 * 16, "longest_edge": 16 * 16}
    file.write_text(json.dumps({**written, "size": size}), encoding="utf-8")
    with (
        olive_ext.open(package, reference=str(other)) as session,
        refused(LostRequestsError, "incomplete", holds=("4", "1")),
    ):
        session.loglikelihood(_requests(FAMILY)[:1])


def test_checkpoint_of_text_takes_no_picture() -> None:
    with (
        olive_ext.open(hf_model("llama"), kind="hf") as session,
        refused(OliveExtError, "unsupported", holds="1"),
    ):
        session.loglikelihood([ScoringRequest("and", " stone", images=PICTURES[:1])])


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
