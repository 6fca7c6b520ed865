"""What counts as a picture, and what a bad one is told."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from olive_ext.errors import TaskError
from olive_ext.media.pictures import content_key, data_of_url, media_digest, read_picture, thumbnail
from tests.families.pictures import picture
from tests.refusals import refused


def _png(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def _animated() -> bytes:
    file = io.BytesIO()
    picture(0, 8, 8).save(file, "GIF", save_all=True, append_images=[picture(1, 8, 8)])
    return file.getvalue()


def test_path_bytes_and_picture_are_one(tmp_path: Path) -> None:
    image = picture(0, 12, 8)
    (tmp_path / "a.png").write_bytes(_png(image))
    forms = [image, _png(image), tmp_path / "a.png", str(tmp_path / "a.png"), bytearray(_png(image))]
    assert {content_key(read_picture(form)) for form in forms} == {content_key(image)}


def test_url_with_data_is_read() -> None:
    content = _png(picture(0, 4, 4))
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    assert data_of_url(url) == content
    assert content_key(read_picture(url)) == content_key(picture(0, 4, 4))


def test_shades_of_16_bits_are_those_of_8() -> None:
    shades = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    for given in (Image.fromarray(shades), _png(Image.fromarray(shades)), Image.fromarray(shades).convert("I")):
        np.testing.assert_array_equal(np.asarray(read_picture(given))[..., 0], shades >> 8)


def test_photograph_with_what_a_camera_adds_is_the_photograph() -> None:
    file = io.BytesIO()
    picture(0, 8, 8).save(file, "MPO", save_all=True, append_images=[picture(1, 4, 4)])
    assert read_picture(file.getvalue()).size == (8, 8)


@pytest.mark.parametrize("url", ["https://example.com/a.png", "file:///etc/passwd", "data:image/png,abc", ""])
def test_url_that_would_be_fetched_is_refused(url: str) -> None:
    with refused(TaskError, "media", holds="base64"):
        data_of_url(url)
    if url:
        with refused(TaskError, "media", holds="base64"):
            read_picture(url)


def test_bad_base64_is_refused() -> None:
    with refused(TaskError, "media", holds="base64"):
        data_of_url("data:image/png;base64,@@@")


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "RGBA", "1", "I;16"])
def test_picture_of_another_mode_becomes_rgb(mode: str) -> None:
    grey = Image.fromarray(np.full((4, 6), 200, np.uint16)) if mode == "I;16" else picture(0, 6, 4).convert(mode)
    found = read_picture(grey)
    assert (found.mode, found.size) == ("RGB", (6, 4))


def test_picture_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[274] = 6  # the first row is the right side
    image = picture(0, 12, 8)
    found = read_picture(_png(image, exif=exif))
    assert found.size == (8, 12)
    assert found.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


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


def test_thumbnail_is_a_small_jpeg_of_the_picture() -> None:
    url = thumbnail(_png(picture(0, 640, 320)))
    found = Image.open(io.BytesIO(data_of_url(url)))
    assert (found.format, found.size) == ("JPEG", (128, 64))
    assert Image.open(io.BytesIO(data_of_url(thumbnail(picture(0, 5, 8))))).size == (5, 8)


def test_digest_of_a_request_is_of_all_samples() -> None:
    silence, click = np.zeros(4000, np.float32), np.zeros(4000, np.float32)
    click[2000] = 1
    one, same, other = ([{"audio": {"array": array, "sampling_rate": 8000}}] for array in (silence, silence + 0, click))
    assert media_digest(one) == media_digest(same) != media_digest(other)


def test_digest_of_a_request_is_of_the_pixels() -> None:
    one, same, other = ([{"visual": [picture(seed, 6, 4)]}] for seed in (0, 0, 1))
    assert media_digest(one) == media_digest(same) != media_digest(other)


def test_digest_of_a_request_is_of_colours_and_not_of_their_numbers() -> None:
    """Two pictures of the same numbers with other palettes, or turned by their EXIF, are two."""
    red, blue, turned = Image.new("P", (4, 6)), Image.new("P", (4, 6)), picture(0, 4, 6)
    red.putpalette([255, 0, 0] * 256)
    blue.putpalette([0, 0, 255] * 256)
    turned.getexif()[274] = 3
    digests = {media_digest([{"visual": [image]}]) for image in (red, blue, turned, picture(0, 4, 6))}
    assert len(digests) == 4
