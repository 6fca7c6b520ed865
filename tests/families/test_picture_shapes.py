"""Encoders in shape buckets: run beforehand, the same numbers, and a shape that is met late is told or refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from PIL import Image

import olive_ext
from olive_ext.check.model_check import check_model
from olive_ext.config import EvaluationConfig, ModelSettings
from olive_ext.errors import LostItemError, LostRequestsError, RunError
from olive_ext.media.encoder import MediaEncoder
from olive_ext.media.graphs import ItemGraphs, ShapeCount
from olive_ext.media.items import MediaItem, token_bucket, token_buckets
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.media_types import MediaEncoderSpec, Modality
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports.media import MEDIA_FAMILIES, media_export, plain_encoder_export
from tests.families.pictures import PictureReference, feature_rows, picture
from tests.families.sounds import sound
from tests.refusals import refused

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
    return _opened(spec, is_bucketed, is_strict), MediaProcessor(model.media, model.files)


def _opened(spec: MediaEncoderSpec, is_bucketed: bool, is_strict: bool, max_rows: int = 1) -> MediaEncoder:
    graphs = ItemGraphs(Device("cpu"), ort.InferenceSession, ShapeCount(is_strict=is_strict), is_bucketed)
    return MediaEncoder(spec, lambda: ort.InferenceSession(str(spec.files.graph)), graphs, max_rows)


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
    # Pictures of up to 16 tokens: the encoder in the buckets 8, 16, 32 and once without; each bucket's rows picked;
    # steps of 8, 16 and 32 tokens: features put in their places, embedded, brought to the decoder.
    assert facts["encoder_shapes_warmed"] == 4 + 3 + 3 * 3
    assert (facts["encoder_shapes_late"], facts["shapes_late"]) == (0, 0)
    assert facts["images_encoded"] == len(PICTURES)


def test_features_in_a_bucket_are_those_without(package: Path) -> None:
    plain, processor = _encoder(package, is_bucketed=False, is_strict=False)
    bucketed, _ = _encoder(package, is_bucketed=True, is_strict=False)
    for one in PICTURES:
        item = processor.item(Modality.IMAGE, one)
        features = [feature_rows(encoder.features(item))[0] for encoder in (plain, bucketed)]
        np.testing.assert_allclose(*features, atol=1e-4 * np.abs(features[0]).max())


@pytest.mark.parametrize("is_strict", [False, True])
def test_shape_that_is_met_late_is_counted_or_refused_by_name(package: Path, is_strict: bool) -> None:
    encoder, processor = _encoder(package, is_bucketed=False, is_strict=is_strict)
    first, second = (processor.item(Modality.IMAGE, one) for one in PICTURES[:2])
    encoder.warm_up([first], [])
    encoder._graphs.count.freeze()
    encoder.features(first)
    if is_strict:
        with refused(RunError, "failed", holds=("pixel_values", "32", "384")):
            encoder.features(second)
    else:
        encoder.features(second)
        assert encoder._graphs.count.describe()["encoder_shapes_late"] == 1


def test_encoder_of_one_size_has_one_shape() -> None:
    package = plain_encoder_export("f32", "webgpu")
    with olive_ext.open(
        package, execution_provider="cpu", engine={"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    ) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=[one]) for one in PICTURES])
        facts = session.describe_execution()
    # The encoder's, what is picked of it, and three graphs for steps of 8, 16 and 32 tokens.
    assert (facts["encoder_shapes_warmed"], facts["encoder_shapes_late"]) == (1 + 1 + 3 * 3, 0)


def test_features_beyond_the_budget_are_dropped_least_recently_used_first() -> None:
    encoder, processor = _encoder(media_export("llava")[0], is_bucketed=False, is_strict=False)
    items = [processor.item(Modality.IMAGE, one) for one in PICTURES]
    encoder.kept.budget = 2 * feature_rows(encoder.features(items[0]))[0].nbytes
    for item in (items[1], items[0], items[2], items[0], items[1]):
        encoder.features(item)
    counters = encoder.counters
    assert (counters.encoded, counters.hits, counters.evicted) == (4, 2, 2)


def _batched(
    package: Path, max_rows: int, *, is_strict: bool = False, is_bucketed: bool = False, kind: Modality = Modality.IMAGE
) -> tuple[MediaEncoder, MediaProcessor]:
    model = resolve(ModelSettings(model=str(package)))
    assert model.media is not None
    spec = next(spec for spec in model.media.encoders if spec.modality is kind)
    return _opened(spec, is_bucketed, is_strict, max_rows), MediaProcessor(model.media, model.files)


def _assert_as_alone(package: Path, encoder: MediaEncoder, items: list[MediaItem]) -> None:
    alone, _ = _batched(package, 1, kind=items[0].modality)
    encoder.expect(items)
    for item in items:
        for found, expected in zip(
            feature_rows(encoder.features(item)), feature_rows(alone.features(item)), strict=True
        ):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert alone.counters.runs == len(items)


SIZES = [(40, 40), (60, 30), (24, 70), (64, 64), (30, 30), (50, 20), (20, 60), (64, 40), (33, 33), (48, 48)]
"""Of 4 to 16 tokens."""


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.exporters) for name in ("qwen3_5", "qwen3_vl"))],
)
@pytest.mark.parametrize(("is_bucketed", "max_rows", "runs"), [(False, 1024, 2), (False, 24, 4), (True, 1024, 2)])
def test_pictures_of_any_size_with_a_grid_are_encoded_together(
    family: str, is_bucketed: bool, max_rows: int, runs: int
) -> None:
    """Ten pictures: as many as `max_rows` has room for and a power of two, seven in a bucket; each as it is alone."""
    package, _ = media_export(family)
    encoder, processor = _batched(package, max_rows, is_bucketed=is_bucketed)
    items = [processor.item(Modality.IMAGE, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    assert len({item.num_tokens for item in items}) > 2
    _assert_as_alone(package, encoder, items)
    assert (encoder.counters.encoded, encoder.counters.runs) == (len(items), runs)


def test_strict_encoder_with_a_grid_runs_every_bucket_of_several_pictures_beforehand() -> None:
    package, _ = media_export("qwen2_5_vl")
    encoder, processor = _batched(package, 64, is_strict=True, is_bucketed=True)
    encoder.warm_up(processor.dummies(512), [])
    encoder._graphs.count.freeze()
    warmed = encoder._graphs.count.describe()["encoder_shapes_warmed"]
    rng = np.random.default_rng(0)
    for number in range(30):
        sizes = rng.integers(16, 80, (rng.integers(1, 9), 2)).tolist()
        items = [processor.item(Modality.IMAGE, picture(100 * number + n, *size)) for n, size in enumerate(sizes)]
        encoder.expect(items)
        for item in items:
            encoder.features(item)
    facts = {**encoder.describe(), **encoder._graphs.count.describe()}
    assert (facts["encoder_shapes_warmed"], facts["encoder_shapes_late"]) == (warmed, 0)
    assert facts["image_encoder_runs"] < facts["images_encoded"] / 3
    # One picture in 8, 16 and 32 tokens, and once without a bucket; several in 16, 32, 48, 64 and 96; rows of all sizes
    # are picked.
    assert warmed == 4 + 5 + 6


def test_strict_session_encodes_pictures_of_any_size_together(package: Path) -> None:
    engine = {"strict_shapes": True, "num_slots": 2, "chunk_size": 16}
    marker = MEDIA_FAMILIES["qwen2_5_vl"].marker
    asked = [
        ScoringRequest(f"{marker} and", " stone", images=[picture(seed, *size)]) for seed, size in enumerate(SIZES)
    ]
    found, runs = [], []
    for more in ({}, {"encoder_batch_rows": 64}):
        with olive_ext.open(package, execution_provider="cpu", engine={**engine, **more}) as session:
            found.append([output.logprob for output in session.loglikelihood(asked)])
            facts = session.describe_execution()
        assert (facts["images_encoded"], facts["encoder_shapes_late"]) == (len(SIZES), 0)
        runs.append(facts["image_encoder_runs"])
    assert runs == [len(SIZES), 2]
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.exporters
@pytest.mark.parametrize(("max_rows", "runs"), [(1024, 3), (120, 4)])
def test_sounds_of_any_length_with_a_mask_are_encoded_together(max_rows: int, runs: int) -> None:
    """Filled up to the longest, which counts as rows of each; 4, 2 and 1 of them in a run where all have room."""
    package, _ = media_export("gemma4_any")
    encoder, processor = _batched(package, max_rows, kind=Modality.AUDIO)
    items = [processor.item(Modality.AUDIO, sound(seed, 9000 + 4000 * seed)) for seed in range(7)]
    assert len({item.num_tokens for item in items}) == len(items)
    _assert_as_alone(package, encoder, items)
    assert (encoder.counters.encoded, encoder.counters.runs) == (len(items), runs)


@pytest.mark.exporters
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_asr", Modality.AUDIO), ("gemma3", Modality.IMAGE), ("gemma4_vl", Modality.IMAGE)],
)
def test_encoder_that_has_one_item_built_in_gets_them_one_by_one_and_says_so(family: str, kind: Modality) -> None:
    package, _ = media_export(family)
    encoder, processor = _batched(package, 1024, kind=kind)
    given = {Modality.AUDIO: lambda seed: sound(seed, 16000), Modality.IMAGE: lambda seed: picture(seed, 40, 40)}[kind]
    items = [processor.item(kind, given(seed)) for seed in range(4)]
    _assert_as_alone(package, encoder, items)
    assert (encoder.counters.encoded, encoder.counters.runs) == (4, 4)
    (reason,) = [why for name, why in encoder.describe().items() if name.endswith("s_one_by_one")]
    assert reason.startswith("several together fail: ")


@pytest.mark.parametrize("max_rows", [16 * 4, 16 * 7])
def test_pictures_that_wait_are_encoded_together_up_to_a_number_offeature_rows(max_rows: int) -> None:
    """Ten pictures of 16 rows, four at most in a run, each as it is alone."""
    encoder, processor = _batched(media_export("llava")[0], max_rows)
    alone, _ = _batched(media_export("llava")[0], 1)
    items = [processor.item(Modality.IMAGE, picture(seed, 40, 40)) for seed in range(10)]
    encoder.expect(items)
    for item in [*items, items[3]]:
        for found, expected in zip(
            feature_rows(encoder.features(item)), feature_rows(alone.features(item)), strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    counters = encoder.counters
    assert (counters.encoded, counters.runs, counters.hits) == (10, 3, 1)  # 4 + 4 + 2


def test_picture_that_cannot_be_had_leaves_the_others_of_its_run_as_they_are(tmp_path: Path) -> None:
    encoder, processor = _batched(media_export("llava")[0], 1024)
    files = [tmp_path / f"{seed}.png" for seed in range(4)]
    for seed, file in enumerate(files):
        picture(seed, 40, 40).save(file)
    processor.kept.budget = 0
    items = [processor.item(Modality.IMAGE, file) for file in files]
    files[1].unlink()
    encoder.expect(items)
    encoder.features(items[0])
    assert encoder.counters.encoded == 2  # of the three that are there, as many as a power of two
    with refused(LostItemError, "media", holds="1.png"):
        encoder.features(items[1])
    encoder.features(items[2])
    encoder.features(items[3])
    assert encoder.counters.encoded == 3


def _with_encoder(folder: Path, *nodes: onnx.NodeProto, batch: int | str = "batch", weights: Any = ()) -> Path:
    """The LLaVA package with an encoder of these nodes, from the pixels to rows of features."""
    package = folder / "package"
    shutil.copytree(plain_encoder_export("f32", "default"), package)
    file = package / "vision_encoder" / "model.onnx"
    proto = onnx.load(file)
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(weights)
    if nodes:
        proto.graph.node[3].output[0] = "own"
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("pixel_values", 1, [batch, 3, 32, 32]))
    onnx.save(proto, file)
    return package


def test_encoder_whose_pictures_see_each_other_gets_them_one_by_one(tmp_path: Path) -> None:
    """Features less their mean over all pictures of a run: what a normalization over the wrong axis does."""
    axes = numpy_helper.from_array(np.array([0]), "axes")
    mean = helper.make_node("ReduceMean", ["own", "axes"], ["mean"], keepdims=1)
    package = _with_encoder(
        tmp_path, mean, helper.make_node("Sub", ["own", "mean"], ["image_features"]), weights=[axes]
    )
    encoder, processor = _batched(package, 1024)
    items = [processor.item(Modality.IMAGE, one) for one in PICTURES]
    encoder.expect(items)
    for item in items:
        encoder.features(item)
    assert (encoder.counters.encoded, encoder.counters.runs) == (3, 3)
    assert "features of 2 together are" in encoder.describe()["images_one_by_one"]


def test_rows_of_features_that_are_not_as_many_as_placeholders_are_an_error_with_both_numbers(tmp_path: Path) -> None:
    bounds = [numpy_helper.from_array(np.array([value]), name) for name, value in (("from", 0), ("to", -1), ("of", -2))]
    fewer = helper.make_node("Slice", ["own", "from", "to", "of"], ["image_features"])
    encoder, processor = _batched(_with_encoder(tmp_path, fewer, weights=bounds), 1)
    with refused(RunError, "failed", holds=("15", "16")):
        encoder.features(processor.item(Modality.IMAGE, PICTURES[0]))


@pytest.fixture(scope="module")
def choosy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose encoder looks up a row by a picture's brightest pixel, and fails on what is no black one."""
    folder = tmp_path_factory.mktemp("choosy")
    nodes = [
        helper.make_node("ReduceMax", ["pixel_values", "all"], ["brightest"], keepdims=0),
        helper.make_node("Ceil", ["brightest"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["place"], to=7),
        helper.make_node("Gather", ["table", "place"], ["row"], axis=0, name="positions"),
        helper.make_node("Add", ["own", "row"], ["image_features"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([0, 1, 2, 3]), "all"),
        numpy_helper.from_array(np.zeros((1, 64), np.float32), "table"),
    ]
    return _with_encoder(folder, *nodes, weights=weights)


@pytest.mark.parametrize("max_rows", [1, 64])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_picture_that_the_encoder_fails_on_costs_its_own_requests(choosy: Path, max_rows: int, num_slots: int) -> None:
    """The bad one is found among several in a run; no good one is encoded twice."""
    dark = [Image.new("RGB", (32, 32), (shade, 0, 0)) for shade in range(4)]
    bright = Image.new("RGB", (30, 50), (255, 255, 255))
    images = [dark[0], bright, dark[1], dark[2], bright, dark[3]]
    asked = [ScoringRequest("<image> and", " stone", images=[one]) for one in images]
    answers = [GenerationRequest("<image> and", max_new_tokens=3, images=[one]) for one in images]
    found: dict[int, float] = {}
    engine = {"encoder_batch_rows": max_rows, "num_slots": num_slots}
    with olive_ext.open(choosy, engine=engine) as session:
        with pytest.raises(LostRequestsError) as caught:
            session.loglikelihood(asked, on_result=lambda place, output: found.__setitem__(place, output.logprob))
        facts = session.describe_execution()
        assert caught.value.lost.keys() == {1, 4}
        for reason in caught.value.lost.values():
            assert re.match(
                r"ONNX Runtime failed in '.*model\.onnx' on a picture of 30 x 50 pixels: .*positions", reason
            )
            assert "\n" not in reason
        good = [place for place in range(len(images)) if place not in caught.value.lost]
        expected = session.loglikelihood([asked[place] for place in good])
        assert found == pytest.approx({place: one.logprob for place, one in zip(good, expected, strict=True)}, abs=1e-5)
        with pytest.raises(LostRequestsError) as caught:
            session.generate(answers)
        assert caught.value.lost.keys() == {1, 4}
        assert facts["images_encoded"] == session.describe_execution()["images_encoded"] == len(dark)
    with olive_ext.open(choosy, engine=engine, reference=choosy) as session, pytest.raises(LostRequestsError) as caught:
        session.loglikelihood(asked)
    assert caught.value.lost.keys() == {1, 4}


def test_encoder_with_room_for_one_picture_is_told_by_its_interface(tmp_path: Path) -> None:
    package = _with_encoder(tmp_path, batch=1)
    with olive_ext.open(package, engine={"encoder_batch_rows": 1024}) as session:
        session.loglikelihood([ScoringRequest("<image> and", " stone", images=[one]) for one in PICTURES])
        facts = session.describe_execution()
    assert facts["images_one_by_one"] == "'pixel_values' [1, 3, 32, 32] has room for 1"
    config = {"model": {"path": str(package)}, "tasks": ["a"], "engine": {"encoder_batch_rows": 1024}}
    said = check_model(EvaluationConfig.parse(config)).text()
    assert re.search(r"images in a run +one +\('pixel_values' \[1, 3, 32, 32\] has room for 1\)", said), said
    assert (facts["images_encoded"], facts["image_encoder_runs"]) == (3, 3)


def test_strict_session_runs_every_number_of_pictures_beforehand() -> None:
    package = plain_encoder_export("f32", "webgpu")
    engine = {"strict_shapes": True, "num_slots": 2, "chunk_size": 16, "encoder_batch_rows": 64}
    asked = [ScoringRequest("<image> and", " stone", images=[picture(seed, 32, 32)]) for seed in range(7)]
    with olive_ext.open(package, execution_provider="cpu", engine=engine) as session:
        found = session.loglikelihood(asked)
        facts = session.describe_execution()
    # 1, 2 and 4 pictures and what is picked of them, and three graphs for steps of 8, 16 and 32 tokens.
    assert (facts["encoder_shapes_warmed"], facts["encoder_shapes_late"]) == (3 + 3 + 3 * 3, 0)
    assert (facts["images_encoded"], facts["image_encoder_runs"]) == (7, 3)
    with olive_ext.open(package, execution_provider="cpu") as session:
        expected = session.loglikelihood(asked)
        assert session.describe_execution()["image_encoder_runs"] == 7  # on the CPU one by one
    for one, other in zip(found, expected, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)


def test_number_of_pictures_that_was_not_run_beforehand_is_an_error_that_names_it() -> None:
    encoder, processor = _batched(plain_encoder_export("f32", "default"), 1024, is_strict=True)
    first, *items = (processor.item(Modality.IMAGE, one) for one in PICTURES)
    encoder.features(first)
    encoder._graphs.count.freeze()
    encoder.expect(items)
    with refused(RunError, "failed", holds=("pixel_values", "32")):
        encoder.features(items[0])
