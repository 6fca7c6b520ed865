"""What counts as a picture, and what a bad one is told. What counts as a sound, and what a bad one is told."""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from scipy.io import wavfile
from transformers import WhisperFeatureExtractor

from olive_ext.errors import ModelError, TaskError
from olive_ext.media.pictures import data_of_url, media_digest, read_picture, thumbnail
from olive_ext.media.processor import SoundProcessor, read_sound, refuse_non_finite
from olive_ext.media.processors import torch_threads
from olive_ext.model.types import ModelFiles, TensorSpec
from tests.families.pictures import picture, wav
from tests.refusals import refused


def _png(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def _animated() -> bytes:
    file = io.BytesIO()
    picture(0, 8, 8).save(file, "GIF", save_all=True, append_images=[picture(1, 8, 8)])
    return file.getvalue()


def test_shades_of_16_bits_are_those_of_8() -> None:
    shades = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    for given in (Image.fromarray(shades), _png(Image.fromarray(shades)), Image.fromarray(shades).convert("I")):
        np.testing.assert_array_equal(np.asarray(read_picture(given))[..., 0], shades >> 8)


def test_photograph_with_what_a_camera_adds_is_the_photograph() -> None:
    file = io.BytesIO()
    picture(0, 8, 8).save(file, "MPO", save_all=True, append_images=[picture(1, 4, 4)])
    assert read_picture(file.getvalue()).size == (8, 8)


@pytest.mark.parametrize(
    "url",
    ["https://example.com/a.png", "file:///etc/passwd", "data:image/png,abc", "data:image/png;base64,@@@", ""],
)
def test_url_that_would_be_fetched_or_has_no_base64_is_refused(url: str) -> None:
    with refused(TaskError, "media", holds="base64"):
        data_of_url(url)
    if url:
        with refused(TaskError, "media", holds="base64"):
            read_picture(url)


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "RGBA", "1", "I;16"])
def test_picture_of_another_mode_becomes_rgb(mode: str) -> None:
    grey = Image.fromarray(np.full((4, 6), 200, np.uint16)) if mode == "I;16" else picture(0, 6, 4).convert(mode)
    found = read_picture(grey)
    assert (found.mode, found.size) == ("RGB", (6, 4))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (_png(picture(0, 40, 40))[:600], {"code": "media"}),
        (b"not a picture at all", {"code": "media"}),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", {"code": "media"}),
        (b"", {"code": "media"}),
        (Image.new("RGB", (0, 5)), {"code": "media", "holds": ("0", "5")}),
        (Image.new("RGB", (20000, 1)), {"code": "too_large", "holds": ("20000", "16384")}),
        (Image.new("RGB", (1, 201)), {"code": "media", "holds": ("201", "200")}),
        (Image.fromarray(np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)), {"code": "media"}),
        (Image.new("I", (4, 4), 1 << 20), {"code": "media"}),
        ("x" * 5000, {"code": "media"}),
        (_animated(), {"code": "media", "holds": "2"}),
        ("/nowhere/at/all.png", {"code": "media", "holds": "/nowhere/at/all"}),
        (np.zeros((4, 4, 3)), {"code": "media"}),
        (None, {"code": "media"}),
    ],
)
def test_bad_picture_is_refused_in_one_line(given: Any, error: dict[str, Any]) -> None:
    with refused(TaskError, **error) as caught:
        read_picture(given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("is_opened", [False, True])
def test_truncated_file_is_refused_where_a_library_accepts_it(is_opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmms-eval sets this switch of PIL's for the whole process."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    content = _png(picture(0, 40, 40))[:600]
    with refused(TaskError, "media"):
        read_picture(Image.open(io.BytesIO(content)) if is_opened else content)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_thumbnail_is_a_small_jpeg_of_the_picture() -> None:
    url = thumbnail(_png(picture(0, 640, 320)))
    found = Image.open(io.BytesIO(data_of_url(url)))
    assert (found.format, found.size) == ("JPEG", (128, 64))
    assert Image.open(io.BytesIO(data_of_url(thumbnail(picture(0, 5, 8))))).size == (5, 8)


def test_digest_of_a_request_is_of_all_samples_and_pixels() -> None:
    silence, click = np.zeros(4000, np.float32), np.zeros(4000, np.float32)
    click[2000] = 1
    sounds = [[{"audio": {"array": array, "sampling_rate": 8000}}] for array in (silence, silence + 0, click)]
    for one, same, other in (sounds, [[{"visual": [picture(seed, 6, 4)]}] for seed in (0, 0, 1)]):
        assert media_digest(one) == media_digest(same) != media_digest(other)


def test_digest_of_a_request_is_of_colours_and_not_of_their_numbers() -> None:
    """Two pictures of the same numbers with other palettes, or turned by their EXIF, are two."""
    red, blue, turned = Image.new("P", (4, 6)), Image.new("P", (4, 6)), picture(0, 4, 6)
    red.putpalette([255, 0, 0] * 256)
    blue.putpalette([0, 0, 255] * 256)
    turned.getexif()[274] = 3
    digests = {media_digest([{"visual": [image]}]) for image in (red, blue, turned, picture(0, 4, 6))}
    assert len(digests) == 4


RATE = 16000
WHISPER = TensorSpec("audio_features", 1, ("batch", 80, 3000))


def _processor(folder: Path, source: TensorSpec = WHISPER) -> SoundProcessor:
    return SoundProcessor(ModelFiles(folder / "decoder.onnx", folder, {}, {}, ""), source)


def _riff(
    samples: bytes, *, sizes: tuple[int, int] | None = None, width: int = 2, bits: int = 0, before: bytes = b""
) -> bytes:
    """A WAV file byte by byte, with these `sizes` of the whole and of the samples in its header."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, width * RATE, width, bits or 8 * width)
    whole, count = sizes or (12 + len(form) + len(before) + len(samples), len(samples))
    head = struct.pack("<4sI4s", b"RIFF", whole, b"WAVE")
    return head + form + before + struct.pack("<4sI", b"data", count) + samples


def _scipy(dtype: Any) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, RATE, np.array([0, 0.5, -0.5], dtype))
    return file.getvalue()


OPEN = 0xFFFFFFFF
SHORTS = struct.pack("<3h", 0, 2**14, -(2**14))
BEFORE = (b"", b"LIST\x1a\0\0\0INFOISFT\x0d\0\0\0Lavf60.16.100\0", b"odd \x03\0\0\0abc\0")
ARRAYS = [np.array([128, 192, 64], np.uint8), np.array([0, 2**14, -(2**14)], np.int16), [0, 0.5, -0.5]]
ARRAYS += [np.array([0, 2**30, -(2**30)], np.int32), np.array([0, 0.5, -0.5])]
READ: list[Any] = [
    *(wav(array, array.itemsize) for array in ARRAYS if isinstance(array, np.ndarray) and array.dtype.kind in "iu"),
    *map(_scipy, (np.float32, np.float64)),
    # ffmpeg cannot go back in a pipe, and leaves both sizes open.
    *(_riff(SHORTS, sizes=(size, size), before=before) for size in (0, OPEN) for before in BEFORE),
    _riff(b"\0\0\0\0\0\x40\0\0\xc0", width=3),
    *((array, rate) for array in ARRAYS for rate in (RATE, float(RATE))),
    *({"array": array, "sampling_rate": RATE} for array in ARRAYS),
]


@pytest.mark.parametrize("given", READ)
def test_sound_of_every_form_is_read(given: Any, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(given if isinstance(given, bytes) else b"")
    for form in (given, *((tmp_path / "a.wav", str(tmp_path / "a.wav")) if isinstance(given, bytes) else ())):
        samples, rate = read_sound(form)
        assert samples.tolist() == [0, 0.5, -0.5]
        assert rate == RATE


def test_channels_are_averaged() -> None:
    assert read_sound(wav(np.array([[0, 2**14], [2**14, 2**14]], np.int16), channels=2))[0].tolist() == [0.25, 0.5]
    stereo = np.array([[0, 1, 0, 0.5], [0.5, 0, 0, 0.5]])
    for given in (stereo, stereo.T):  # torchaudio's order of axes, and soundfile's
        assert read_sound((given, RATE))[0].tolist() == [0.25, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (_riff(b"", sizes=(OPEN, OPEN)), {"code": "media"}),
        (_riff(b"", sizes=(OPEN, OPEN))[:-3], {"code": "media", "holds": "WAV"}),
        (_riff(b"abc", sizes=(OPEN, OPEN)), {"code": "media", "holds": "WAV"}),
        (_riff(bytes(700), sizes=(OPEN, 900)), {"code": "media", "holds": "WAV"}),
        (_riff(bytes(700), sizes=(936, 900)), {"code": "media", "holds": ("WAV", "EOF")}),
        (_riff(bytes(700), sizes=(936, OPEN)), {"code": "media", "holds": ("WAV", "EOF")}),
        (_riff(b"", sizes=(36, 0)), {"code": "media"}),
        # 12 bits in one byte: scipy gives numbers up to 128, of which nobody knows what is loud.
        (_riff(b"\x80\x01\x02\x03", width=1, bits=12), {"code": "media", "holds": "int"}),
        (([], RATE), {"code": "media"}),
        (([0.0, np.nan], RATE), {"code": "media"}),
        ({"array": [np.inf], "sampling_rate": RATE}, {"code": "media"}),
        (b"RIFF....", {"code": "media", "holds": "WAV"}),
        (wav(np.zeros(900, np.int16))[:700], {"code": "media", "holds": ("WAV", "EOF")}),
        (wav(np.zeros(900, np.int16))[:30], {"code": "media", "holds": "WAV"}),
        (([[0.0], [0.0, 1.0]], RATE), {"code": "media"}),
        ((["a", "b"], RATE), {"code": "media", "holds": ("<U1", "uint8", "int16", "int32")}),
        ((np.zeros(9, np.complex64), RATE), {"code": "media", "holds": "complex64"}),
        ((np.zeros(9, np.int64), RATE), {"code": "media", "holds": "int64"}),
        ((None, RATE), {"code": "media"}),
        ({"bytes": b"", "path": "a.wav"}, {"code": "media"}),
        ("https://example.com/a.wav", {"code": "media", "holds": "base64"}),
        ("/nowhere.wav", {"code": "media", "holds": "/nowhere"}),
        ({"array": [0.0]}, {"code": "media"}),
        (np.zeros(4), {"code": "media"}),
    ],
)
def test_bad_sound_is_refused_in_one_line(given: Any, error: dict[str, Any]) -> None:
    with refused(TaskError, **error) as caught:
        read_sound(given)
    assert "\n" not in str(caught.value)


def test_sound_that_the_extractor_does_not_take_is_refused(tmp_path: Path) -> None:
    for rate in (44100, 16000.5, math.nan):
        with refused(TaskError, "media", holds=("16000", f"{rate}")):
            _processor(tmp_path).windows((np.zeros(100, np.float32), rate))
    loud = np.full(RATE, 3e37, np.float32)
    with refused(TaskError, "media", holds=("NaN", "input_features")):
        _processor(tmp_path).windows((loud, RATE))
    with refused(TaskError, "media", holds=("infinity", "pixels")):
        refuse_non_finite({"sizes": np.ones(2), "pixels": np.array([1.0, np.inf])}, "picture")
    text = '{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}'
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="utf-8")
    with refused(ModelError, "unsupported", holds=("audio_features", "128")):
        _processor(tmp_path).windows((np.zeros(RATE, np.float32), RATE))


@pytest.mark.parametrize("mels", [80, pytest.param(128, marks=pytest.mark.long)])
def test_short_sound_has_the_bits_of_one_that_is_padded_to_30_seconds(tmp_path: Path, mels: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mels)
    processor = _processor(tmp_path, TensorSpec("audio_features", 1, ("batch", mels, 3000)))
    rng = np.random.default_rng(0)
    lengths = (1, 159, 160, 161, 200, 400, 30_319, 30_320, 30_321, 48_123, 460_399, 479_600, 479_840, 479_999, 480_000)
    for length in lengths:
        noise = rng.normal(scale=0.1, size=length).astype(np.float32)
        for samples in (noise, np.clip(100 * noise, -1, 1), 1e-6 * noise, 0 * noise):
            (features,) = processor.windows((samples, RATE))
            whole = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
            np.testing.assert_array_equal(features, whole, err_msg=str(length))


def test_extractor_that_adds_noise_is_given_all_of_the_padding(tmp_path: Path) -> None:
    text = '{"feature_extractor_type": "WhisperFeatureExtractor", "dither": 0.001}'
    (tmp_path / "preprocessor_config.json").write_text(text, encoding="utf-8")
    (features,) = _processor(tmp_path).windows((np.zeros(RATE, np.float32), RATE))
    assert features.shape == (80, 3000)
    assert len(np.unique(features, axis=1).T) == 3000


def test_torch_has_the_threads_that_are_asked_for_and_its_own_again() -> None:
    kept = torch.get_num_threads()
    with torch_threads(kept + 1):
        assert torch.get_num_threads() == kept + 1
    with torch_threads(None):
        assert torch.get_num_threads() == kept
    assert torch.get_num_threads() == kept
