"""Reads and checks sound, and prepares pictures and sound by transformers' classes: a sound in windows for the encoder
of a speech model, and both as items for the engine, each with its number of placeholders, its key, and its arrays when
they are needed. Knows no prompt and no session. Axes: N samples.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.errors import ConfigError, MediaError, ModelError, TaskError, UnfitTaskError, first_line
from olive_ext.media.items import Arrays, ItemLimit, ItemStore, MediaItem, token_bucket, token_buckets
from olive_ext.media.pictures import FILES, RawMedia, blank, content_key, name_of, opened, read_picture, reason
from olive_ext.media.processors import (
    folders_of,
    image_processor_of,
    load_feature_extractor,
    load_sound_processor,
    torch_threads,
)
from olive_ext.model.types import MediaInput, MediaSpec, Modality, ModelFiles, TensorSpec

Samples: TypeAlias = npt.NDArray[np.float32]

_SCALES: Mapping[str, tuple[float, float]] = {"uint8": (128, 2**7), "int16": (0, 2**15), "int32": (0, 2**31)}
"""For integer samples: the value of silence, and the largest distance from it. WAV files of 24 bits are read as 32."""

_OPEN_SIZES = (0, 0xFFFFFFFF)
"""The size in a WAV file's header that was written before the size was known, as by ffmpeg into a pipe."""

FRAME_GROUP = 192
"""Frames are computed in multiples of this number, which is a multiple of the tiles of matrix products (8, 16, 24, 32
or 64 columns): the columns of a partial tile are rounded otherwise."""


