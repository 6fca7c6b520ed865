"""What the graphs on the way of a picture or a sound share: sessions that count the input shapes they are run with, and
small graphs from features to features. Knows no item.

Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.media.shapes import Array
from olive_ext.errors import ConfigError, RunError
from olive_ext.graph.standalone_graphs import FEATURES, join_graph, pick_graph, put_rows_graph
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import ITEM_BYTES

OpenGraph = Callable[[bytes], Any]
"""Opens a serialized graph: an `InferenceSession`, or what is used like one."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class LateShapeError(RunError):
    """A session was about to be run with a shape that it was not run with beforehand, as it had to be."""


class ShapeCount:
    """The input shapes that the sessions of one model have been run with on the way of its items: beforehand, and since
    then. With `is_strict` a shape that was not run beforehand raises `LateShapeError`."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._warmed: set[tuple[int, Shapes]] = set()
        self._late: set[tuple[int, Shapes]] = set()
        self._num_sessions = 0
        self._is_frozen = False

    def of(self, session: ort.InferenceSession, name: str) -> CountedSession:
        """`session`, whose runs count from now on; an error calls it by `name`."""
        self._num_sessions += 1
        return CountedSession(session, name, self, self._num_sessions)

    def freeze(self) -> None:
        """All shapes that are expected have been run."""
        self._is_frozen = True

    def refuse(self, problem: str) -> None:
        """Raises `ConfigError` where shapes must be few, which `problem` speaks against."""
        if self._is_strict:
            raise ConfigError(f"'engine.strict_shapes' = true: {problem}", "engine.strict_shapes")

    def note(self, number: int, name: str, shapes: Shapes) -> None:
        """Counts a run that is about to happen. Raises `LateShapeError` where it may not."""
        key = number, shapes
        if key in self._warmed:
            return
        if self._is_frozen and self._is_strict:
            shown = ", ".join(f"'{tensor}' {list(shape)}" for tensor, shape in shapes)
            raise LateShapeError(f"'engine.strict_shapes' = true: {name} was not run with {shown} beforehand")
        (self._late if self._is_frozen else self._warmed).add(key)

    def describe(self) -> Mapping[str, Any]:
        """Shapes run beforehand, where they were, and those met later, of all sessions together."""
        if not self._is_frozen:
            return {}
        return {"encoder_shapes_warmed": len(self._warmed), "encoder_shapes_late": len(self._late)}


class CountedSession:
    """A session whose runs are counted. It is used like ONNX Runtime's, by bindings of its own."""

    def __init__(self, session: ort.InferenceSession, name: str, count: ShapeCount, number: int) -> None:
        self._session = session
        self._name = name
        self._count = count
        self._number = number

    def io_binding(self) -> CountedBinding:
        """A new binding, which knows the shapes of its inputs."""
        return CountedBinding(self._session)

    def run_with_iobinding(self, binding: CountedBinding) -> None:
        """Raises `LateShapeError` for a shape that was to be run beforehand and was not."""
        self._count.note(self._number, self._name, tuple(binding.shapes.items()))
        self._session.run_with_iobinding(binding)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the session."""
        if name.startswith("run"):
            raise AttributeError(f"a counted session is run with a binding, not by {name}")
        return getattr(self._session, name)


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
    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        super().bind_cpu_input(name, array)
        self.shapes[name] = array.shape

    @override
    def bind_input(self, *given: Any) -> None:
        raise NotImplementedError("an address has no shape that could be counted")


@dataclass(frozen=True)
class ItemGraphs:
    """Where the graphs on the way of items run, and how they are opened."""

    device: Device
    open_graph: OpenGraph
    count: ShapeCount = field(default_factory=ShapeCount)
    is_bucketed: bool = False
    """Whether these graphs are run with few shapes."""

    bucket: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    """Logs what running a shape for the first time costs, by the shape's name."""


class SmallGraphs:
    """Graphs without weights from features to features, opened when they are first needed, whose runs count."""

    def __init__(self, graphs: ItemGraphs, where: str) -> None:
        """`where` they are on the way of items, for errors: "behind the image encoder"."""
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
        session, device = self._sessions[key], self._graphs.device
        binding = session.io_binding()
        for name, value in features.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in numbers.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array, np.int64))
        binding.bind_output(FEATURES, device.kind, device.index)
        session.run_with_iobinding(binding)
        (output,) = binding.get_outputs()
        return output


class Pieces(NamedTuple):
    """Rows of features on their device, of which the last value may have more than there are."""

    values: tuple[ort.OrtValue, ...]
    num_rows: int


Features = tuple[Pieces, ...]
"""An item's rows, of each of the embedding graph's inputs."""


def num_bytes(features: Features) -> int:
    """Memory of an item's features."""
    values = [value for pieces in features for value in pieces.values]
    return sum(prod(value.shape()) * ITEM_BYTES[value.element_type()] for value in values)


def pick_rows(graphs: SmallGraphs, features: ort.OrtValue, pieces: Sequence[Array], num_rows: int) -> Pieces:
    """Rows of `features`, whose axes before the last count rows, in pieces [N, H]; `num_rows` of them count."""
    form = features.element_type(), len(features.shape()), features.shape()[-1]
    return Pieces(tuple(graphs.run(pick_graph, form, {"x": features}, rows=rows_N) for rows_N in pieces), num_rows)


def join_rows(graphs: SmallGraphs, parts: Sequence[ort.OrtValue]) -> ort.OrtValue:
    """The rows of all parts, one behind the other: [N, H]."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        form = (parts[0].element_type(),)
        last = parts[len(parts) & ~1 :]
        parts = [*(graphs.run(join_graph, form, {"a": left, "b": right}) for left, right in pairs), *last]
    return parts[0]


def put_rows(graphs: SmallGraphs, parts: Sequence[Pieces], base: ort.OrtValue) -> ort.OrtValue:
    """`base` [N, H] with the rows of all parts, one behind the other, in place of its first ones."""
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
