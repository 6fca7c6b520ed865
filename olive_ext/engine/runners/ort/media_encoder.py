"""Encoders of pictures and sound: each item is encoded once, and its features stay on the device.

Knows no prompt and no processor. Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.kept import Kept
from olive_ext.engine.media import MediaItem
from olive_ext.engine.runners.ort.encoder_arrays import (
    Array,
    Arrays,
    difference_of,
    fitted,
    joined,
    other_item,
    real_rows,
    shapes_of,
)
from olive_ext.engine.runners.ort.encoder_batches import EncoderBatches, whole
from olive_ext.engine.runners.ort.encoder_shapes import EncoderShapes
from olive_ext.engine.runners.ort.inputs import Feed
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.errors import OliveExtError, RunError, first_line
from olive_ext.graph.standalone_graphs import FEATURES, join_graph, pick_graph
from olive_ext.model.media_types import WORDS, MediaEncoderSpec
from olive_ext.model.types import ITEM_BYTES, TensorSpec

Tensors = tuple[ort.OrtValue, ...]

FEATURE_BYTES = 1 << 28
"""Features that are kept on the device at most, unless one item has more."""


@dataclass
class EncoderCounters:
    """What an encoder has done since it was opened."""

    encoded: int = 0
    runs: int = 0
    """Of the encoder, of one item or several; the warm-up's are not among them."""

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
        batches: EncoderBatches | None = None,
        bucket: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.spec = spec
        self._shapes = shapes or EncoderShapes(spec)
        self._batches = batches or EncoderBatches(spec)
        self._bucket = bucket
        self._early: set[str] = set()
        self.counters = EncoderCounters()
        self._device = device
        self._open_session = open_session
        self._open_graph = open_graph
        self.kept: Kept[Tensors] = Kept(budget, _nbytes)
        self._picks: dict[int, FeatureGraph] = {}

    def bind(self, binding: ort.IOBinding, wanted: Sequence[MediaItem], num_tokens: int) -> None:
        """Binds the features of the items `wanted`, one behind the other, as the embedding graph's inputs; none for
        text.

        With shape buckets zeros fill them up to the step's `num_tokens`: a step's shape is then that of its tokens.
        """
        found = [self.features(item) for item in wanted]
        fed = sum(item.num_tokens for item in wanted)
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
        name, counters = WORDS[self.spec.modality].counted, self.counters
        return {
            f"{name}_encoder_device": self._device.kind,
            f"{name}s_encoded": counters.encoded,
            f"{name}_encoder_runs": counters.runs,
            f"{name}_cache_hits": counters.hits,
            f"{name}s_evicted": counters.evicted,
            f"{name}_feature_bytes": self.kept.num_bytes,
            **({f"{name}s_one_by_one": self._batches.problem} if self._batches.problem else {}),
            **self._shapes.describe(),
        }

    def warm_up(self, items: Sequence[MediaItem]) -> None:
        """Runs the encoder on items of every shape that is expected; a shape met later is late."""
        for item in items:
            count = 1
            while count <= self._batches.most(item):
                with self._bucket(f"{count} x {item.num_tokens} rows of the {self.spec.modality.value} encoder"):
                    self._encode([item] * count)
                count *= 2
        self._shapes.freeze()

    def expect(self, items: Iterable[MediaItem]) -> None:
        """Items that requests which wait will want: they may be encoded together."""
        self._batches.expect(item for item in items if item.key not in self.kept)

    def close(self) -> None:
        """Releases the features."""
        self.kept.clear()
        self._early.clear()
        self._batches.forget()

    def _picked(self, features: Sequence[ort.OrtValue], rows: Array) -> Tensors:
        return tuple(self._pick(len(value.shape())).run({"x": value}, rows=rows) for value in features)

    def features(self, item: MediaItem) -> Tensors:
        """[N, H] on the device, one for each of the embedding graph's inputs."""
        features = self.kept.get(item.key)
        if features is not None:
            self.counters.hits += item.key not in self._early
            self._early.discard(item.key)
            return features
        found = self._encode(self._batches.take(item))
        self.counters.encoded += len(found)
        self.counters.runs += 1
        for one, features in reversed(found):
            self.counters.evicted += self.kept.put(one.key, features)
        self._early.update(one.key for one, _ in found[1:])
        return found[0][1]

    def _encode(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, Tensors]]:
        """[N, H] of each item, of each output: the one way in which the encoder is run, beforehand and for requests.

        Items that cannot be had, or do not fit beside the first, are left out; so are all but the first where the
        encoder does not take several.
        """
        items, (inputs, *others) = self._loaded(items)
        if others:
            inputs = joined([inputs, *others])
            num_rows = sum(item.num_tokens for item in items)
        else:
            inputs, num_rows = self._shapes.padded(inputs, items[0])
        self._shapes.note(inputs)
        features, told = self._run(inputs, self._device)
        *shape, _ = features[0].shape()
        real_N = real_rows(told[0].numpy()) if told else np.arange(prod(shape))
        if len(real_N) != num_rows:
            raise RunError(
                f"'{self.spec.files.graph}' returns {len(real_N)} rows of features for {len(items)} "
                f"{items[0].modality.value}{'s' if others else ''} with {num_rows} placeholders by the processor: they "
                "belong to different models or settings"
            )
        size = items[0].num_tokens
        if all(value.shape()[:-1] == [size] for value in features):
            return [(items[0], features)]
        parts = [real_N[place * size : (place + 1) * size] for place in range(len(items))]
        return [(item, self._picked(features, part)) for item, part in zip(items, parts, strict=True)]

    def _loaded(self, items: Sequence[MediaItem]) -> tuple[list[MediaItem], list[Arrays]]:
        """The items that are encoded together, and what the encoder takes of each."""
        found = [(items[0], self._arrays(items[0]))]
        for item in items[1:]:
            try:
                arrays = self._arrays(item)
            except OliveExtError:  # what is wrong with it is told when it is wanted itself
                continue
            if shapes_of(arrays) == shapes_of(found[0][1]):
                found.append((item, arrays))
        found = whole(found)
        if len(found) > 1 and not self._takes_several(found[0][1]):
            found = found[:1]
        return [item for item, _ in found], [arrays for _, arrays in found]

    def _arrays(self, item: MediaItem) -> Arrays:
        arrays = item.load()
        return {tensor.name: fitted(tensor, arrays, self.spec) for tensor in self.spec.inputs}

    def _takes_several(self, inputs: Arrays) -> bool:
        """Whether two items together have the features that each has alone: tried once."""
        if not self._batches.is_tried:
            self._batches.is_tried = True
            both = [inputs, other_item(inputs)]
            try:
                *alone, together = (self._on_host(one) for one in (*both, joined(both)))
                self._batches.problem = difference_of(alone, together)
            except Exception as error:  # noqa: BLE001 - whatever a provider throws: then it takes one at a time
                self._batches.problem = f"two together fail: {first_line(error)}"
        return not self._batches.problem

    def _on_host(self, inputs: Arrays) -> list[Array]:
        return [value.numpy() for value in self._run(inputs, Device("cpu"))[0]]

    def _run(self, inputs: Arrays, place: Device) -> tuple[Tensors, list[ort.OrtValue]]:
        """What the encoder returns of features, on `place`, and which of their rows are real."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            self._feed.bind(binding, name, array)
        for output in self.spec.outputs:
            binding.bind_output(output.name, place.kind, place.index)
        if self.spec.real_rows is not None:
            binding.bind_output(self.spec.real_rows.name)
        self._session.run_with_iobinding(binding)
        returned, count = binding.get_outputs(), len(self.spec.outputs)
        return tuple(returned[:count]), returned[count:]

    @cached_property
    def _session(self) -> ort.InferenceSession:
        return self._open_session()

    @cached_property
    def _feed(self) -> Feed:
        return Feed(self._session, self._device, kept=1)

    def _pick(self, rank: int) -> FeatureGraph:
        if rank not in self._picks:
            graph = pick_graph(self.spec.feature.elem_type, rank)
            self._picks[rank] = FeatureGraph(self._open_graph(graph), self._device)
        return self._picks[rank]

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


def _pairs(parts: Sequence[ort.OrtValue]) -> list[tuple[ort.OrtValue, ort.OrtValue]]:
    return list(zip(parts[::2], parts[1::2], strict=False))


def _nbytes(features: Tensors) -> int:
    return sum(prod(value.shape()) * ITEM_BYTES[value.element_type()] for value in features)
