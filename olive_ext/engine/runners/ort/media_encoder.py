"""Encoders of pictures and sound: each item is encoded once, and its features stay on the device.

Knows no prompt and no processor. Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.media import FeatureRows, MediaItem
from olive_ext.engine.runners.ort.encoder_shapes import EncoderShapes
from olive_ext.engine.runners.ort.inputs import DTYPES, Feed
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.standalone_graphs import FEATURES, join_graph, pick_graph
from olive_ext.model.media_types import MediaEncoderSpec, Modality
from olive_ext.model.types import ITEM_BYTES, TensorSpec

Array = npt.NDArray[Any]
Tensors = tuple[ort.OrtValue, ...]

_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}

_ALIASES = {
    "pixel_position_ids": "image_position_ids",
    "image_position_ids": "pixel_position_ids",
    "input_features": "audio_features",
    "audio_values": "input_features",
    "grid_thw": "image_grid_thw",
    "feature_attention_mask": "input_features_mask",
}
"""The processor's name for what an exporter calls otherwise."""

_COUNTED = {Modality.IMAGE: "image", Modality.AUDIO: "sound"}

FEATURE_BYTES = 1 << 28
"""Features that are kept on the device at most, unless one item has more."""


@dataclass
class EncoderCounters:
    """What an encoder has done since it was opened."""

    encoded: int = 0
    hits: int = 0
    evicted: int = 0


class MediaEncoder:
    """One encoder's session, opened when the first item comes, and the features that it has made."""

    def __init__(
        self,
        spec: MediaEncoderSpec,
        device: Device,
        open_session: Callable[[], ort.InferenceSession],
        open_graph: Callable[[bytes], ort.InferenceSession],
        shapes: EncoderShapes | None = None,
        budget: int = FEATURE_BYTES,
    ) -> None:
        self.spec = spec
        self._shapes = shapes or EncoderShapes(spec)
        self.counters = EncoderCounters()
        self._device = device
        self._open_session = open_session
        self._open_graph = open_graph
        self.budget = budget
        self._kept: OrderedDict[str, Tensors] = OrderedDict()

    def bind(self, binding: ort.IOBinding, wanted: Sequence[FeatureRows], num_tokens: int) -> None:
        """Binds the rows of features `wanted`, one behind the other, as the embedding graph's inputs; none for text.

        With shape buckets zeros fill them up to the step's `num_tokens`: a step's shape is then that of its tokens.
        """
        found = [self._rows(rows) for rows in wanted]
        fed = sum(rows.stop - rows.first for rows in wanted)
        for place, tensor in enumerate(self.spec.features):
            self._bind(binding, tensor, [parts[place] for parts in found], fed, num_tokens)

    def _bind(
        self, binding: ort.IOBinding, tensor: TensorSpec, parts: list[ort.OrtValue], fed: int, num_tokens: int
    ) -> None:
        if not parts or (self._shapes.is_bucketed and fed < num_tokens):
            size = num_tokens - fed if self._shapes.is_bucketed else 0
            parts.append(zeros([size, int(tensor.shape[1])], tensor.elem_type))
        while len(parts) > 1:
            parts = [self._join.run({"a": left, "b": right}) for left, right in _pairs(parts)] + parts[
                len(parts) & ~1 :
            ]
        binding.bind_ortvalue_input(tensor.name, parts[0])

    def describe(self) -> Mapping[str, Any]:
        """Counters, by modality."""
        name, counters = _COUNTED[self.spec.modality], self.counters
        return {
            f"{name}_encoder_device": self._device.kind,
            f"{name}s_encoded": counters.encoded,
            f"{name}_cache_hits": counters.hits,
            f"{name}s_evicted": counters.evicted,
            f"{name}_feature_bytes": self._num_bytes,
            **self._shapes.describe(),
        }

    def warm_up(self, items: Sequence[MediaItem]) -> None:
        """Runs the encoder on items of every shape that is expected; a shape met later is late."""
        for item in items:
            self._encode(item)
        self._shapes.freeze()

    def close(self) -> None:
        """Releases the features."""
        self._kept.clear()

    @property
    def _num_bytes(self) -> int:
        return sum(_nbytes(value) for features in self._kept.values() for value in features)

    def _rows(self, rows: FeatureRows) -> Tensors:
        features = self.features(rows.item)
        if rows.stop - rows.first == rows.item.num_tokens:
            return features
        return self._picked(features, np.arange(rows.first, rows.stop))

    def _picked(self, features: Sequence[ort.OrtValue], rows: Array) -> Tensors:
        return tuple(self._pick.run({"x": value}, rows=rows) for value in features)

    def features(self, item: MediaItem) -> Tensors:
        """[N, H] on the device, one for each of the embedding graph's inputs."""
        features = self._kept.get(item.key)
        if features is not None:
            self._kept.move_to_end(item.key)
            self.counters.hits += 1
            return features
        features = self._encode(item)
        self.counters.encoded += 1
        self._kept[item.key] = features
        while len(self._kept) > 1 and self._num_bytes > self.budget:
            self._kept.popitem(last=False)
            self.counters.evicted += 1
        return features

    def _encode(self, item: MediaItem) -> Tensors:
        """[N, H] of each output for one item: the one way in which an encoder runs, beforehand and in an evaluation."""
        arrays = item.load()
        exact = {tensor.name: fitted(tensor, arrays, self.spec) for tensor in self.spec.inputs}
        inputs, num_rows = self._shapes.padded(exact, item)
        self._shapes.note(inputs)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            self._feed.bind(binding, name, array)
        for output in self.spec.outputs:
            binding.bind_output(output.name, self._device.kind, self._device.index)
        if self.spec.real_rows is not None:
            binding.bind_output(self.spec.real_rows.name)
        self._session.run_with_iobinding(binding)
        returned = binding.get_outputs()
        features, told = tuple(returned[: len(self.spec.outputs)]), returned[len(self.spec.outputs) :]
        *shape, _ = features[0].shape()
        real_N = real_rows(told[0].numpy()) if told else np.arange(prod(shape))
        if len(real_N) != num_rows:
            raise RunError(
                f"'{self.spec.files.graph}' returns {len(real_N)} rows of features for an {item.modality.value} that "
                f"takes {num_rows} placeholders by its processor: they belong to different models or settings"
            )
        is_whole = all(value.shape()[:-1] == [item.num_tokens] for value in features)
        return features if is_whole else self._picked(features, real_N[: item.num_tokens])

    @cached_property
    def _session(self) -> ort.InferenceSession:
        return self._open_session()

    @cached_property
    def _feed(self) -> Feed:
        return Feed(self._session, self._device, kept=1)

    @cached_property
    def _pick(self) -> FeatureGraph:
        return FeatureGraph(self._open_graph(pick_graph(self.spec.feature.elem_type)), self._device)

    @cached_property
    def _join(self) -> FeatureGraph:
        return FeatureGraph(self._open_graph(join_graph(self.spec.feature.elem_type)), self._device)


