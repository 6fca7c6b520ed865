"""Encoders of pictures and sound, and the graph that embeds tokens with their features. Each item is encoded once, and
its features stay on the device. Knows no prompt, no processor and no step.

This module chooses which items share a run, up to a number of rows of features. Pictures as patches with a grid may
have any size. Sounds with a mask are padded to the longest of the run, unless shapes are to be few. Other items share a
run where they have the same size, in powers of two (1, 2, 4, ...), so that shapes are few.

Items of a run can change each other's features in ways that no interface shows: attention across pictures, a norm over
all of them, one scale for the whole run (dynamic quantization), a branch on their number. Some of it shows only for
some numbers of items, sizes or contents. So trials compare the features of items together, or padded, with those of
each item alone. Axes: B rows, S tokens of a row, N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort

from olive_ext.errors import LostItemError, OliveExtError, RunError, counted, first_line
from olive_ext.graph.standalone_graphs import RowTensor, fold_graph
from olive_ext.media.graphs import (
    MOST_GRIDS,
    Bucket,
    EncoderShapes,
    Features,
    ItemGraphs,
    LateShapeError,
    Pieces,
    Rows,
    SmallGraphs,
    fitted,
    is_padded,
    joined,
    num_bytes,
    pick_rows,
    put_rows,
    real_rows,
)
from olive_ext.media.items import Array, Arrays, ItemStore, Media, MediaItem, token_bucket, token_buckets
from olive_ext.model.providers.bindings import (
    FAILURES,
    InputFeed,
    StackedPart,
    Stacker,
    is_memory_error,
    named_failure,
    named_ort_failures,
    zeros,
)
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import StepArrays, arrays_of
from olive_ext.model.types import EmbeddingSpec, MediaEncoderSpec, Modality

Item = TypeVar("Item")


class EncoderBatches:
    """The items of admitted requests that are not encoded yet, in order of arrival."""

    def __init__(self, spec: MediaEncoderSpec, max_rows: int = 1, *, is_bucketed: bool = False) -> None:
        """`max_rows`: the most rows of features, padding included, of a run of several items. `is_bucketed`: shapes are
        few."""
        self.problem = spec.one_by_one
        """Why items run one by one; empty where several may share a run."""

        self.max_rows = max_rows
        self._has_grid = spec.grid is not None
        self._is_bucketed = is_bucketed
        self._takes_filled = spec.has_mask and not is_bucketed
        self.filled_problem = ""
        """Why items of different lengths do not."""

        self._tried: dict[tuple[int, bool], range] = {}
        """The range of token sums that was tried, by the number of items and whether some are padded."""

        self.waiting: dict[str, MediaItem] = {}
        """Items of requests that wait, which may be encoded together with others."""

    def take(self, item: MediaItem) -> list[MediaItem]:
        """The item that is needed now, and the waiting items that are encoded with it, nearest in length first."""
        self.waiting.pop(item.key, None)
        chosen = [item]
        if self.problem or self.max_rows <= item.num_tokens:
            return chosen
        for one in sorted(self.waiting.values(), key=lambda other: abs(other.num_tokens - item.num_tokens)):
            if self._has_room([*chosen, one]):
                chosen.append(one)
        chosen = self.whole(chosen)
        for one in chosen[1:]:
            del self.waiting[one.key]
        return chosen

    def whole(self, items: list[Item]) -> list[Item]:
        """As many of the first items as a run may have."""
        return items if self._has_grid and self._is_bucketed else items[: _power(len(items))]

    def counts(self, item: MediaItem) -> Sequence[int]:
        """The numbers of such items in a run, where all of them are run beforehand."""
        most = 1 if self.problem or self._has_grid else _power(self.max_rows // item.num_tokens)
        return [1 << power for power in range(most.bit_length())]

    def is_trial_due(self, items: Sequence[MediaItem], is_filled: bool) -> bool:
        """Whether such a run must be compared with each item alone first; if so, it counts as tried."""
        tokens = sum(item.num_tokens for item in items)
        tried = self._tried.get((len(items), is_filled), range(tokens, tokens))
        if not self.takes(is_filled) or tokens in tried:
            return False
        self._tried[len(items), is_filled] = range(min(tried.start, tokens), max(tried.stop, tokens + 1))
        return True

    def note_trial(self, is_filled: bool, problem: str) -> None:
        """Because of `problem`, items run one by one; where only padded items have the problem, only those do."""
        if problem and is_filled:
            self._takes_filled, self.filled_problem = False, problem
        elif problem:
            self.problem = problem

    def takes(self, is_filled: bool) -> bool:
        """Whether such items may share a run."""
        return not self.problem and (self._takes_filled or not is_filled)

    def _has_room(self, items: Sequence[MediaItem]) -> bool:
        sizes = [item.num_tokens for item in items]
        if self._has_grid:
            return sum(sizes) <= self.max_rows and not (self._is_bucketed and len(items) > MOST_GRIDS)
        return len(items) * max(sizes) <= self.max_rows and (self._takes_filled or min(sizes) == max(sizes))


def _power(number: int) -> int:
    """The largest power of two that is not above `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


_PROBLEMS: tuple[type[Exception], ...] = (*FAILURES, ValueError)
"""How several items or padding may fail: errors of the provider, and rows that do not fit (numpy's and ours)."""

Loaded = tuple[MediaItem, Arrays]
"""An item, and the encoder's inputs for it."""

Encode = Callable[[Sequence[Loaded]], list[list[Array]]]
"""From items to their features, an array [N, H] for each output."""

ROUNDING = {8: 1e-5, 4: 1e-5, 2: 2e-3}
"""By bytes of a number: the largest difference between features alone and together, relative to the largest feature."""

SCALES = (1.0, 8.0, 1 / 64, 0.0)
"""Scales of the values of items that are tried together. They differ, so that a maximum or mean over the run is not any
item's own."""


def company_problem(items: Sequence[Loaded], encode: Encode) -> str:
    """Why so many items must not share a run; empty where they may. They are tried as they are, and in reverse order
    with noise of different scales as content."""
    noise = [(item, _noise(arrays, seed)) for seed, (item, arrays) in enumerate(items)]
    for tried in (list(items), noise[::-1]):
        try:
            together = encode(tried)
            alone = [encode([one])[0] for one in tried]
        except LateShapeError:
            raise
        except _PROBLEMS as error:
            return f"several together fail: {first_line(error)}"
        problems = map(_difference, alone, together)
        if problem := next(filter(None, problems), ""):
            return f"features of {len(items)} together {problem} those of each alone"
    return ""


def padding_problem(one: Loaded, shapes: EncoderShapes, encode: Encode) -> str:
    """Why an item must not be padded to its bucket; empty where it may."""
    item, arrays = one
    for content in (arrays, *(_noise(arrays, seed) for seed in range(len(SCALES)))):
        shapes.note_trial("not yet tried")
        alone = encode([(item, content)])[0]
        shapes.note_trial("")
        try:
            padded = encode([(item, shapes.filled(content))])[0]
        except LateShapeError:
            raise
        except _PROBLEMS as error:
            return f"an item in a bucket fails: {first_line(error)}"
        if problem := _difference(alone, padded):
            return f"features of an item in a bucket {problem} those without"
    return ""


def _difference(expected: Sequence[Array], found: Sequence[Array]) -> str:
    """How far an item's features [N, H] of each output are from those expected; empty where only rounding differs."""
    for other, own in zip(expected, found, strict=True):
        if own.shape != other.shape:
            return f"are {len(own)} rows, not {len(other)}"
        largest = np.abs(own.astype(np.float64) - other).max() / max(np.abs(other).max(), 1e-30)
        if not largest <= ROUNDING[own.dtype.itemsize]:
            return f"are {largest:.2g} of the largest off"
    return ""


def _noise(arrays: Arrays, seed: int) -> Arrays:
    """The item's arrays with noise for content; shapes, masks and positions stay."""
    rng, scale = np.random.default_rng(seed), SCALES[seed % len(SCALES)]
    return {
        name: (scale * rng.standard_normal(array.shape)).astype(array.dtype)
        if array.dtype.kind == "f" and "mask" not in name
        else array
        for name, array in arrays.items()
    }


BindWeights = Callable[[ort.IOBinding], None]
"""Binds weights that a graph takes as inputs."""

FEATURE_BYTES = 1 << 28
"""The most bytes of features that are kept on the device; a single item may have more."""


class MediaEncoder:
    """One encoder's session, which is opened when the first item comes, and the features that it has computed."""

    def __init__(
        self,
        spec: MediaEncoderSpec,
        open_session: Callable[[], ort.InferenceSession],
        graphs: ItemGraphs,
        max_rows: int,
        bind_weights: BindWeights,
    ) -> None:
        """`graphs`: the device, and how the graphs that cut and join features are opened. `max_rows`: the most rows of
        features of a run of several items; a larger item runs alone. `bind_weights` binds weights to every run;
        features that were kept stay those of the earlier weights."""
        self.spec, self._bind_weights = spec, bind_weights
        self.encoded = self.runs = self.hits = self.evicted = 0
        """Since the encoder was opened: items encoded, runs (without the warm-up's), features that were found kept, and
        features that were dropped."""

        self.kept: ItemStore[Features] = ItemStore(FEATURE_BYTES, num_bytes)
        self._open_session = open_session
        self._graphs = graphs
        self._shapes = EncoderShapes(spec, is_bucketed=graphs.is_bucketed)
        self._batches = EncoderBatches(spec, max_rows, is_bucketed=graphs.is_bucketed)
        self._small = SmallGraphs(graphs, f"after the {spec.modality.value} encoder")
        forms = [RowTensor(tensor.elem_type, (int(tensor.shape[1]),)) for tensor in spec.features]
        self._stackers = [Stacker(self._small.open, graphs.device, [form]) for form in forms]
        self._early: set[str] = set()

    def bind(self, binding: ort.IOBinding, items: Sequence[MediaItem], num_rows: int | None) -> None:
        """Binds the features of `items`, in order, as inputs of the embedding graph; empty ones for text. With
        `num_rows` they are padded with zeros to that many rows, so that a step's shape depends on its tokens alone."""
        encoded = [self.features(item) for item in items]
        for number, tensor in enumerate(self.spec.features):
            parts = [features[number] for features in encoded]
            if parts and num_rows is None:
                values = [value for pieces in parts for value in pieces.values]
                stacked = [StackedPart((one,), range(one.shape()[0]), (), is_whole=True) for one in values]
                (value,) = self._stackers[number].stack(stacked)
            else:
                value = put_rows(self._small, parts, zeros([num_rows or 0, int(tensor.shape[1])], tensor.elem_type))
            binding.bind_ortvalue_input(tensor.name, value)

    def describe(self) -> Mapping[str, Any]:
        """Counters, by modality."""
        name = "sound" if self.spec.modality is Modality.AUDIO else "image"
        batches = self._batches
        problems = {"one_by_one": batches.problem, "filled_alone": batches.filled_problem}
        problems["of_any_shape"] = self._shapes.problem
        return {
            f"{name}_encoder_device": self._graphs.device.kind,
            f"{name}s_encoded": self.encoded,
            f"{name}_encoder_runs": self.runs,
            f"{name}_cache_hits": self.hits,
            f"{name}s_evicted": self.evicted,
            f"{name}_feature_bytes": self.kept.num_bytes,
            **{f"{name}s_{how}": why for how, why in problems.items() if why},
        }

    def warm_up(self, items: Sequence[MediaItem], sizes: Sequence[int]) -> None:
        """Runs the encoder on items of every shape, and the graphs that put features into steps of `sizes` tokens."""
        self._shapes.learn([item.num_tokens for item in items], [self._arrays(item) for item in items])
        for item in items:
            for count in self._batches.counts(item):
                self._encode([item] * count)
        ordered = sorted(items, key=lambda item: item.num_tokens)
        most = 0 if self._batches.problem else self._batches.max_rows
        for bucket in self._shapes.shared_buckets(ordered, most):
            self._encode(ordered[:1], bucket)
        for size, tensor in product(sizes, self.spec.features):
            piece, base = (
                zeros([count, int(tensor.shape[1])], tensor.elem_type) for count in (self._shapes.piece, size)
            )
            put_rows(self._small, [Pieces((piece,), 1)], base)

    def expect(self, items: Iterable[MediaItem]) -> None:
        """Adds items of requests that wait: they may be encoded together."""
        for item in items:
            if item.key not in self.kept:
                self._batches.waiting.setdefault(item.key, item)

    def close(self) -> None:
        """Releases the features."""
        self.kept.clear()
        self._early.clear()
        self._batches.waiting.clear()

    def features(self, item: MediaItem) -> Features:
        """The rows [N, H] of an item on the device, for each of the embedding graph's inputs."""
        kept = self.kept.get(item.key)
        if kept is not None:
            self.hits += item.key not in self._early
            self._early.discard(item.key)
            return kept
        encoded = self._encode_or_lose(self._batches.take(item))
        self.encoded += len(encoded)
        self.runs += 1
        for one, features in reversed(encoded):
            self.evicted += self.kept.put(one.key, features)
        self._early.update(one.key for one, _ in encoded[1:])
        return encoded[0][1]

    def _encode_or_lose(self, items: Sequence[MediaItem]) -> list[tuple[MediaItem, Features]]:
        """As `_encode`. Where the encoder fails on several items, the first is encoded alone, and the others when they
        are needed. Raises `LostItemError` where it fails on the first for another reason than memory."""
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
        """The features of each item, for each output.

        Warm-up and requests encode items here alone. Left out are items that cannot be loaded or do not fit beside the
        first, and all but the first where the encoder does not take several. `bucket` replaces the items' own.
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
            except OliveExtError:  # what is wrong with it is reported when it is wanted itself
                continue
            if self._batches.takes(is_padded(arrays, loaded[0][1])):
                loaded.append((item, arrays))
        loaded = self._batches.whole(loaded)
        # Whether items together have the features of each alone is tried once for each number, size and padding.
        is_filled = any(is_padded(arrays, loaded[0][1]) for _, arrays in loaded[1:])
        if len(loaded) > 1 and self._batches.is_trial_due([item for item, _ in loaded], is_filled):
            self._batches.note_trial(is_filled, company_problem(loaded, self._on_host))
        return loaded if self._batches.takes(is_filled) else loaded[:1]

    def _arrays(self, item: MediaItem) -> Arrays:
        arrays = item.arrays()
        return {tensor.name: fitted(tensor, arrays, self.spec) for tensor in self.spec.inputs}

    def _on_host(self, loaded: Sequence[Loaded]) -> list[list[Array]]:
        """Each item's rows [N, H], of each output."""
        features, parts = self._run(loaded, Device("cpu"))
        outputs = [value.numpy().reshape(-1, value.shape()[-1]) for value in features]
        return [[array[part] for array in outputs] for part in parts]

    def _run(
        self, loaded: Sequence[Loaded], device: Device, bucket: Bucket | None = None
    ) -> tuple[tuple[ort.OrtValue, ...], list[Rows]]:
        """The encoder's outputs on `device`, and which of their rows belong to each item."""
        items = [item for item, _ in loaded]
        inputs, num_rows = self._shapes.padded(joined([arrays for _, arrays in loaded]), items, bucket)
        binding = self._feed.session.io_binding()
        for name, array in inputs.items():
            self._feed.bind(binding, name, array)
        self._bind_weights(binding)
        for output in self.spec.outputs:
            binding.bind_output(output.name, device.kind, device.index)
        if self.spec.real_rows is not None:
            binding.bind_output(self.spec.real_rows.name)
        self._feed.session.run_with_iobinding(binding)
        features, last = binding.get_outputs()[: len(self.spec.outputs)], binding.get_outputs()[-1]
        *shape, _ = features[0].shape()
        real_N = np.arange(prod(shape)) if self.spec.real_rows is None else real_rows(last.numpy(), shape[-1])
        if len(real_N) != num_rows:
            raise RunError(
                f"'{self.spec.files.graph}' returns {len(real_N)} rows of features for "
                f"{counted(len(items), items[0].modality.kind)} with {num_rows} placeholders by the processor: "
                "they belong to different models or settings"
            )
        parts = np.split(real_N, np.cumsum([item.num_tokens for item in items]))
        return tuple(features), parts[: len(items)]

    @cached_property
    def _feed(self) -> InputFeed:
        session = self._graphs.count.of(self._open_session(), f"the {self.spec.modality.value} encoder")
        return InputFeed(session, self._graphs.device, kept=1)


class Embedding:
    """The session of the graph that a multimodal package runs before its decoder: it turns token ids and features of
    pictures and sound into embeddings. Text has no features, and opens no encoder."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: EmbeddingSpec,
        encoders: Sequence[MediaEncoder],
        graphs: ItemGraphs,
        bind_weights: BindWeights,
    ) -> None:
        """`graphs` also counts the encoders' shapes; where it is bucketed, a step's tokens are padded. `bind_weights`
        binds weights of the session's graph to its runs."""
        self._bind_weights = bind_weights
        self._graphs = graphs
        self._spec = spec
        self._feed = InputFeed(graphs.count.of(session, "the embedding graph"), graphs.device)
        self._encoders = {encoder.spec.modality: encoder for encoder in encoders}
        taken = {tensor for encoder in encoders for tensor in encoder.spec.features}
        self._unused = [tensor for tensor in spec.features if tensor not in taken]
        self._small = SmallGraphs(graphs, "after the embedding graph")

    def check(self, media: Media) -> None:
        """Raises `OliveExtError` for items that have no encoder."""
        for run in media:
            if run.item.modality not in self._encoders:
                taken = " and ".join(f"{modality.kind}s" for modality in self._encoders) or "text only"
                kind = run.item.modality.kind
                raise OliveExtError(f"the request has a {kind}; this model's encoders take {taken}")

    def expect(self, media: Media) -> None:
        """Adds the items of a request that waits."""
        for modality, encoder in self._encoders.items():
            encoder.expect(run.item for run in media if run.item.modality is modality)

    def bind(self, rows: StepArrays, items: Sequence[MediaItem], decoder: ort.IOBinding) -> None:
        """Computes the embeddings of the step's tokens, with the features of `items`, as inputs of the decoder."""
        # Packed rows are one to the graph.
        num_rows = len(rows.past_B) if len(self._spec.inputs[0].tensor.shape) == 2 else 1
        # The graph counts placeholders from the beginning of each row, and features are counted over all rows.
        is_one_row = self._graphs.is_bucketed or bool(items)
        shape = [num_rows, len(rows.tokens_N) // num_rows]
        if is_one_row:
            rows = replace(rows, past_B=rows.past_B[:1])
        for name, value in self._embedded(rows, items).items():
            is_folded = is_one_row and value.shape()[:2] != shape
            decoder.bind_ortvalue_input(name, self._fold(value, shape) if is_folded else value)

    def _embedded(self, rows: StepArrays, items: Sequence[MediaItem] = ()) -> Mapping[str, ort.OrtValue]:
        """The graph's outputs by name; with buckets, those of the padded tokens."""
        num_rows = None
        if self._graphs.is_bucketed:
            num_rows = token_bucket(len(rows.tokens_N) - 1)
            rows = replace(rows, tokens_N=np.pad(rows.tokens_N, (0, num_rows - len(rows.tokens_N))))
        binding, device = self._feed.session.io_binding(), self._graphs.device
        self._feed.bind_inputs(binding, self._spec.inputs, rows)
        for modality, encoder in self._encoders.items():
            encoder.bind(binding, [item for item in items if item.modality is modality], num_rows)
        self._bind_weights(binding)
        for tensor in self._unused:
            binding.bind_ortvalue_input(tensor.name, zeros([0, int(tensor.shape[1])], tensor.elem_type))
        for name in self._spec.outputs:
            binding.bind_output(name, device.kind, device.index)
        self._feed.session.run_with_iobinding(binding)
        return dict(zip(self._spec.outputs, binding.get_outputs(), strict=True))

    def _fold(self, value: ort.OrtValue, shape: Sequence[int]) -> ort.OrtValue:
        """The first tokens of a padded row, in the shape of the step's tokens."""
        form = value.element_type(), len(value.shape())
        return self._small.run(fold_graph, form, {"x": value}, rows=shape, count=[prod(shape)])

    def warm_up(self, items: Sequence[MediaItem], most: int) -> None:
        """Runs each encoder on its `items`, and all graphs after it for steps of up to `most` tokens."""
        sizes = token_buckets(most - 1)
        with named_ort_failures("on a picture of the warm-up"):
            for modality, encoder in self._encoders.items():
                encoder.warm_up([item for item in items if item.modality is modality], sizes)
            for size in sizes:
                for value in self._embedded(arrays_of([(0, size)])).values():
                    self._fold(value, [1, 1])
        self._graphs.count.freeze()

    def describe(self) -> Mapping[str, Any]:
        """Counters of the encoders."""
        counters = {name: value for encoder in self._encoders.values() for name, value in encoder.describe().items()}
        return {**counters, **self._graphs.count.describe()}

    def close(self) -> None:
        """Releases the encoders' features."""
        for encoder in self._encoders.values():
            encoder.close()
