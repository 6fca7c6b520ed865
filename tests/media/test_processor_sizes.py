"""Numbers in a processor's file that size arrays have bounds; those of published processors lie within."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.errors import ModelError
from olive_ext.media.processors import load_feature_extractor, load_image_processor, refuse_sizes
from olive_ext.model.types import TensorSpec
from tests.refusals import refused

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
    ("key", "value"), [("feature_size", 10**9), ("n_fft", 10**9), ("chunk_length", 10**9), ("hop_length", 0)]
)
def test_extractor_of_sound_beyond_bounds_is_refused_before_it_is_made(tmp_path: Path, key: str, value: int) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**WHISPER, key: value}))
    with refused(ModelError, "damaged", key, value, holds="LARGEST_SIZES"):
        load_feature_extractor([tmp_path], TensorSpec("input_features", 1, ("B", 80, 3000)))


def test_processor_of_pictures_beyond_bounds_is_refused_before_it_is_made(tmp_path: Path) -> None:
    content = {**CLIP, "crop_size": {"height": 10**9, "width": 224}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with refused(ModelError, "damaged", "crop_size.height", 1000000000, holds="8192"):
        load_image_processor([tmp_path], None)
