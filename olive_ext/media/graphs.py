"""What keeps the shapes of pictures and sounds few: buckets of items, pieces of features, sessions that count their
shapes, and the small graphs from features to features. Knows no step.

An encoder of patches with a grid takes several pictures one after the other. A bucket is filled up with tails: zeros
with a grid of their own, which no picture's patches attend to. One picture has one tail. Up to `MOST_GRIDS` pictures
get as many tails as make `MOST_GRIDS` + 1 grids. Sounds with a mask are padded to one of a few lengths. Encoders of one
size have one shape anyway. Axes: N rows of features, H size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.errors import ConfigError, ModelError, RunError
from olive_ext.graph.standalone_graphs import FEATURES, pick_graph, put_rows_graph
from olive_ext.media.items import Array, Arrays, MediaItem, filled_up, token_bucket, token_buckets
from olive_ext.model.providers.bindings import run_graph
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import DTYPES
from olive_ext.model.types import ITEM_BYTES, MediaEncoderSpec, TensorSpec

Rows = npt.NDArray[np.int64]
MOST_GRIDS = 7
"""The most pictures in a run."""

PIECE = 64
"""Rows of a piece of features, where items differ in their number of tokens. An encoder's output is cut into pieces,
and a step's features are put together from pieces. The two kinds of graphs then need one shape for each output and for
each step, and not for each pair with an item's size."""


class Bucket(NamedTuple):
    """The size of pictures with their tails: the number of grids, and of all tokens."""

    grids: int
    tokens: int


def bucket_of(count: int, num_tokens: int) -> Bucket:
    """The bucket of `count` pictures with `num_tokens` together. Each of its tails has at least one token."""
    grids = 2 if count == 1 else MOST_GRIDS + 1
    return Bucket(grids, token_bucket(num_tokens + grids - count - 1))


class EncoderShapes:
    """How one encoder's inputs are padded and its features cut; neither without `is_bucketed`."""

    def __init__(self, spec: MediaEncoderSpec, *, is_bucketed: bool = False) -> None:
        self._spec = spec
        self._grid = spec.grid
        self._lengths: list[int] = []
        self.piece = PIECE
        """Rows of a piece of features."""

        self.is_bucketed = is_bucketed
        self.is_padding_due = is_bucketed and (spec.grid is not None or spec.has_mask)
        """Whether a trial of padding is still to come."""

        self.problem = ""
        """Why inputs are not padded; empty where they are."""

    def learn(self, num_tokens: Iterable[int], inputs: Iterable[Arrays]) -> None:
        """Reads the rows of a piece and the lengths of masks from items of every shape."""
        sizes = set(num_tokens)
        self.piece = sizes.pop() if len(sizes) == 1 else PIECE
        self._lengths = sorted({length for arrays in inputs if (length := self._length(arrays)) is not None})

    def note_trial(self, problem: str) -> None:
        """Ends the trial of padding: with a `problem`, inputs keep their shapes."""
        self.is_padding_due, self.problem = False, problem

    def whole(self, num_rows: int) -> int:
        """Rows that an encoder's output must have to be an item's features without cutting; -1 where none can be."""
        return num_rows if not self.is_bucketed or num_rows == self.piece else -1

    def pieces(self, rows_N: Rows) -> list[Rows]:
        """Row numbers `rows_N` [N] in pieces [`piece`]; the last one is filled up with the first row."""
        if not self.is_bucketed:
            return [rows_N]
        filled = np.concatenate([rows_N, np.full(-len(rows_N) % self.piece, rows_N[0])])
        return list(filled.reshape(-1, self.piece))

    def filled(self, inputs: Arrays) -> Arrays:
        """The item's inputs, padded with zeros to the next expected length; the mask says what is real."""
        length = self._length(inputs)
        if length is None or self.problem or not self.is_bucketed or not length <= max(self._lengths, default=0):
            return inputs
        more = self._lengths[bisect_left(self._lengths, length)] - length
        shapes = {tensor.name: tensor.shape for tensor in self._spec.inputs}
        return {
            name: np.pad(
                array, [(0, more * (axis > 0 and isinstance(shapes[name][axis], str))) for axis in range(array.ndim)]
            )
            for name, array in inputs.items()
        }

    def _length(self, inputs: Arrays) -> int | None:
        return next((array.shape[1] for name, array in inputs.items() if "mask" in name), None)

    def padded(self, inputs: Arrays, items: Sequence[MediaItem], bucket: Bucket | None = None) -> tuple[Arrays, int]:
        """The items' inputs, padded to their bucket or to `bucket`, and the rows of features that they give."""
        num_tokens = sum(item.num_tokens for item in items)
        if not self.is_bucketed or self._grid is None or self.problem:
            return inputs, num_tokens
        grids, size = bucket or bucket_of(len(items), num_tokens)
        patches = next(name for name in inputs if name != self._grid)
        unit = len(inputs[patches]) // num_tokens
        ones = grids - len(items) - 1  # all tails but the last have one token
        zeros = np.zeros(((size - num_tokens) * unit, *inputs[patches].shape[1:]), inputs[patches].dtype)
        tails = [1] * ones + [size - num_tokens - ones]
        grid = np.array([[1, isqrt(unit), tail * isqrt(unit)] for tail in tails], inputs[self._grid].dtype)
        more = {patches: zeros, self._grid: grid}
        return {name: np.concatenate([array, more[name]]) for name, array in inputs.items()}, size

    def shared_buckets(self, items: Sequence[MediaItem], max_rows: int) -> list[Bucket]:
        """The buckets of several pictures with up to `max_rows` tokens. `items` go from the smallest to the largest."""
        if not self.is_bucketed or self._grid is None or not items or 2 * items[0].num_tokens > max_rows:
            return []
        largest = bucket_of(2, min(max_rows, MOST_GRIDS * items[-1].num_tokens)).tokens
        sizes = [size for size in token_buckets(largest - 1) if size >= items[0].num_tokens + MOST_GRIDS]
        return [Bucket(MOST_GRIDS + 1, size) for size in sizes]


