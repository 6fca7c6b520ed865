"""Encoders of pictures and sounds: which items share a run, what each then has, shapes that are run beforehand, and
what an item that cannot be encoded costs."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from PIL import Image

import olive_ext
from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import ConfigError, LostItemError, LostRequestsError, RunError
from olive_ext.media.encoder import MediaEncoder
from olive_ext.media.graphs import ItemGraphs, ShapeCount
from olive_ext.media.items import MediaItem, token_bucket, token_buckets
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import Modality
from olive_ext.session.requests import GenerationRequest, ScoringOutput, ScoringRequest
from tests.agreement.asked import pictures
from tests.agreement.packages import package as package_of
from tests.exports.media import media_export, plain_encoder_export
from tests.exports.step_wide import Edit, edited_encoder
from tests.families.pictures import feature_rows, picture
from tests.refusals import refused


def _encoder(
    package: Path,
    max_rows: int = 1,
    *,
    is_strict: bool = False,
    is_bucketed: bool = False,
    kind: Modality = Modality.IMAGE,
) -> tuple[MediaEncoder, MediaProcessor]:
    model = resolve(ModelSettings(model=str(package)))
    assert model.media is not None
    spec = next(spec for spec in model.media.encoders if spec.modality is kind)
    graphs = ItemGraphs(Device("cpu"), ort.InferenceSession, ShapeCount(is_strict=is_strict), is_bucketed)
    opener = partial(ort.InferenceSession, str(spec.files.graph))
    encoder = MediaEncoder(spec, opener, graphs, max_rows, bind_weights=lambda binding: None)
    return encoder, MediaProcessor(model.media, model.files)


def _pictures(processor: MediaProcessor) -> list[MediaItem]:
    return [processor.item(Modality.IMAGE, one) for one in pictures()]


def test_buckets_are_larger_than_what_they_hold() -> None:
    assert [token_bucket(size) for size in (1, 7, 8, 31, 32, 48, 64)] == [8, 8, 16, 32, 48, 64, 96]
    assert token_buckets(33) == [8, 16, 32, 48]


@pytest.mark.parametrize("is_strict", [False, True])
def test_shape_that_is_met_late_is_counted_or_refused_by_name(is_strict: bool) -> None:
    encoder, processor = _encoder(media_export("qwen2_5_vl", "f32", "webgpu")[0], is_strict=is_strict)
    first, second, _ = _pictures(processor)
    encoder.warm_up([first], [])
    encoder._graphs.count.freeze()
    encoder.features(first)
    if is_strict:
        with refused(RunError, "failed", holds=("pixel_values", "32", "384")):
            encoder.features(second)
    else:
        encoder.features(second)
        assert encoder._graphs.count.describe()["encoder_shapes_late"] == 1


def test_number_of_pictures_that_was_not_run_beforehand_is_an_error_that_names_it() -> None:
    encoder, processor = _encoder(plain_encoder_export("f32", "default"), 1024, is_strict=True)
    first, *items = _pictures(processor)
    encoder.features(first)
    encoder._graphs.count.freeze()
    encoder.expect(items)
    with refused(RunError, "failed", holds=("pixel_values", "32")):
        encoder.features(items[0])


def test_features_beyond_the_budget_are_dropped_least_recently_used_first() -> None:
    encoder, processor = _encoder(media_export("llava")[0])
    items = _pictures(processor)
    encoder.kept.budget = 2 * feature_rows(encoder.features(items[0]))[0].nbytes
    for item in (items[1], items[0], items[2], items[0], items[1]):
        encoder.features(item)
    assert (encoder.encoded, encoder.hits, encoder.evicted) == (4, 2, 2)


def test_picture_that_cannot_be_had_leaves_the_others_of_its_run_as_they_are(tmp_path: Path) -> None:
    encoder, processor = _encoder(media_export("llava")[0], 1024)
    files = [tmp_path / f"{seed}.png" for seed in range(4)]
    for seed, file in enumerate(files):
        picture(seed, 40, 40).save(file)
    processor.kept.budget = 0
    items = [processor.item(Modality.IMAGE, file) for file in files]
    files[1].unlink()
    encoder.expect(items)
    encoder.features(items[0])
    assert encoder.encoded == 2  # of the three that are there, as many as a power of two
    with refused(LostItemError, "media", holds="1.png"):
        encoder.features(items[1])
    encoder.features(items[2])
    encoder.features(items[3])
    assert encoder.encoded == 3


def _fewer(edit: Edit, own: str) -> str:
    return edit.add("Slice", own, *(edit.constant([value]) for value in (0, -1, -2)))


def test_rows_of_features_that_are_not_as_many_as_placeholders_are_an_error_with_both_numbers() -> None:
    encoder, processor = _encoder(edited_encoder("fewer rows", plain_encoder_export("f32", "default"), _fewer))
    with refused(RunError, "failed", holds=("15", "16")):
        encoder.features(_pictures(processor)[0])


def test_bucket_that_changes_a_picture_is_refused_where_shapes_are_to_be_few() -> None:
    """It is filled up with pictures of zeros, which are company, too."""
    engine = {"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    facts = ("model.onnx", "features of an item in a bucket are")
    with refused(ConfigError, "wrong_value", "engine.strict_shapes", holds=facts):
        olive_ext.open(package_of("mean of patches").path, execution_provider="cpu", engine=engine)


def _by_the_brightest(edit: Edit, own: str) -> str:
    """Looks up a row by a picture's brightest pixel, and fails on what is no black one."""
    brightest = edit.add("Ceil", edit.add("ReduceMax", "pixel_values", edit.constant([0, 1, 2, 3]), keepdims=0))
    table, place = edit.constant(np.zeros((1, 64)), np.float32), edit.add("Cast", brightest, to=TensorProto.INT64)
    return edit.add("Add", own, edit.add("Gather", table, place, axis=0))


