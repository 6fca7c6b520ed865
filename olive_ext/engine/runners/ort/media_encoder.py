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
    is_padded,
    joined,
    other_item,
    real_rows,
)
from olive_ext.engine.runners.ort.encoder_batches import EncoderBatches
from olive_ext.engine.runners.ort.encoder_shapes import Bucket, EncoderShapes
from olive_ext.engine.runners.ort.feature_graphs import FeatureGraphs
from olive_ext.engine.runners.ort.inputs import Feed
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.engine.runners.ort.ort_failures import is_memory_error, named_failure
from olive_ext.errors import LostItemError, OliveExtError, RunError, counted, first_line
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
        self._graphs = FeatureGraphs(spec.feature.elem_type, device, open_graph)
        self.kept: Kept[Tensors] = Kept(budget, _nbytes)

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
        binding.bind_ortvalue_input(tensor.name, self._graphs.joined(parts))

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
            **{f"{name}s_{how}": why for how, why in self._batches.problems.items() if why},
            **self._shapes.describe(),
        }

    def warm_up(self, items: Sequence[MediaItem]) -> None:
        """Runs the encoder on items of every shape that is expected; a shape met later is late."""
        for item in items:
            for count in self._batches.counts(item):
                with self._bucket(f"{count} x {item.num_tokens} rows of the {self.spec.modality.value} encoder"):
                    self._encode([item] * count)
        ordered = sorted(items, key=lambda item: item.num_tokens)
        most = 0 if self._batches.problem else self._batches.max_rows
        for bucket in self._shapes.shared_buckets(ordered, most):
            with self._bucket(f"{bucket.tokens} rows of several {self.spec.modality.value}s"):
                self._encode(ordered[:1], bucket)
        self._shapes.freeze()

    def expect(self, items: Iterable[MediaItem]) -> None:
        """Items that requests which wait will want: they may be encoded together."""
        self._batches.expect(item for item in items if item.key not in self.kept)

    def close(self) -> None:
        """Releases the features."""
        self.kept.clear()
        self._early.clear()
        self._batches.forget()

    def features(self, item: MediaItem) -> Tensors:
        """[N, H] on the device, one for each of the embedding graph's inputs."""
        features = self.kept.get(item.key)
        if features is not None:
            self.counters.hits += item.key not in self._early
            self._early.discard(item.key)
            return features
        found = self._encode_or_lose(self._batches.take(item))
        self.counters.encoded += len(found)
        self.counters.runs += 1
        for one, features in reversed(found):
            self.counters.evicted += self.kept.put(one.key, features)
        self._early.update(one.key for one, _ in found[1:])
        return found[0][1]

    def _encode_or_lose(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, Tensors]]:
        """As `_encode`. Where the encoder fails on several, the first is encoded alone; the others are when they are
        wanted themselves. Raises `LostItemError` where it fails on the first, for another reason than memory."""
        try:
            return self._encode(items)
        except LostItemError:
            raise
        except Exception as error:
            if is_memory_error(error):
                raise
            failure = named_failure(error, f"in '{self.spec.files.graph}' on {items[0].shown}")
            if len(items) == 1:
                raise LostItemError(str(failure), items[0].key) from error
        return self._encode_or_lose(items[:1])

    def _encode(self, items: Sequence[MediaItem], bucket: Bucket | None = None) -> list[tuple[MediaItem, Tensors]]:
        """[N, H] of each item, of each output: the one way in which the encoder is run, beforehand and for requests.

        Items that cannot be had, or do not fit beside the first, are left out; so are all but the first where the
        encoder does not take several. `bucket`: another one than the items'.
        """
        found = self._loaded(items)
        items = [item for item, _ in found]
        inputs, num_rows = self._shapes.padded(joined([arrays for _, arrays in found]), items, bucket)
        self._shapes.note(inputs)
        features, told = self._run(inputs, self._device)
        *shape, _ = features[0].shape()
        real_N = real_rows(told[0].numpy(), shape[-1]) if told else np.arange(prod(shape))
        if len(real_N) != num_rows:
            raise RunError(
                f"'{self.spec.files.graph}' returns {len(real_N)} rows of features for "
                f"{counted(len(items), WORDS[items[0].modality].kind)} with {num_rows} placeholders by the processor: "
                "they belong to different models or settings"
            )
        if all(value.shape()[:-1] == [items[0].num_tokens] for value in features):
            return [(items[0], features)]
        parts = np.split(real_N, np.cumsum([item.num_tokens for item in items]))
        return [
            (item, tuple(self._graphs.picked(value, part) for value in features))
            for item, part in zip(items, parts, strict=False)
        ]

    def _loaded(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, Arrays]]:
        """The items that are encoded together, and what the encoder takes of each."""
        found = [(items[0], self._arrays(items[0]))]
        for item in items[1:]:
            try:
                arrays = self._arrays(item)
            except OliveExtError:  # what is wrong with it is told when it is wanted itself
                continue
            if self._batches.goes_with(arrays, found[0][1]):
                found.append((item, arrays))
        found = self._batches.whole(found)
        return found if len(found) > 1 and self._takes_several(found) else found[:1]

    def _arrays(self, item: MediaItem) -> Arrays:
        arrays = item.arrays()
        return {tensor.name: fitted(tensor, arrays, self.spec) for tensor in self.spec.inputs}

    def _takes_several(self, found: Sequence[tuple[MediaItem, Arrays]]) -> bool:
        """Whether items together have the features that each has alone: tried once, and once more where one is filled
        up to the other's length; with two and with three, because an attention mask with a row for each item passes as
        one for each head where there are as many."""
        (first, inputs), *others = found
        second = next((arrays for _, arrays in others if is_padded(arrays, inputs)), others[0][1])
        is_filled = is_padded(second, inputs)
        if not self._batches.is_tried(is_filled):
            both = [inputs, other_item(inputs) if others[0][0].key == first.key else second]
            self._batches.note_trial(is_filled, self._problem_of(both))
        return self._batches.takes(is_filled)

    def _problem_of(self, both: Sequence[Arrays]) -> str:
        """What is wrong with several items in a run; empty where nothing is."""
        try:
            alone = [self._on_host(one) for one in both]
            together = {count: self._on_host(joined([*both, *both][:count])) for count in (2, 3)}
        except Exception as error:  # noqa: BLE001 - whatever a provider throws: then it takes one at a time
            return f"several together fail: {first_line(error)}"
        problems = (difference_of([*alone, *alone][:count], found) for count, found in together.items())
        return next((problem for problem in problems if problem), "")

    def _on_host(self, inputs: Arrays) -> list[Array]:
        """The real rows of each output."""
        features, told = self._run(inputs, Device("cpu"))
        rows = [value.numpy().reshape(-1, value.shape()[-1]) for value in features]
        return [value[real_rows(told[0].numpy(), features[0].shape()[-2])] for value in rows] if told else rows

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


def _nbytes(features: Tensors) -> int:
    return sum(prod(value.shape()) * ITEM_BYTES[value.element_type()] for value in features)