_ALIASES = {
    "pixel_position_ids": "image_position_ids",
    "image_position_ids": "pixel_position_ids",
    "input_features": "audio_features",
    "audio_values": "input_features",
    "grid_thw": "image_grid_thw",
    "feature_attention_mask": "input_features_mask",
}
"""Other names of the same input: what exporters and processors call it."""


def fitted(tensor: TensorSpec, arrays: Arrays, spec: MediaEncoderSpec) -> Array:
    """The processor's array for an encoder's input, by its name or an alias, in its type and shape.

    An axis of size 1 for the item is added or removed. Raises `ModelError` without a fitting array.
    """
    array = arrays.get(tensor.name, arrays.get(_ALIASES.get(tensor.name, "")))
    if array is None:
        raise ModelError(f"'{spec.files.graph}' takes '{tensor.name}'; the processor gives {', '.join(sorted(arrays))}")
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
    return np.ascontiguousarray(array, DTYPES[tensor.elem_type])


def joined(items: Sequence[Arrays]) -> Arrays:
    """Arrays of several items, one after the other on axis 0, each padded with zeros to the longest: [sum, ...]."""
    return items[0] if len(items) == 1 else {name: filled_up([arrays[name] for arrays in items]) for name in items[0]}


def is_padded(arrays: Arrays, other: Arrays) -> bool:
    """Whether one of two items would be padded beside the other: axes after the first differ."""
    return any(array.shape[1:] != other[name].shape[1:] for name, array in arrays.items())


def real_rows(real: Array, num_rows: int) -> Array:
    """The rows of features [B, rows] that are not padding, by each item's count [B] or a mask [B, rows]."""
    return np.flatnonzero(np.arange(num_rows) < real[:, None] if real.ndim == 1 else real)


OpenGraph = Callable[[bytes], Any]
"""Opens a serialized graph: as an `InferenceSession`, or as something that is used like one."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class LateShapeError(RunError):
    """A session was about to run with a shape that should have been run beforehand."""


class ShapeCount:
    """The input shapes of all sessions that a model's items pass through: those run beforehand, and those met later.
    With `is_strict`, a later shape raises `LateShapeError`."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._warmed: set[tuple[CountedSession, Shapes]] = set()
        self._late: set[tuple[CountedSession, Shapes]] = set()
        self._is_frozen = False

    def of(self, session: ort.InferenceSession, name: str) -> CountedSession:
        """`session`, whose runs count from now on. Errors call it `name`."""
        return CountedSession(session, name, self)

    def freeze(self) -> None:
        """Ends the warm-up: all expected shapes have been run."""
        self._is_frozen = True

    def refuse(self, problem: str) -> None:
        """Raises `ConfigError` where shapes must be few and `problem` prevents it."""
        if self._is_strict:
            raise ConfigError(f"'engine.strict_shapes' = true: {problem}", "engine.strict_shapes")

    def note(self, session: CountedSession, shapes: Shapes) -> None:
        """Counts a run before it happens. Raises `LateShapeError` for a shape that is not allowed."""
        key = session, shapes
        if key in self._warmed:
            return
        if self._is_frozen and self._is_strict:
            shown = ", ".join(f"'{tensor}' {list(shape)}" for tensor, shape in shapes)
            raise LateShapeError(f"'engine.strict_shapes' = true: {session.name} was not run with {shown} beforehand")
        (self._late if self._is_frozen else self._warmed).add(key)

    def describe(self) -> Mapping[str, Any]:
        """The number of shapes run beforehand and of those met later, over all sessions; empty without a warm-up."""
        if not self._is_frozen:
            return {}
        return {"encoder_shapes_warmed": len(self._warmed), "encoder_shapes_late": len(self._late)}