class SoundProcessor:
    """Computes features for the encoder of a speech model. The extractor is loaded at the first sound."""

    def __init__(self, files: ModelFiles, source: TensorSpec, num_threads: int | None = None) -> None:
        """`source`: the encoder's input, [B, mels, frames]. `num_threads`: torch's threads while features are computed;
        None is one. On two busy cores a sound took 10 to 25 ms with one, and 56 to 190 with two threads beside ONNX
        Runtime's, which spin."""
        self._files = files
        self._source = source
        self._num_threads = num_threads or 1

    @property
    def rate(self) -> int:
        """Samples in a second."""
        return int(self._extractor.sampling_rate)

    @property
    def seconds(self) -> float:
        """The length of a window."""
        return float(self._extractor.n_samples) / self.rate

    def windows(self, raw: RawMedia) -> list[npt.NDArray[np.float32]]:
        """The features [mels, frames] of each window of a sound. A sound that is longer than the encoder takes has
        several windows, which do not overlap. Raises `MediaError` for what cannot be read."""
        samples_N = read_samples(raw, self.rate)
        length = int(self._extractor.n_samples)
        parts = [samples_N[start : start + length] for start in range(0, len(samples_N), length)]
        return [self._features(part) for part in parts]

    def silence(self) -> npt.NDArray[np.float32]:
        """The features [mels, frames] of a window of silence."""
        return self._features(np.zeros(1, np.float32))

    def _features(self, samples_N: Samples) -> npt.NDArray[np.float32]:
        """The features of a window. Where the extractor pads with silence, whose frames are all alike, it gets only so
        much silence that its last frame holds nothing else, and that frame is repeated."""
        extractor = self._extractor
        whole = length = int(extractor.n_samples)
        if type(extractor).__name__ == "WhisperFeatureExtractor" and not extractor.dither:
            num_frames = -(-(len(samples_N) + extractor.n_fft) // extractor.hop_length)
            length = min(whole, -(-num_frames // FRAME_GROUP) * FRAME_GROUP * extractor.hop_length)
        try:
            with torch_threads(self._num_threads):
                prepared = extractor(samples_N, sampling_rate=self.rate, max_length=length, return_tensors="np")
        except Exception as error:
            seconds = len(samples_N) / self.rate
            raise MediaError(f"a sound of {seconds:.1f} s is refused: {first_line(error)}") from error
        features = np.asarray(prepared["input_features"][0], np.float32)
        refuse_non_finite({"input_features": features}, "sound")
        if length == whole:
            return features
        return np.pad(features, ((0, 0), (0, (whole - length) // extractor.hop_length)), "edge")

    @cached_property
    def _extractor(self) -> Any:
        return load_feature_extractor(folders_of(self._files), self._source)


def refuse_non_finite(arrays: Arrays, kind: str) -> None:
    """Raises `MediaError` where what a processor makes of samples or pixels is far out of any range. An encoder would
    give NaN, and the model would be blamed."""
    wrong = [name for name, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
    if wrong:
        raise MediaError(f"a {kind} has features of NaN or infinity ('{wrong[0]}'): its numbers are far out of range")


def are_other_features(reference: SoundProcessor, candidate: SoundProcessor) -> bool:
    """Whether the reference's extractor gives other features for a sound than the model's."""
    noise_N = np.random.default_rng(0).normal(scale=0.1, size=8000).astype(np.float32)
    theirs, ours = (one.windows((noise_N, one.rate))[0] for one in (reference, candidate))
    return theirs.shape != ours.shape or not np.allclose(theirs, ours, atol=1e-4)


def read_samples(raw: RawMedia, wanted: int) -> Samples:
    """Samples [N] of one channel at the `wanted` rate. Raises `MediaError` for another rate, too."""
    samples_N, rate = read_sound(raw)
    if rate != wanted:
        shown = name_of(raw, "sound")
        raise MediaError(f"{shown} has {rate:g} samples a second; this model takes {wanted}: resample it")
    return samples_N


def read_sound(raw: RawMedia) -> tuple[Samples, float]:
    """Samples [N] of one channel, and the sampling rate. Integers are scaled to -1 to 1. Of an array with two axes the
    shorter one is the channels, which are averaged. Raises `MediaError` for what is not sound."""
    shown = name_of(raw, "sound")
    pair = (raw.get("array"), raw.get("sampling_rate")) if isinstance(raw, Mapping) else raw
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], (int, float, np.number)):
        rate = float(pair[1])
        try:
            array = np.asarray(pair[0])
        except (ValueError, TypeError) as error:
            raise MediaError(f"{shown} is no array of samples: {first_line(error)}") from error
    elif isinstance(raw, FILES):
        array, rate = _read_wave(raw)
    else:
        kind = type(raw).__name__
        raise MediaError(
            f"a {kind} is no sound: give a WAV file's path or bytes, (samples, rate), or "
            '{"array": samples, "sampling_rate": rate}'
        )
    if array.size and array.dtype.kind != "f" and array.dtype.name not in _SCALES:
        raise MediaError(f"{shown} has samples of the type {array.dtype}: give floats, or {', '.join(_SCALES)}")
    if array.ndim not in (1, 2) or not array.size:
        raise MediaError(f"{shown} has no samples (an array of shape {list(array.shape)})")
    silence, loudest = _SCALES.get(array.dtype.name, (0, 1))
    with np.errstate(over="ignore"):  # reported below
        samples = (array.astype(np.float32) - silence) / np.float32(loudest)
    if not np.isfinite(samples).all():
        raise MediaError(f"{shown} holds NaN or infinity")
    return samples.mean(int(np.argmin(samples.shape)), dtype=np.float32) if samples.ndim == 2 else samples, rate


def _read_wave(raw: str | Path | bytes | bytearray) -> tuple[npt.NDArray[Any], int]:
    """Samples [N] or [N, channels] of a WAV file."""
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=wavfile.WavFileWarning)  # chunks that hold no sound
            warnings.filterwarnings("error", "Reached EOF prematurely", wavfile.WavFileWarning)
            rate, array = wavfile.read(_sized(opened(raw)))
    except MediaError:
        raise
    except Exception as error:  # scipy raises ValueError, struct.error, ZeroDivisionError, its warning
        raise MediaError(f"{name_of(raw, 'sound')} cannot be read as a WAV file: {reason(error)}") from error
    return array, rate


def _sized(file: io.BytesIO | Path) -> io.BytesIO | Path:
    """The WAV file with its two sizes filled in, where the program that wrote it into a pipe could not: the samples
    then go on to the end."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
        head = stream.read(8)
        stream.seek(0)
        if head[:4] != b"RIFF" or int.from_bytes(head[4:], "little") not in _OPEN_SIZES:
            return file
        content = bytearray(stream.read())
    offset = len(b"RIFF....WAVE")
    while (chunk := bytes(content[offset : offset + 8]))[:4] not in (b"data", b""):
        size = int.from_bytes(chunk[4:], "little")
        offset += len(chunk) + size + size % 2
    if chunk[:4] == b"data" and int.from_bytes(chunk[4:], "little") in _OPEN_SIZES:
        content[offset + 4 : offset + 8] = (len(content) - offset - 8).to_bytes(4, "little")
        content[4:8] = (len(content) - 8).to_bytes(4, "little")
    return io.BytesIO(content)


NUM_TOKENS = "num_audio_tokens"
"""The processor's name for the array that holds the number of placeholders."""

_OF_TEXT = ("input_ids", "attention_mask")


class SoundItems:
    """Reads and prepares sounds for one model. Its processor is loaded at the first sound."""

    def __init__(self, files: ModelFiles, num_threads: int | None = None) -> None:
        """`num_threads`: torch's, while a sound is prepared."""
        self._files = files
        self._num_threads = num_threads

    @property
    def extractor(self) -> Any:
        """transformers' feature extractor. Raises `ModelError` where the package has none."""
        return self.loaded[0].feature_extractor

    @property
    def rate(self) -> int:
        """Samples in a second."""
        return int(self.extractor.sampling_rate)

    def silences(self) -> list[RawMedia]:
        """Sounds of 1, 2, ... seconds, up to the longest that the extractor pads to."""
        rate, longest = self.rate, int(getattr(self.extractor, "chunk_length", 30))
        return [(np.zeros(rate * seconds, np.float32), rate) for seconds in range(1, longest + 1)]

    def prepare(self, samples_N: Samples) -> Arrays:
        """The arrays for the encoder, each [1, ...], and the number of placeholders [1]. Raises `MediaError` for a
        sound that the processor refuses, or whose end it would drop."""
        processor, rate = self.loaded[0], self.rate
        text = processor.audio_token
        try:
            with torch_threads(self._num_threads):
                prepared = processor(text=[text], audio=[samples_N], sampling_rate=rate, return_tensors="pt")
        except Exception as error:
            seconds = len(samples_N) / rate
            raise MediaError(f"a sound of {seconds:.1f} s is refused: {first_line(error)}") from error
        placeholder = processor.tokenizer.convert_tokens_to_ids(text)
        arrays = {name: np.asarray(value) for name, value in prepared.items() if name not in _OF_TEXT}
        mask = next((array for name, array in arrays.items() if "mask" in name), None)
        hop = getattr(self.extractor, "hop_length", None)
        if mask is not None and hop is not None:  # extractors silently cut long sounds
            covered = int(np.count_nonzero(mask)) * hop
            if covered + rate // 10 < len(samples_N):
                shown = f"a sound of {len(samples_N) / rate:.1f} s is longer than {covered / rate:.1f} s"
                raise MediaError(f"{shown}: cut it")
        return {**arrays, NUM_TOKENS: np.count_nonzero(np.asarray(prepared["input_ids"]) == placeholder, keepdims=True)}

    @cached_property
    def loaded(self) -> tuple[Any, Path]:
        """transformers' processor, and its file."""
        return load_sound_processor(folders_of(self._files))


Grid = tuple[int, int, int] | None

KEPT_BYTES = 1 << 26
"""The most bytes of prepared pixels that are kept between a request's arrival and its run; a single picture may have
more."""

_FIXED = ("mm_tokens_per_image", "image_seq_length", "num_image_tokens")
"""Keys of config.json for the number of tokens of a picture, where all pictures have the same."""


@dataclass(frozen=True)
class ItemArrays:
    """Loads the arrays of a picture or sound on demand. Only the picture or sound is sent to another process, which
    prepares it with its own processor (`MediaProcessor.adopt`)."""

    processor: MediaProcessor | None
    modality: Modality
    key: str
    raw: RawMedia

    def __call__(self) -> Arrays:
        """The arrays by name. Raises `TaskError` where the file's content has changed."""
        assert self.processor is not None
        return self.processor.load(self.modality, self.key, self.raw)

    def __reduce__(self) -> tuple[Any, ...]:
        raw = self.raw
        if isinstance(raw, (str, Path)):  # the other process may not see this one's files
            with suppress(OSError):  # of a file that is gone: reported there, where it costs its own requests alone
                raw = Path(raw).read_bytes()
        return ItemArrays, (None, self.modality, self.key, raw)


class MediaProcessor:
    """Makes items of pictures and sounds for one model. A processor is loaded when the first of its kind comes."""

    def __init__(self, spec: MediaSpec, files: ModelFiles, num_threads: int | None = None) -> None:
        """`num_threads`: torch's threads while a sound is prepared; pictures are prepared without torch."""
        self.spec = spec
        self._files = files
        self.kept: ItemStore[Arrays] = ItemStore(
            KEPT_BYTES, lambda arrays: sum(array.nbytes for array in arrays.values())
        )
        self._known: dict[str, tuple[str, int, Grid]] = {}
        self._sounds = SoundItems(files, num_threads)

    def item(self, modality: Modality, raw: RawMedia) -> MediaItem:
        """The item of a picture or sound. Raises `TaskError` for one that cannot be read or prepared, or of a kind that
        the model does not take."""
        taken = next((one for one in self.spec.inputs if one.modality is modality), None)
        if taken is None:
            names = " and ".join(f"{taken.kind}s" for taken in self.spec.modalities)
            raise UnfitTaskError(f"the request has a {modality.kind}; this model takes {names}")
        read = self._read(modality, raw)
        content = content_key(read)
        if content not in self._known:
            arrays = self._prepare(modality, read)
            num_tokens, grid = self._extent(arrays, taken)
            if num_tokens < 1:
                kind = modality.kind
                raise MediaError(f"{name_of(raw, kind)} is too small: the model's processor makes no token of it")
            self._known[content] = arrays_key(arrays), num_tokens, grid
            self.kept.put(self._known[content][0], arrays)
        key, num_tokens, grid = self._known[content]
        load = ItemArrays(self, modality, key, raw)
        if modality is Modality.IMAGE:
            size = "{} x {} pixels".format(*read.size)
        else:
            size = f"{len(read) / self._sounds.rate:.1f} s"
        shown = f"{name_of(raw, modality.kind)} of {size}"
        return MediaItem(modality, key, num_tokens, taken.placeholder, load, grid, shown)

    def adopt(self, item: MediaItem) -> MediaItem:
        """An item from another process, which this processor will prepare."""
        return replace(item, load=replace(item.load, processor=self)) if isinstance(item.load, ItemArrays) else item

    def own(self, item: MediaItem) -> MediaItem:
        """Another model's `item`, prepared for this model. Raises `TaskError` where this model takes another number of
        tokens for it: no text then fits both models."""
        if not isinstance(item.load, ItemArrays):
            return item
        prepared = self.item(item.modality, item.load.raw)
        if prepared.num_tokens != item.num_tokens:
            raise TaskError(
                f"{name_of(item.load.raw, item.modality.kind)} takes {item.num_tokens} tokens by the model's "
                f"processor and {prepared.num_tokens} by the reference's: they cannot be compared on one text"
            )
        return prepared

    def load(self, modality: Modality, key: str, raw: RawMedia) -> Arrays:
        """The arrays by name of the item with that key, each [1, ...]. Raises `TaskError` if `raw` has changed."""
        if (kept := self.kept.get(key)) is not None:
            return kept
        arrays = self._prepare(modality, self._read(modality, raw))
        if arrays_key(arrays) != key:
            shown = name_of(raw, modality.kind)
            raise TaskError(f"{shown} has changed since its request was made, or is prepared in another way now")
        self.kept.put(key, arrays)
        return arrays

    def dummies(self, most: int) -> list[MediaItem]:
        """Pictures and sounds of every shape that an encoder can meet, up to `most` tokens."""
        silences = self._sounds.silences() if Modality.AUDIO in self.spec.modalities else []
        items = [self.item(Modality.AUDIO, silence) for silence in silences]
        items += self._blanks(most) if Modality.IMAGE in self.spec.modalities else []
        return [item for item in items if item.num_tokens <= most]

    def _blanks(self, most: int) -> list[MediaItem]:
        """One picture where the processor gives all the same size, else one for each bucket."""
        items = [self.item(Modality.IMAGE, blank(64, 64))]
        if items[0].grid is None:
            return items
        processor, _ = self._loaded
        side = int(processor.patch_size) * int(processor.merge_size)
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        most = min(most, largest // side**2)
        for bucket in token_buckets(most):
            size = min(bucket - 1, most)
            heights = range(isqrt(size), 0, -1)
            height = next(height for height in heights if token_bucket(size // height * height) == bucket)
            width = size // height
            if smallest <= height * width * side**2:
                items.append(self.item(Modality.IMAGE, blank(width * side, height * side)))
        return items

    def fixed_tokens(self, taken: MediaInput) -> int | None:
        """Tokens of each item by config.json or the encoder's output, where all have the same number."""
        config = self._files.hf_config
        counts = [config[key] for key in _FIXED if isinstance(config.get(key), int)]
        return next(iter(counts), taken.num_rows) if taken.modality is Modality.IMAGE else taken.num_rows

    def problem_of(self, limit: ItemLimit) -> str:
        """Why `limit` allows no item of some modality; empty where it allows some of each."""
        problems = (limit.problem(taken.modality, self.fixed_tokens(taken) or 0) for taken in self.spec.inputs)
        return next(filter(None, problems), "")

    def check_fixed(self, limit: ItemLimit) -> None:
        """Raises `ConfigError` where a strict limit allows no item of some modality."""
        if limit.is_strict and (problem := self.problem_of(limit)):
            raise ConfigError(problem)

    def processor_of(self, modality: Modality) -> tuple[Any, Path]:
        """transformers' processor of pictures or of sound, and its file. Raises `ModelError` where there is none."""
        return self._loaded if modality is Modality.IMAGE else (self._sounds.extractor, self._sounds.loaded[1])

    @cached_property
    def _loaded(self) -> tuple[Any, Path]:
        return image_processor_of(self._files)

    def _read(self, modality: Modality, raw: RawMedia) -> Any:
        return read_picture(raw) if modality is Modality.IMAGE else read_samples(raw, self._sounds.rate)

    def _prepare(self, modality: Modality, content: Any) -> Arrays:
        arrays = self._pixels(content) if modality is Modality.IMAGE else self._sounds.prepare(content)
        refuse_non_finite(arrays, modality.kind)
        return arrays

    def _pixels(self, picture: Any) -> Arrays:
        processor, _ = self._loaded
        try:
            prepared = processor(images=[picture], return_tensors="np")
        except Exception as error:
            width, height = picture.size
            raise MediaError(f"a picture of {width} x {height} pixels is refused: {first_line(error)}") from error
        return {name: np.asarray(value) for name, value in prepared.items()}

    def _extent(self, arrays: Arrays, taken: MediaInput) -> tuple[int, Grid]:
        """The number of placeholders, and their grid, by the processor's output, else by config.json or the encoder."""
        for name in (NUM_TOKENS, "num_soft_tokens_per_image"):
            if name in arrays:
                return int(arrays[name].reshape(-1)[0]), None
        if "image_grid_thw" in arrays:
            times, height, width = arrays["image_grid_thw"].reshape(-1).tolist()
            merge = int(getattr(self._loaded[0], "merge_size", 1))
            return times * (height // merge) * (width // merge), (times, height // merge, width // merge)
        if (count := self.fixed_tokens(taken)) is None:
            raise ModelError(
                f"how many tokens a picture takes is unknown: its processor does not return it, config.json has "
                f"none of {', '.join(_FIXED)}, and no encoder declares it: put the original model's config.json into "
                "the package"
            )
        return count, None


def arrays_key(arrays: Arrays) -> str:
    """Digest of what an encoder is given of an item, whatever the processor's name for its settings is."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