@pytest.fixture(scope="module")
def choosy() -> Path:
    return edited_encoder("by the brightest", plain_encoder_export("f32", "default"), _by_the_brightest)


@pytest.mark.parametrize("max_rows", [1, 64])
@pytest.mark.parametrize("num_slots", [3, pytest.param(1, marks=pytest.mark.long)])
def test_picture_that_the_encoder_fails_on_costs_its_own_requests(choosy: Path, max_rows: int, num_slots: int) -> None:
    """The bad one is found among several in a run; no good one is encoded twice."""
    dark = [Image.new("RGB", (32, 32), (shade, 0, 0)) for shade in range(4)]
    bright = Image.new("RGB", (30, 50), (255, 255, 255))
    images = [dark[0], bright, dark[1], dark[2], bright, dark[3]]
    asked = [ScoringRequest("<image> and", " stone", images=[one]) for one in images]
    answers = [GenerationRequest("<image> and", max_new_tokens=3, images=[one]) for one in images]
    found = dict[int, ScoringOutput]()
    engine = {"encoder_batch_rows": max_rows, "num_slots": num_slots}
    with olive_ext.open(choosy, engine=engine) as session:
        with pytest.raises(LostRequestsError) as caught:
            found.update(session.as_completed("loglikelihood", [asked]))
        facts = session.describe_execution()
        assert caught.value.lost.keys() == {1, 4}
        for reason in caught.value.lost.values():
            assert not [fact for fact in ("model.onnx", "30 x 50", "Gather") if fact not in reason]
            assert "\n" not in reason
        good = [place for place in range(len(images)) if place not in caught.value.lost]
        expected = session.loglikelihood([asked[place] for place in good])
        assert sorted(found) == good
        logprobs = [one.logprob for one in expected]
        assert [found[place].logprob for place in good] == pytest.approx(logprobs, abs=1e-5)
        with pytest.raises(LostRequestsError) as caught:
            session.generate(answers)
        assert caught.value.lost.keys() == {1, 4}
        assert facts["images_encoded"] == session.describe_execution()["images_encoded"] == len(dark)
    with olive_ext.open(choosy, engine=engine, reference=choosy) as session, pytest.raises(LostRequestsError) as caught:
        session.loglikelihood(asked)
    assert caught.value.lost.keys() == {1, 4}


def test_encoder_with_room_for_one_picture_says_so_by_its_interface(tmp_path: Path) -> None:
    package = Path(shutil.copytree(plain_encoder_export("f32", "default"), tmp_path / "package"))
    proto = onnx.load(package / "vision_encoder" / "model.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, package / "vision_encoder" / "model.onnx")
    with olive_ext.open(package, engine={"encoder_batch_rows": 1024}) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=[one]) for one in pictures()])
        facts = session.describe_execution()
    assert facts["images_one_by_one"] == "'pixel_values' [1, 3, 32, 32] has room for 1"
    config = {"model": {"path": str(package)}, "tasks": ["a"], "engine": {"encoder_batch_rows": 1024}}
    said = check_model(EvaluationConfig.parse(config)).text()
    assert re.search(r"images in a run +one +\('pixel_values' \[1, 3, 32, 32\] has room for 1\)", said), said
    assert (facts["images_encoded"], facts["image_encoder_runs"]) == (3, 3)