@dataclass(frozen=True, eq=False)
class CountedSession:
    """A session that counts its runs. It is used as ONNX Runtime's, with bindings that it makes."""

    session: ort.InferenceSession
    name: str
    count: ShapeCount

    def io_binding(self) -> CountedBinding:
        """A new binding, which knows the shapes of its inputs."""
        return CountedBinding(self.session)

    def run_with_iobinding(self, binding: CountedBinding) -> None:
        """Raises `LateShapeError` for a shape that was to be run beforehand and was not."""
        self.count.note(self, tuple(binding.shapes.items()))
        self.session.run_with_iobinding(binding)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the session."""
        return getattr(self.session, name)


class CountedBinding(ort.IOBinding):  # type: ignore[misc]
    """A binding that knows the shapes of its inputs."""

    def __init__(self, session: ort.InferenceSession) -> None:
        super().__init__(session)
        self.shapes: dict[str, tuple[int, ...]] = {}

    @override
    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        super().bind_ortvalue_input(name, value)
        self.shapes[name] = tuple(value.shape())

    @override
    def bind_cpu_input(self, name: str, array: Array) -> None:
        super().bind_cpu_input(name, array)
        self.shapes[name] = array.shape


@dataclass(frozen=True)
class ItemGraphs:
    """The device of the graphs that items pass through, and how they are opened."""

    device: Device
    open_graph: OpenGraph
    count: ShapeCount = field(default_factory=ShapeCount)
    is_bucketed: bool = False
    """Whether these graphs are run with few shapes."""


class SmallGraphs:
    """Graphs without weights, from features to features. Each is opened when first needed, and counts its runs."""

    def __init__(self, graphs: ItemGraphs, where: str) -> None:
        """`where` the graphs run among those of the items, for errors: "after the image encoder"."""
        self._graphs = graphs
        self._where = where
        self._sessions: dict[tuple[object, ...], CountedSession] = {}

    def open(self, graph: bytes) -> CountedSession:
        """A session whose runs count."""
        session = self._graphs.open_graph(graph)
        return self._graphs.count.of(session, f"the graph '{session.get_modelmeta().graph_name}' {self._where}")

    def run(
        self, build: Callable[..., bytes], form: tuple[int, ...], features: Mapping[str, ort.OrtValue], **numbers: Any
    ) -> ort.OrtValue:
        """The output `FEATURES` of the graph `build(*form)`, on the device. `numbers` are its int64 inputs."""
        key = (build, *form)
        if key not in self._sessions:
            self._sessions[key] = self.open(build(*form))
        inputs = {**features, **{name: np.ascontiguousarray(one, np.int64) for name, one in numbers.items()}}
        return run_graph(self._sessions[key], inputs, [FEATURES], self._graphs.device)[FEATURES]


class Pieces(NamedTuple):
    """Rows of features on their device. The last value may have more rows than count."""

    values: tuple[ort.OrtValue, ...]
    num_rows: int


Features = tuple[Pieces, ...]
"""An item's features, for each input of the embedding graph."""


def num_bytes(features: Features) -> int:
    """Bytes of an item's features."""
    values = [value for pieces in features for value in pieces.values]
    return sum(prod(value.shape()) * ITEM_BYTES[value.element_type()] for value in values)


def pick_rows(graphs: SmallGraphs, features: ort.OrtValue, pieces: Sequence[Array], num_rows: int) -> Pieces:
    """Rows of `features`, whose axes before the last are numbered through, as pieces [N, H]; `num_rows` rows count."""
    form = features.element_type(), len(features.shape()), features.shape()[-1]
    return Pieces(tuple(graphs.run(pick_graph, form, {"x": features}, rows=rows_N) for rows_N in pieces), num_rows)


def put_rows(graphs: SmallGraphs, parts: Sequence[Pieces], base: ort.OrtValue) -> ort.OrtValue:
    """`base` [N, H], whose first rows are replaced by those of all parts, one after the other."""
    numbers_N, begin = np.arange(base.shape()[0]), 0
    for part in parts:
        left = part.num_rows
        for value in part.values:
            count = min(left, value.shape()[0])
            rows_N = numbers_N.copy()
            rows_N[begin : begin + count] = len(numbers_N) + numbers_N[:count]
            base = graphs.run(
                put_rows_graph, (base.element_type(), base.shape()[1]), {"a": base, "b": value}, rows=rows_N
            )
            begin, left = begin + count, left - count
    return base
