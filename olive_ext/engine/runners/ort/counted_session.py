"""Sessions on the way of a picture or a sound, which note every input shape that they are run with. Knows no item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from olive_ext.errors import ConfigError, RunError

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
        self._met: set[tuple[int, Shapes]] = set()
        self._late: set[tuple[int, Shapes]] = set()
        self._num_sessions = 0
        self._is_frozen = False

    def of(self, session: ort.InferenceSession, name: str) -> CountedSession:
        """`session`, whose runs count from now on; an error calls it by `name`."""
        self._num_sessions += 1
        return CountedSession(session, name, self, self._num_sessions)

    def opener(self, open_graph: OpenGraph, where: str) -> OpenGraph:
        """`open_graph` for helper graphs that lie `where`, whose runs count."""

        def opened(graph: bytes) -> CountedSession:
            session = open_graph(graph)
            return self.of(session, f"the graph '{session.get_modelmeta().graph_name}' {where}")

        return opened

    def freeze(self) -> None:
        """All shapes that are expected have been run."""
        self._is_frozen = True

    def refuse(self, problem: str) -> None:
        """Raises `ConfigError` where shapes must be few, which `problem` speaks against."""
        if self._is_strict:
            raise ConfigError(f"'engine.strict_shapes' = true: {problem}")

    def note(self, number: int, name: str, shapes: Shapes) -> None:
        """Counts a run that is about to happen. Raises `LateShapeError` where it may not."""
        key = number, shapes
        if key in self._met:
            return
        if self._is_frozen and self._is_strict:
            shown = ", ".join(f"'{tensor}' {list(shape)}" for tensor, shape in shapes)
            raise LateShapeError(f"'engine.strict_shapes' = true: {name} was not run with {shown} beforehand")
        (self._late if self._is_frozen else self._met).add(key)

    def describe(self) -> Mapping[str, Any]:
        """Shapes run beforehand, where they were, and those met later, of all sessions together."""
        if not self._is_frozen:
            return {}
        return {"encoder_shapes_warmed": len(self._met), "encoder_shapes_late": len(self._late)}


class CountedSession:
    """A session whose runs are counted. It is used like ONNX Runtime's, by bindings of its own."""

    def __init__(self, session: ort.InferenceSession, name: str, count: ShapeCount, number: int) -> None:
        self._session = session
        self._name = name
        self._count = count
        self._number = number

    def io_binding(self) -> CountedBinding:
        return CountedBinding(self._session)

    def run_with_iobinding(self, binding: CountedBinding) -> None:
        """Raises `LateShapeError` for a shape that was to be run beforehand and was not."""
        self._count.note(self._number, self._name, tuple(binding.shapes.items()))
        self._session.run_with_iobinding(binding)

    def __getattr__(self, name: str) -> Any:
        """What else a session tells of itself."""
        if name.startswith("run"):
            raise AttributeError(f"a counted session is run with a binding, not by {name}")
        return getattr(self._session, name)


class CountedBinding(ort.IOBinding):  # type: ignore[misc]
    """A binding that knows the shapes of its inputs."""

    def __init__(self, session: ort.InferenceSession) -> None:
        super().__init__(session)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        super().bind_ortvalue_input(name, value)
        self.shapes[name] = tuple(value.shape())

    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        super().bind_cpu_input(name, array)
        self.shapes[name] = array.shape

    def bind_input(self, *given: Any) -> None:
        raise NotImplementedError("an address has no shape that could be counted")
