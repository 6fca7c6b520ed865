"""The door to PIL: from a path, bytes, a data URL or a picture to RGB pixels. Knows no processor."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from olive_ext.errors import MediaError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

RawMedia: TypeAlias = Any
"""A PIL picture, a path, or the bytes of a file; of sound a WAV file, or its samples as (samples, rate) or in datasets'
form, {"array": samples, "sampling_rate": rate}."""

FILES = (str, Path, bytes, bytearray)
"""The types in which a file is given."""

THUMBNAIL_SIDE = 128
"""Pixels of a thumbnail's longer side."""

LONGEST_NAME = 300
"""The most characters of a path in a message."""

_FORMATS = {
    *("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "PSD", "SGI", "TGA", "TIFF"),
    "WEBP",
}
"""Those of PIL's formats that hold pixels (MPO is read as JPEG). PIL runs Ghostscript for EPS, so it is not among them.
"""

LARGEST_SIDE = 16384
"""The most pixels of a side."""

LARGEST_RATIO = 200
"""The largest ratio of the sides, as in transformers' processor of Qwen2-VL. Other processors enlarge the shorter side
in proportion, so that a longer picture could take any amount of memory."""

_SWITCH = threading.Lock()
"""Held while PIL's switch is another than the process has set."""


@contextmanager
def _truncated_refused() -> Iterator[None]:
    """PIL refuses files that end early, although a library may have told it not to: lmms-eval does when imported."""
    from PIL import ImageFile

    with _SWITCH:
        set_by_process, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = set_by_process


@_truncated_refused()
def read_picture(raw: RawMedia) -> Image.Image:
    """The picture upright and in RGB. Raises `MediaError` for what is not a picture, or is beyond the bounds above."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        if not isinstance(raw, (Image.Image, *FILES)):
            kind = type(raw).__name__
            raise MediaError(f"a {kind} is no picture: give a PIL image, a path or the bytes of a file")
        Image.init()
        formats = [name for name in Image.ID if name in _FORMATS]
        picture = raw if isinstance(raw, Image.Image) else Image.open(opened(raw), formats=formats)
        frames = getattr(picture, "n_frames", 1)
        if frames > 1 and picture.format != "MPO":  # a photograph, and what a camera adds to it
            raise MediaError(f"{name_of(raw)} is animated ({frames} frames): give one frame as a picture")
        short, long = sorted(picture.size)
        extent = "{} x {}".format(*picture.size)
        if not short:
            raise MediaError(f"{name_of(raw)} has no pixels ({extent})")
        if long > LARGEST_SIDE:
            raise MediaError(f"{name_of(raw)} has {extent} pixels; a side has {LARGEST_SIDE} at most", code="too_large")
        if long > LARGEST_RATIO * short:
            raise MediaError(f"{name_of(raw)} has {extent} pixels; one side is {LARGEST_RATIO} times the other at most")
        return _of_8_bits(ImageOps.exif_transpose(picture), raw).convert("RGB")
    except MediaError:
        raise
    except UnidentifiedImageError as error:
        raise MediaError(f"{name_of(raw)} cannot be read as a picture: no format that is known here") from error
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, its own bomb error
        raise MediaError(f"{name_of(raw)} cannot be read as a picture: {reason(error)}") from error


def _of_8_bits(picture: Image.Image, raw: RawMedia) -> Image.Image:
    """The picture with shades from 0 to 255, where PIL would clip all above to 255. Raises `MediaError` for numbers
    whose range is unknown."""
    from PIL import Image

    if not picture.mode.startswith(("I", "F")):
        return picture
    shades = np.asarray(picture)
    if picture.mode == "F" or shades.min() < 0 or shades.max() >= 1 << 16:
        raise MediaError(f"{name_of(raw)} has shades of the mode '{picture.mode}': give 8 or 16 bits")
    return Image.fromarray((shades >> 8).astype(np.uint8))


def thumbnail(raw: RawMedia) -> str:
    """A small JPEG of the picture as a data URL. Raises `MediaError` as `read_picture` does."""
    picture, file = read_picture(raw), io.BytesIO()
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    picture.save(file, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def blank(width: int, height: int) -> Image.Image:
    """A blank picture."""
    from PIL import Image

    return Image.new("RGB", (width, height))


def content_key(content: Image.Image | npt.NDArray[Any]) -> str:
    """Digest of pixels or samples."""
    digest = hashlib.sha256(f"{getattr(content, 'mode', 'sound')} {content.size} ".encode())
    digest.update(content.tobytes())
    return digest.hexdigest()


def media_digest(args: Sequence[Any]) -> str:
    """Digest of a framework's request without its texts: pictures by their pixels, sounds by their samples, the rest as
    JSON."""

    def shown(value: Any) -> Any:
        from PIL import Image

        if isinstance(value, Image.Image):
            with suppress(MediaError):  # one that cannot be read is reported when it is asked about
                return content_key(read_picture(value))
        elif hasattr(value, "__array__"):  # of numpy, torch and others, whose `repr` leaves numbers out
            return content_key(np.asarray(value))
        return repr(value)

    return hashlib.sha256(json.dumps(list(args), sort_keys=True, default=shown).encode()).hexdigest()


def data_of_url(url: Any) -> bytes:
    """The bytes of a data URL in base64. Raises `MediaError` for any other URL: nothing is fetched."""
    head, _, body = str(url).partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise MediaError(
            f"'{str(url)[:60]}': only data URLs in base64 are read (data:image/png;base64,...), none fetched"
        )
    return decoded(body)


def decoded(body: str) -> bytes:
    """The decoded bytes. Raises `MediaError` for what is not base64."""
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"'{body[:30]}...' is not valid base64: {error}") from error


def opened(raw: str | Path | bytes | bytearray) -> io.BytesIO | Path:
    """A file, by its path, its bytes or a data URL. Raises `MediaError` for another URL."""
    if isinstance(raw, (bytes, bytearray)):
        return io.BytesIO(raw)
    if isinstance(raw, str) and ("://" in raw or raw.startswith("data:")):
        return io.BytesIO(data_of_url(raw))
    return Path(raw)


def reason(error: Exception) -> str:
    """The message of an error without the path, which `name_of` has."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def name_of(raw: RawMedia, kind: str = "picture") -> str:
    """How an error names the picture or sound: by its path, where it has one."""
    if not isinstance(raw, (str, Path)):
        return f"a {kind}"
    text = str(raw)
    return f"the {kind} '{text if len(text) <= LONGEST_NAME else f'{text[:60]}...{text[-60:]}'}'"
