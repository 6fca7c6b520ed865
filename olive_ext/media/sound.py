"""Sound as features for an encoder: read, checked, cut into windows, prepared by transformers' feature extractor.

Knows no model's text. Axes: N samples.
"""

from __future__ import annotations

import io
import logging
import wave
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.errors import MediaError, first_line
from olive_ext.media.pictures import named
from olive_ext.media.processors import folders_of, load_feature_extractor
from olive_ext.model.types import ModelFiles, TensorSpec

logger = logging.getLogger(__name__)

Samples: TypeAlias = npt.NDArray[np.float32]
Given: TypeAlias = Any
"""A path or the bytes of a WAV file, {"array": samples, "sampling_rate": rate} (datasets' form), or (samples, rate)."""

_SCALES: Mapping[int, tuple[str, float, float]] = {1: ("u1", 128, 128), 2: ("<i2", 0, 2**15), 4: ("<i4", 0, 2**31)}
"""For the bytes of a sample: its type, what silence is, and what the loudest is."""


class SoundProcessor:
    """Makes features for the encoder of a model of speech. The extractor is loaded when the first sound comes."""

    def __init__(self, files: ModelFiles, source: TensorSpec) -> None:
        """`source`: the encoder's input, [B, mels, frames]."""
        self._files = files
        self._source = source

    @property
    def rate(self) -> int:
        """Samples in a second."""
        return int(self._extractor.sampling_rate)

    @property
    def seconds(self) -> float:
        """Of a window."""
        return float(self._extractor.n_samples) / self.rate

    def windows(self, given: Given) -> list[npt.NDArray[np.float32]]:
        """The features [mels, frames] of each window of a sound that a user gave; a sound has one window unless it is
        longer than the encoder takes, and windows do not overlap. Raises `MediaError` for what cannot be read."""
        samples_N = read_samples(given, self.rate)
        length = int(self._extractor.n_samples)
        parts = [samples_N[start : start + length] for start in range(0, len(samples_N), length)]
        return [self._features(part) for part in parts]

    def _features(self, samples_N: Samples) -> npt.NDArray[np.float32]:
        found = self._extractor(samples_N, sampling_rate=self.rate, return_tensors="np")
        features: npt.NDArray[np.float32] = np.asarray(found["input_features"][0], np.float32)
        return features

    @cached_property
    def _extractor(self) -> Any:
        return load_feature_extractor(folders_of(self._files), self._source)


def tell_other_features(reference: SoundProcessor | None, own: SoundProcessor | None) -> None:
    """Warns where a reference's extractor makes other features of a sound than the model's, which both are given."""
    if reference is None or own is None:
        return
    noise_N = np.random.default_rng(0).normal(scale=0.1, size=8000).astype(np.float32)
    theirs, ours = (one.windows((noise_N, one.rate))[0] for one in (reference, own))
    if theirs.shape != ours.shape or not np.allclose(theirs, ours, atol=1e-4):
        logger.warning("the reference prepares sound otherwise than the model: both are given the model's features")


def read_samples(given: Given, wanted: int) -> Samples:
    """Samples of one channel at the rate that is `wanted`. Raises `MediaError` for another rate, too."""
    samples_N, rate = read_sound(given)
    if rate != wanted:
        raise MediaError(f"{named(given, 'sound')} has {rate} samples a second; this model takes {wanted}: resample it")
    return samples_N


def read_sound(given: Given) -> tuple[Samples, int]:
    """Samples of one channel from -1 to 1, and their number in a second. Raises `MediaError`: what is wrong."""
    if isinstance(given, Mapping):
        given = given.get("array"), given.get("sampling_rate")
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (int, np.integer)):
        array, rate = np.asarray(given[0], np.float32), int(given[1])
    else:
        array, rate = _read_wave(given)
    if array.ndim == 2:
        array = array.mean(-1, dtype=np.float32)
    if array.ndim != 1 or not array.size:
        raise MediaError(f"{named(given, 'sound')} has no samples (an array of shape {list(array.shape)})")
    if not np.isfinite(array).all():
        raise MediaError(f"{named(given, 'sound')} holds NaN or infinity")
    return array, rate


def _read_wave(given: Given) -> tuple[Samples, int]:
    """Samples [N, channels] of a WAV file."""
    if not isinstance(given, (str, Path, bytes, bytearray)):
        raise MediaError(f"a {type(given).__name__} is no sound: give a WAV file's path or bytes, or (samples, rate)")
    try:
        with wave.open(io.BytesIO(given) if isinstance(given, (bytes, bytearray)) else str(given), "rb") as file:
            content, channels = file.readframes(file.getnframes()), file.getnchannels()
            dtype, silence, loudest = _SCALES[file.getsampwidth()]
            samples = (np.frombuffer(content, dtype).astype(np.float32) - silence) / loudest
            return samples.reshape(-1, channels), file.getframerate()
    except (OSError, EOFError, KeyError, ValueError, wave.Error) as error:
        raise MediaError(f"{named(given, 'sound')} cannot be read as a WAV file: {first_line(error)}") from error