class FeatureGraph:
    """A small graph from features to features, on their device."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session = session
        self._device = device

    def run(self, features: Mapping[str, ort.OrtValue], **numbers: Array) -> ort.OrtValue:
        binding = self._session.io_binding()
        for name, value in features.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in numbers.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array, np.int64))
        binding.bind_output(FEATURES, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        (found,) = binding.get_outputs()
        return found


def real_rows(told: Array) -> Array:
    """The rows of one item's features that are not of its padding: by their number [1], or by a mask [1, rows]."""
    return np.arange(int(told[0])) if told.ndim == 1 else np.flatnonzero(told)


def fitted(tensor: TensorSpec, arrays: Mapping[str, Array], spec: MediaEncoderSpec) -> Array:
    """The processor's array for an input of an encoder: of its name or another known for the same, in its type.

    An axis for a single item is added or taken away. Raises `ModelError` where there is none, or its shape does not
    fit.
    """
    array = arrays.get(tensor.name, arrays.get(_ALIASES.get(tensor.name, "")))
    if array is None:
        raise ModelError(
            f"'{spec.files.graph}' takes '{tensor.name}'; the processor gives {', '.join(sorted(arrays))}: another one "
            "is needed"
        )
    shape = array.shape
    if len(shape) == len(tensor.shape) + 1 and shape[0] == 1:
        array = array[0]
    elif len(shape) + 1 == len(tensor.shape):
        array = array[None]
    wrong = [
        size
        for size, wanted in zip(array.shape, tensor.shape, strict=False)
        if isinstance(wanted, int) and size != wanted
    ]
    if len(array.shape) != len(tensor.shape) or wrong:
        raise ModelError(
            f"'{spec.files.graph}' takes '{tensor.name}' {list(tensor.shape)}; the processor gives {list(shape)}"
        )
    return np.ascontiguousarray(array, {**_FLOATS, **DTYPES}[tensor.elem_type])


def _pairs(parts: Sequence[ort.OrtValue]) -> list[tuple[ort.OrtValue, ort.OrtValue]]:
    return list(zip(parts[::2], parts[1::2], strict=False))


def _nbytes(value: ort.OrtValue) -> int:
    return int(prod(value.shape())) * ITEM_BYTES[value.element_type()]
