"""Items of pictures: by content, sent to other processes, and processors that are not understood.

Numbers in a processor's file that size arrays have bounds; those of published processors lie within.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.errors import LostItemError, ModelError, TaskError
from olive_ext.media.items import token_bucket, token_buckets
from olive_ext.media.processor import MediaProcessor
from olive_ext.media.processors import (
    load_feature_extractor,
    load_image_processor,
    load_sound_processor,
    other_image_processor,
    refuse_sizes,
)
from olive_ext.model.types import GraphFiles, MediaEncoderSpec, MediaSpec, Modality, ModelFiles, TensorSpec
from tests.families.pictures import picture
from tests.refusals import refused

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
}


def _processor(folder: Path, config: dict[str, Any], hf_config: dict[str, Any] | None = None) -> MediaProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    features = TensorSpec("image_features", 1, ("rows", 64))
    encoder = MediaEncoderSpec(
        Modality.IMAGE, 99, "vision", GraphFiles(folder / "v.onnx"), (), (features,), (features,)
    )
    return MediaProcessor(MediaSpec((encoder,)), ModelFiles(folder / "decoder.onnx", folder, {}, hf_config or {}, ""))


def _steps(*operations: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    transforms = [{"operation": {"name": name, "type": name, "attrs": attrs}} for name, attrs in operations]
    return {"processor": {"name": "image", "transforms": transforms}}


def test_item_that_is_sent_to_another_process_makes_the_same_pixels(tmp_path: Path) -> None:
    picture(0, 40, 24).save(tmp_path / "a.png")
    processor = _processor(tmp_path, QWEN)
    for given in (picture(0, 40, 24), tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
        item = processor.item(Modality.IMAGE, given)
        content = pickle.dumps(item)
        assert str(tmp_path).encode() not in pickle.dumps(item.load)  # the other process may not see the file
        sent = _processor(tmp_path, QWEN).adopt(pickle.loads(content))
        assert sent == item
        np.testing.assert_array_equal(sent.load()["pixel_values"], item.load()["pixel_values"])


def test_file_that_holds_another_picture_by_now_or_none_is_refused_where_it_is_wanted(tmp_path: Path) -> None:
    """One that is gone costs the requests that have it: nothing else of a chunk is kept from being sent."""
    file, processor = tmp_path / "a.png", _processor(tmp_path, QWEN)
    picture(0, 40, 24).save(file)
    item = processor.item(Modality.IMAGE, file)
    picture(1, 40, 24).save(file)
    sent = _processor(tmp_path, QWEN).adopt(pickle.loads(pickle.dumps(item)))
    with refused(TaskError, "task", holds="a picture"):
        sent.load()
    file.unlink()
    received = _processor(tmp_path, QWEN).adopt(pickle.loads(pickle.dumps(item)))
    with refused(LostItemError, "media", holds="a.png") as caught:
        received.arrays()
    assert caught.value.key == item.key


def test_item_that_the_processor_does_not_take_is_refused(tmp_path: Path) -> None:
    with refused(TaskError, "unsupported", holds=("sound", "pictures")):
        _processor(tmp_path, QWEN).item(Modality.AUDIO, b"")
    with refused(TaskError, "media", holds=("6", "5")):
        _processor(tmp_path, {**QWEN, "image_mean": [0.5, 0.5]}).item(Modality.IMAGE, picture(0, 6, 5))


def test_number_of_tokens_is_the_configs_where_the_processor_has_none(tmp_path: Path) -> None:
    siglip = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}
    item = _processor(tmp_path, siglip, {"image_seq_length": 16}).item(Modality.IMAGE, picture(0, 9, 9))
    assert item.num_tokens == 16
    with refused(ModelError, "unsupported", holds="image_seq_length"):
        _processor(tmp_path, siglip).item(Modality.IMAGE, picture(0, 9, 9))


@pytest.mark.parametrize("most", [1, 7, 8, 13, 33, 47, 64, 100])
def test_dummies_are_of_every_bucket_that_a_picture_can_be_in(tmp_path: Path, most: int) -> None:
    processor = _processor(tmp_path, {**QWEN, "size": {"shortest_edge": 256, "longest_edge": 64 * 256}})
    items = processor.dummies(most)
    assert {token_bucket(item.num_tokens) for item in items} == set(token_buckets(min(most, 64)))
    assert all(item.num_tokens <= most for item in items)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_steps(("Gemma4ImageTransform", {"patch_size": 4, "max_soft_tokens": 70})), "Gemma4ImageProcessorPil"),
        (_steps(("Resize", {"smart_resize": 1, "patch_size": 8, "merge_size": 2})), "Qwen2VLImageProcessorPil"),
        (_steps(("Resize", {"height": 32, "width": 32}), ("Normalize", {})), "CLIPImageProcessorPil"),
    ],
)
def test_file_of_onnxruntime_extensions_is_read(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    (tmp_path / "vision.json").write_text(json.dumps(content), encoding="utf-8")
    processor, file = load_image_processor([tmp_path], "vision.json")
    assert (type(processor).__name__, file) == (expected, tmp_path / "vision.json")


@pytest.mark.parametrize(
    ("size", "what"),
    [
        ({}, None),
        ({"min_pixels": 784}, "prepares pictures with size {'longest_edge': 4096, 'shortest_edge': 784} for "),
        ({"patch_size": 14}, "prepares pictures with patch_size 14 for 8 of preprocessor_config.json"),
    ],
)
def test_processor_of_onnxruntime_extensions_is_held_against_the_one_in_use(
    size: dict[str, int], what: str | None, tmp_path: Path
) -> None:
    own = {"smart_resize": 1, "patch_size": 8, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096, **size}
    used = {**QWEN, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    for file, content in (("vision", _steps(("Resize", own))), ("preprocessor_config", used)):
        assert other_image_processor([tmp_path], "vision.json") == {}
        (tmp_path / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    found = other_image_processor([tmp_path], "vision.json")
    assert [*found] == ["vision.json"] * (what is not None)
    assert found.get("vision.json", "").startswith(what or "")


def test_processor_that_is_missing_or_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    with refused(ModelError, "not_found"):
        load_image_processor([tmp_path], None)
    for name in ("../vision.json", "/etc/vision.json"):
        with refused(ModelError, "untrusted", holds="model.vision.config_filename"):
            load_image_processor([tmp_path], name)
    content = _steps(("Phi3ImageTransform", {}))
    (tmp_path / "processor_config.json").write_text(json.dumps(content), encoding="utf-8")
    with refused(ModelError, "unsupported", holds="Phi3ImageTransform"):
        load_image_processor([tmp_path], None)
    config = {"processor_class": "Trainer", "feature_extractor": {}}  # of transformers, and no processor
    (tmp_path / "processor_config.json").write_text(json.dumps(config), encoding="utf-8")
    with refused(ModelError, "unsupported", holds="Trainer"):
        load_sound_processor([tmp_path])


@pytest.mark.parametrize(
    ("auto", "load"),
    [
        ("ImageProcessor", lambda folder: load_image_processor([folder], None)),
        ("FeatureExtractor", lambda folder: load_feature_extractor([folder], TensorSpec("x", 1, ("B", 80, 3000)))),
    ],
)
def test_python_beside_a_processor_is_neither_run_nor_asked_about(tmp_path: Path, auto: str, load: Any) -> None:
    kind = "image_processor_type" if auto == "ImageProcessor" else "feature_extractor_type"
    config = {kind: "Own", "auto_map": {f"Auto{auto}": "own.Own"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    with refused(ModelError, "unsupported", holds=auto):
        load(tmp_path)


WHISPER = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": 16000}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}, "crop_size": 224}
PUBLISHED: list[dict[str, Any]] = [
    {"chunk_length": 30, "feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 480000, **WHISPER},
    {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2},
    {"feature_extractor": {"fft_length": 512, "frame_length": 512}, "image_seq_length": 256},
    {"image_processor": {"size": {"height": 896, "width": 896}, "patch_size": {"height": 14, "width": 14}}},
    {"max_pixels": 1003520, "min_pixels": 3136, "num_crops": 16, "nb_max_frames": 3000},
]


@pytest.mark.parametrize("content", PUBLISHED)
def test_sizes_of_published_processors_are_taken_and_read(content: dict[str, Any]) -> None:
    file = Path("preprocessor_config.json")
    refuse_sizes(content, file)
    with pytest.raises(ModelError) as raised:
        refuse_sizes(negative(content), file)
    assert (raised.value.code, raised.value.value < 0) == ("damaged", True)


def negative(content: Any) -> Any:
    """The content with every number below its least."""
    if isinstance(content, dict):
        return {key: negative(value) for key, value in content.items()}
    return -content if isinstance(content, int) else content


@pytest.mark.parametrize(
    ("content", "key", "value", "bound"),
    [
        *(
            ({**WHISPER, key: value}, key, value, "LARGEST_SIZES")
            for key, value in (("feature_size", 10**9), ("n_fft", 10**9), ("chunk_length", 10**9), ("hop_length", 0))
        ),
        ({**CLIP, "crop_size": {"height": 10**9, "width": 224}}, "crop_size.height", 10**9, "8192"),
    ],
)
def test_processor_beyond_bounds_is_refused_before_it_is_made(
    tmp_path: Path, content: dict[str, Any], key: str, value: int, bound: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with refused(ModelError, "damaged", key, value, holds=bound):
        if "image_processor_type" in content:
            load_image_processor([tmp_path], None)
        else:
            load_feature_extractor([tmp_path], TensorSpec("input_features", 1, ("B", 80, 3000)))
