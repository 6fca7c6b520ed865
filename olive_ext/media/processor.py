"""Turns pictures and sounds into items for the engine: each one's number of placeholders, key, and arrays when needed.

Knows no prompt and no session.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.errors import ConfigError, MediaError, ModelError, TaskError, UnfitTaskError, first_line
from olive_ext.media.items import Arrays, ItemLimit, ItemStore, MediaItem, token_bucket, token_buckets
from olive_ext.media.pictures import RawMedia, blank, content_key, name_of, read_picture
from olive_ext.media.processors import image_processor_of
from olive_ext.media.sound import NUM_TOKENS, SoundItems, read_samples, refuse_non_finite
from olive_ext.model.types import MediaInput, MediaSpec, Modality, ModelFiles

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
