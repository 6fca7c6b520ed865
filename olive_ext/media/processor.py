"""Pictures as items for the engine: how many placeholders each takes, its key, and its pixels when they are needed.

Knows no prompt and no session.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media import MediaItem, token_buckets
from olive_ext.errors import MediaError, ModelError, TaskError, first_line
from olive_ext.media.pictures import Given, blank, content_key, named, read_picture, sendable
from olive_ext.media.processors import folders_of, load_image_processor
from olive_ext.model.media_types import MediaInput, MediaSpec, Modality
from olive_ext.model.types import ModelFiles

Arrays = Mapping[str, npt.NDArray[Any]]

KEPT_BYTES = 1 << 26
"""Bytes of prepared pixels that are kept between a request's coming and its run, unless one picture has more."""

_FIXED = ("mm_tokens_per_image", "image_seq_length", "num_image_tokens")
"""Keys of config.json for the tokens of a picture where all have as many."""


@dataclass(frozen=True)
class Extent:
    """What of a picture's preparation the prompt depends on, and its key."""

    num_tokens: int
    grid: tuple[int, int, int] | None = None
    key: str = ""


@dataclass(frozen=True)
class PictureArrays:
    """The arrays of a picture that a user gave, whenever they are asked for. What is sent to another process is the
    picture without its processor: that process has one of its own (`MediaProcessor.adopt`)."""

    processor: MediaProcessor | None
    key: str
    given: Given

    def __call__(self) -> Arrays:
        assert self.processor is not None
        return self.processor.load(self.key, self.given)

    def __reduce__(self) -> tuple[Any, ...]:
        return PictureArrays, (None, self.key, sendable(self.given))


class MediaProcessor:
    """Makes items of pictures for one model. The processor is loaded when the first picture comes."""

    def __init__(self, spec: MediaSpec, files: ModelFiles) -> None:
        self.spec = spec
        self._files = files
        self.kept_bytes = KEPT_BYTES
        self._known: dict[str, Extent] = {}
        self._kept: OrderedDict[str, Arrays] = OrderedDict()

    def item(self, modality: Modality, given: Given) -> MediaItem:
        """The item of a picture that a user gave. Raises `TaskError` for one that cannot be read or prepared, or of
        which the model takes none."""
        taken = next((found for found in self.spec.inputs if found.modality is modality), None)
        if taken is None:
            names = ", ".join(found.value for found in self.spec.modalities)
            raise TaskError(f"the request has an {modality.value}; this model takes {names}")
        picture = read_picture(given)
        content = content_key(picture)
        if content not in self._known:
            arrays = self._prepare(picture)
            extent = self._extent(arrays, taken)
            self._known[content] = replace(extent, key=arrays_key(arrays))
            self._keep(self._known[content].key, arrays)
        extent = self._known[content]
        load = PictureArrays(self, extent.key, given)
        return MediaItem(modality, extent.key, extent.num_tokens, taken.placeholder, load, extent.grid)

    def adopt(self, item: MediaItem) -> MediaItem:
        """An item that was sent from another process, to be prepared by this processor."""
        return replace(item, load=replace(item.load, processor=self)) if isinstance(item.load, PictureArrays) else item

    def own(self, item: MediaItem) -> MediaItem:
        """The item of the same picture as this model has it, where `item` is another model's. Raises `TaskError` where
        it takes another number of tokens, so that no text holds it for both models."""
        if not isinstance(item.load, PictureArrays):
            return item
        found = self.item(item.modality, item.load.given)
        if found.num_tokens != item.num_tokens:
            raise TaskError(
                f"{named(item.load.given)} takes {item.num_tokens} tokens by the model's processor and "
                f"{found.num_tokens} by the reference's: they cannot be compared on one text"
            )
        return found

    def load(self, key: str, given: Given) -> Arrays:
        """The arrays of the picture of that key. Raises `TaskError` where `given` holds another one by now."""
        if (kept := self._kept.get(key)) is not None:
            return kept
        arrays = self._prepare(read_picture(given))
        if arrays_key(arrays) != key:
            raise TaskError(f"{named(given)} is another one than when it was asked about, or is prepared otherwise")
        return self._keep(key, arrays)

    def dummies(self, most: int) -> list[MediaItem]:
        """Pictures of every shape that an encoder can meet with up to `most` tokens: one where the processor makes all
        alike, else one for each bucket."""
        found = [self.item(Modality.IMAGE, blank(64, 64))]
        if found[0].grid is None:
            return found
        processor, _ = self._loaded
        side = int(processor.patch_size) * int(processor.merge_size)
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        for bucket in token_buckets(min(most, largest // side**2)):
            height = isqrt(bucket - 1)
            width = (bucket - 1) // height
            if smallest <= height * width * side**2 <= largest:
                found.append(self.item(Modality.IMAGE, blank(width * side, height * side)))
        return found

    def describe(self, *, load: bool = False) -> Mapping[str, Any]:
        """The processor and its file, where it is loaded or shall be."""
        if not load and "_loaded" not in self.__dict__:
            return {}
        processor, file = self._loaded
        return {"image_processor": type(processor).__name__, "image_processor_file": str(file)}

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        files = self._files
        named = files.genai_config.get("model", {}).get("vision", {}).get("config_filename")
        return load_image_processor(folders_of(files), named)

    def _keep(self, key: str, arrays: Arrays) -> Arrays:
        self._kept[key] = arrays
        while len(self._kept) > 1 and sum(map(_nbytes, self._kept.values())) > self.kept_bytes:
            self._kept.popitem(last=False)
        return arrays

    def _prepare(self, picture: Any) -> Arrays:
        processor, _ = self._loaded
        try:
            found = processor(images=[picture], return_tensors="np")
        except Exception as error:
            width, height = picture.size
            raise MediaError(f"a picture of {width} x {height} pixels is refused: {first_line(error)}") from error
        return {name: np.asarray(value) for name, value in found.items()}

    def _extent(self, arrays: Arrays, taken: MediaInput) -> Extent:
        """The placeholders by what the processor returned, else by config.json, else by the encoder's output."""
        if "num_soft_tokens_per_image" in arrays:
            return Extent(int(arrays["num_soft_tokens_per_image"].reshape(-1)[0]))
        if "image_grid_thw" in arrays:
            times, height, width = arrays["image_grid_thw"].reshape(-1).tolist()
            merge = int(getattr(self._loaded[0], "merge_size", 1))
            grid = (times, height // merge, width // merge)
            return Extent(times * (height // merge) * (width // merge), grid)
        config = self._files.hf_config
        counts = [config[key] for key in _FIXED if isinstance(config.get(key), int)]
        counts += [] if taken.num_rows is None else [taken.num_rows]
        if not counts:
            raise ModelError(
                f"how many tokens a picture takes is unknown: its processor does not return it, config.json has "
                f"none of {', '.join(_FIXED)}, and no encoder declares it: put the original model's config.json into "
                "the package"
            )
        return Extent(counts[0])


def arrays_key(arrays: Arrays) -> str:
    """Digest of what an encoder is given of an item, whatever the processor's name for its settings is."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
