"""Encoders of pictures and sound: each item is encoded once, and its features stay on the device.

Knows no prompt and no processor. Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.forms.kv_store import zeros
from olive_ext.engine.media.batches import EncoderBatches, Loaded, company_problem, padding_problem
from olive_ext.engine.media.graphs import (
    CountedSession,
    Features,
    ItemGraphs,
    Pieces,
    SmallGraphs,
    join_rows,
    num_bytes,
    pick_rows,
    put_rows,
)
from olive_ext.engine.media.items import ItemStore, MediaItem
from olive_ext.engine.media.shapes import (
    Array,
    Arrays,
    Bucket,
    EncoderShapes,
    Rows,
    fitted,
    is_padded,
    joined,
    real_rows,
)
from olive_ext.engine.runners.ort.bound_weights import BoundWeights
from olive_ext.engine.runners.ort.inputs import InputFeed
from olive_ext.engine.runners.ort.ort_failures import FAILURES, is_memory_error, named_failure
from olive_ext.errors import LostItemError, OliveExtError, RunError, counted
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.media_types import WORDS, MediaEncoderSpec

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
        open_session: Callable[[], ort.InferenceSession],
        graphs: ItemGraphs,
        max_rows: int = 1,
        weights: BoundWeights | None = None,
    ) -> None:
        """`graphs`: the device, and how what cuts and joins features is opened there; `max_rows`: of features that one
        run makes of several items, an item with more runs alone; `weights` are bound to every run: features that are
        kept are of the old ones where other numbers are put."""
        self.spec, self._weights = spec, weights
        self.counters = EncoderCounters()
        self.kept: ItemStore[Features] = ItemStore(FEATURE_BYTES, num_bytes)
        self._open_session = open_session
        self._graphs = graphs
        self._shapes = EncoderShapes(spec, is_bucketed=graphs.is_bucketed)
        self._batches = EncoderBatches(spec, max_rows, is_bucketed=graphs.is_bucketed)
        self._small = SmallGraphs(graphs, f"behind the {spec.modality.value} encoder")
        self._early: set[str] = set()

    def bind(self, binding: ort.IOBinding, items: Sequence[MediaItem], num_rows: int | None) -> None:
        """Binds the features of `items`, one behind the other, as the embedding graph's inputs; none for text. Zeros
        fill them up to `num_rows` where that is given: a step's shape is then that of its tokens."""
        encoded = [self.features(item) for item in items]
        for number, tensor in enumerate(self.spec.features):
            parts = [features[number] for features in encoded]
            if parts and num_rows is None:
                value = join_rows(self._small, [part for pieces in parts for part in pieces.values])
            else:
                value = put_rows(self._small, parts, zeros([num_rows or 0, int(tensor.shape[1])], tensor.elem_type))
            binding.bind_ortvalue_input(tensor.name, value)

    def describe(self) -> Mapping[str, Any]:
        """Counters, by modality."""
        name, counters = WORDS[self.spec.modality].counted, self.counters
        problems = {**self._batches.problems, "of_any_shape": self._shapes.problem}
        return {
            f"{name}_encoder_device": self._graphs.device.kind,
            f"{name}s_encoded": counters.encoded,
            f"{name}_encoder_runs": counters.runs,
            f"{name}_cache_hits": counters.hits,
            f"{name}s_evicted": counters.evicted,
            f"{name}_feature_bytes": self.kept.num_bytes,
            **{f"{name}s_{how}": why for how, why in problems.items() if why},
        }

    def warm_up(self, items: Sequence[MediaItem], sizes: Sequence[int]) -> None:
        """Runs the encoder on items of every shape, and what puts features among those of steps of `sizes` tokens."""
        self._shapes.learn([item.num_tokens for item in items], [self._arrays(item) for item in items])
        modality = self.spec.modality.value
        for item in items:
            for count in self._batches.counts(item):
                with self._graphs.bucket(f"{count} x {item.num_tokens} rows of the {modality} encoder"):
                    self._encode([item] * count)
        ordered = sorted(items, key=lambda item: item.num_tokens)
        most = 0 if self._batches.problem else self._batches.max_rows
        for bucket in self._shapes.shared_buckets(ordered, most):
            with self._graphs.bucket(f"{bucket.tokens} rows of several {modality}s"):
                self._encode(ordered[:1], bucket)
        for size, tensor in product(sizes, self.spec.features):
            piece, base = (
                zeros([count, int(tensor.shape[1])], tensor.elem_type) for count in (self._shapes.piece, size)
            )
            put_rows(self._small, [Pieces((piece,), 1)], base)

    def expect(self, items: Iterable[MediaItem]) -> None:
        """Takes note of items of requests that wait: they may be encoded together."""
        self._batches.expect(item for item in items if item.key not in self.kept)

    def close(self) -> None:
        """Releases the features."""
        self.kept.clear()
        self._early.clear()
        self._batches.forget()

    def features(self, item: MediaItem) -> Features:
        """The rows [N, H] of an item on the device, for each of the embedding graph's inputs."""
        kept = self.kept.get(item.key)
        if kept is not None:
            self.counters.hits += item.key not in self._early
            self._early.discard(item.key)
            return kept
        encoded = self._encode_or_lose(self._batches.take(item))
        self.counters.encoded += len(encoded)
        self.counters.runs += 1
        for one, features in reversed(encoded):
            self.counters.evicted += self.kept.put(one.key, features)
        self._early.update(one.key for one, _ in encoded[1:])
        return encoded[0][1]

    def _encode_or_lose(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, Features]]:
        """As `_encode`. Where the encoder fails on several, the first is encoded alone; the others are when they are
        wanted themselves. Raises `LostItemError` where it fails on the first, for another reason than memory."""
        try:
            return self._encode(items)
        except FAILURES as error:
            if is_memory_error(error):
                raise
            failure = named_failure(error, f"in '{self.spec.files.graph}' on {items[0].shown}")
            if len(items) == 1:
                raise LostItemError(str(failure), items[0].key) from error
        return self._encode_or_lose(items[:1])

    def _encode(self, items: Sequence[MediaItem], bucket: Bucket | None = None) -> list[tuple[MediaItem, Features]]:
        """The rows of each item, of each output: the one way in which items are encoded, beforehand and for requests.

        Items that cannot be had, or do not fit beside the first, are left out; so are all but the first where the
        encoder does not take several. `bucket`: another one than the items'.
        """
        loaded = self._loaded(items)
        features, parts = self._run(loaded, self._graphs.device, bucket)
        if all(value.shape()[:-1] == [self._shapes.whole(len(parts[0]))] for value in features):
            return [(loaded[0][0], tuple(Pieces((value,), len(parts[0])) for value in features))]
        return [
            (item, tuple(pick_rows(self._small, value, self._shapes.pieces(part), len(part)) for value in features))
            for (item, _), part in zip(loaded, parts, strict=True)
        ]

    def _loaded(self, items: Sequence[MediaItem]) -> list[Loaded]:
        """The items that are encoded together, and what the encoder takes of each."""
        first = items[0], self._arrays(items[0])
        if self._shapes.is_padding_due:
            self._shapes.note_trial(padding_problem(first, self._shapes, self._on_host))
            if self._shapes.problem:
                self._graphs.count.refuse(f"'{self.spec.files.graph}': {self._shapes.problem}")
        loaded = [(items[0], self._shapes.filled(first[1]))]
        for item in items[1:]:
            try:
                arrays = self._shapes.filled(self._arrays(item))
            except OliveExtError:  # what is wrong with it is told when it is wanted itself
                continue
            if self._batches.takes(is_padded(arrays, loaded[0][1])):
                loaded.append((item, arrays))
        loaded = self._batches.whole(loaded)
        return loaded if len(loaded) > 1 and self._takes_several(loaded) else loaded[:1]

    def _arrays(self, item: MediaItem) -> Arrays:
        arrays = item.arrays()
        return {tensor.name: fitted(tensor, arrays, self.spec) for tensor in self.spec.inputs}

    def _takes_several(self, loaded: Sequence[Loaded]) -> bool:
        """Whether items together have the features of each alone: tried for each number, size and filling."""
        is_filled = any(is_padded(arrays, loaded[0][1]) for _, arrays in loaded[1:])
        if self._batches.is_trial_due([item for item, _ in loaded], is_filled):
            self._batches.note_trial(is_filled, company_problem(loaded, self._on_host))
        return self._batches.takes(is_filled)

    def _on_host(self, loaded: Sequence[Loaded]) -> list[list[Array]]:
        """Each item's rows [N, H], of each output."""
        features, parts = self._run(loaded, Device("cpu"))
        outputs = [value.numpy().reshape(-1, value.shape()[-1]) for value in features]
        return [[array[part] for array in outputs] for part in parts]

    def _run(
        self, loaded: Sequence[Loaded], device: Device, bucket: Bucket | None = None
    ) -> tuple[tuple[ort.OrtValue, ...], list[Rows]]:
        """What the encoder returns of features, on `device`, and which of their rows are each item's."""
        items = [item for item, _ in loaded]
        inputs, num_rows = self._shapes.padded(joined([arrays for _, arrays in loaded]), items, bucket)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            self._feed.bind(binding, name, array)
        if self._weights is not None:
            self._weights.bind(binding)
        for output in self.spec.outputs:
            binding.bind_output(output.name, device.kind, device.index)
        if self.spec.real_rows is not None:
            binding.bind_output(self.spec.real_rows.name)
        self._session.run_with_iobinding(binding)
        features, last = binding.get_outputs()[: len(self.spec.outputs)], binding.get_outputs()[-1]
        *shape, _ = features[0].shape()
        real_N = np.arange(prod(shape)) if self.spec.real_rows is None else real_rows(last.numpy(), shape[-1])
        if len(real_N) != num_rows:
            raise RunError(
                f"'{self.spec.files.graph}' returns {len(real_N)} rows of features for "
                f"{counted(len(items), WORDS[items[0].modality].kind)} with {num_rows} placeholders by the processor: "
                "they belong to different models or settings"
            )
        parts = np.split(real_N, np.cumsum([item.num_tokens for item in items]))
        return tuple(features), parts[: len(items)]

    @cached_property
    def _session(self) -> CountedSession:
        return self._graphs.count.of(self._open_session(), f"the {self.spec.modality.value} encoder")

    @cached_property
    def _feed(self) -> InputFeed:
        return InputFeed(self._session, self._graphs.device, kept=1)
