"""Encoders in shape buckets: run beforehand, the same numbers, and a shape that is met late is told or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.engine.media import token_bucket, token_buckets
from olive_ext.engine.runners.ort.encoder_shapes import EncoderShapes
from olive_ext.engine.runners.ort.media_encoder import MediaEncoder
from olive_ext.errors import RunError
from olive_ext.media import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.media_types import Modality
from olive_ext.model.types import Device
from olive_ext.text.requests import ScoringRequest
from tests.exports.media import MEDIA_FAMILIES, media_export, plain_encoder_export
from tests.families.pictures import PictureReference, picture

pytestmark = pytest.mark.slow

PICTURES = [picture(0, 40, 40), picture(1, 60, 30), picture(2, 24, 70)]


@pytest.fixture(scope="module")
def package() -> Path:
    """Its caches are written in place, so that steps can have buckets, too."""
    return media_export("qwen2_5_vl", "f32", "webgpu")[0]


def _encoder(package: Path, *, is_bucketed: bool, is_strict: bool) -> tuple[MediaEncoder, MediaProcessor]:
    model = resolve(ModelSettings(model=str(package)))
    assert model.media is not None
    (spec,) = model.media.encoders
    shapes = EncoderShapes(spec, is_bucketed=is_bucketed, is_strict=is_strict)
    graph = str(spec.files.graph)
    encoder = MediaEncoder(spec, Device("cpu"), lambda: ort.InferenceSession(graph), ort.InferenceSession, shapes)
    return encoder, MediaProcessor(model.media, model.files)


def test_buckets_are_larger_than_what_they_hold() -> None:
    assert [token_bucket(size) for size in (1, 7, 8, 31, 32, 48, 64)] == [8, 8, 16, 32, 48, 64, 96]
    assert token_buckets(33) == [8, 16, 32, 48]


def test_strict_session_runs_every_shape_beforehand_and_gives_transformers_numbers(package: Path) -> None:
    reference, marker = (
        PictureReference("qwen2_5_vl", media_export("qwen2_5_vl")[1]),
        MEDIA_FAMILIES["qwen2_5_vl"].marker,
    )
    asked = [(f"Ann sees the {marker} and", " blue stone", [one]) for one in PICTURES]
    asked.append((f"{marker} and {marker}", " letter", PICTURES[:2]))
    with olive_ext.open(
        package, execution_provider="cpu", engine={"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    ) as session:
        found = session.loglikelihood([ScoringRequest(text, target, images=images) for text, target, images in asked])
        facts = session.describe_execution()
    for output, one in zip(found, asked, strict=True):
        assert output.token_logprobs == pytest.approx(reference.score(*one), abs=1e-4)
    assert facts["encoder_shapes_warmed"] == 3  # pictures of up to 16 tokens: the buckets 8, 16, 32
    assert (facts["encoder_shapes_late"], facts["shapes_late"]) == (0, 0)
    assert facts["images_encoded"] == len(PICTURES)


def test_features_in_a_bucket_are_those_without(package: Path) -> None:
    plain, processor = _encoder(package, is_bucketed=False, is_strict=False)
    bucketed, _ = _encoder(package, is_bucketed=True, is_strict=False)
    for one in PICTURES:
        item = processor.item(Modality.IMAGE, one)
        features = [encoder.features(item)[0].numpy() for encoder in (plain, bucketed)]
        np.testing.assert_allclose(*features, atol=1e-4 * np.abs(features[0]).max())


@pytest.mark.parametrize("is_strict", [False, True])
def test_shape_that_is_met_late_is_counted_or_refused_by_name(package: Path, is_strict: bool) -> None:
    encoder, processor = _encoder(package, is_bucketed=False, is_strict=is_strict)
    first, second = (processor.item(Modality.IMAGE, one) for one in PICTURES[:2])
    encoder.warm_up([first])
    encoder.features(first)
    if is_strict:
        with pytest.raises(RunError, match=r"the image encoder was not run with 'pixel_values' \[32, 384\]"):
            encoder.features(second)
    else:
        encoder.features(second)
        assert encoder.describe()["encoder_shapes_late"] == 1


def test_encoder_of_one_size_has_one_shape() -> None:
    package = plain_encoder_export("f32", "webgpu")
    with olive_ext.open(
        package, execution_provider="cpu", engine={"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    ) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=[one]) for one in PICTURES])
        facts = session.describe_execution()
    assert (facts["encoder_shapes_warmed"], facts["encoder_shapes_late"]) == (1, 0)


def test_features_beyond_the_budget_are_dropped_least_recently_used_first() -> None:
    encoder, processor = _encoder(media_export("llava")[0], is_bucketed=False, is_strict=False)
    items = [processor.item(Modality.IMAGE, one) for one in PICTURES]
    encoder.budget = 2 * encoder.features(items[0])[0].numpy().nbytes
    for item in (items[1], items[0], items[2], items[0], items[1]):
        encoder.features(item)
    counters = encoder.counters
    assert (counters.encoded, counters.hits, counters.evicted) == (4, 2, 2)
