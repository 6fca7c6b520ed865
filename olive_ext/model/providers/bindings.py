"""Values on a device, how sessions of ONNX Runtime are bound to them, and what they, their providers and allocators
raise: memory that ran out, or anything else, with what was being done. Knows no step and no cache.

Axes: S tokens of a row, T cells or positions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as library
from typing_extensions import override

from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.graph.standalone_graphs import RowTensor, stack_graph, zeros_graph
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import reason_of
from olive_ext.model.spec.role_inputs import COMPUTE, StepArrays, input_array
from olive_ext.model.types import ITEM_BYTES, InputSpec

UINT8 = 2
"""ONNX's element type."""

MOST_FILLED = 2**30
"""Bytes that one run fills with zeros: CUDA's kernel counts them in 32 bits."""

Values = tuple[ort.OrtValue, ...]


def zeros(shape: list[int], elem_type: int) -> ort.OrtValue:
    """Zeros in the host's memory, which binding copies to the device. In every type zero is zero bytes."""
    unsigned = np.dtype(f"u{ITEM_BYTES[elem_type]}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, unsigned), elem_type)


def allocate(session: ort.InferenceSession, shape: list[int], elem_type: int, device: Device) -> ort.OrtValue:
    """Memory on `device` that several sessions bind. Values that a session makes belong to it alone, except on WebGPU,
    where only sessions can make values."""
    if device.kind == "webgpu":
        return session.create_ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)


def device_zeros(open_graph: Callable[[bytes], ort.InferenceSession], shape: list[int], device: Device) -> ort.OrtValue:
    """Zero bytes on `device`, whose values have addresses, made there: the host may not have room for them."""
    if device.kind == "cpu":
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.uint8))
    value = ort.OrtValue.ortvalue_from_shape_and_type(shape, UINT8, device.kind, device.index)
    session, count = open_graph(zeros_graph()), math.prod(shape)
    for start in range(0, count, MOST_FILLED):
        part = min(MOST_FILLED, count - start)
        binding = session.io_binding()
        binding.bind_cpu_input("count", np.array([part], np.int64))
        binding.bind_output("y", device.kind, device.index, UINT8, [part], value.data_ptr() + start)
        session.run_with_iobinding(binding)
    return value


def run_graph(
    session: Any, inputs: Mapping[str, ort.OrtValue | npt.NDArray[Any]], outputs: Iterable[str], device: Device
) -> dict[str, ort.OrtValue]:
    """The `outputs` of a session by name, on `device`, for values on devices and arrays in the host's memory."""
    binding, names = session.io_binding(), list(dict.fromkeys(outputs))
    for name, value in inputs.items():
        bind = binding.bind_ortvalue_input if isinstance(value, ort.OrtValue) else binding.bind_cpu_input
        bind(name, value)
    for name in names:
        binding.bind_output(name, device.kind, device.index)
    session.run_with_iobinding(binding)
    return dict(zip(names, binding.get_outputs(), strict=True))


KEPT_VALUES = 64
"""The most device values that are kept for updating; the least recently used goes first."""


class InputFeed:
    """Binds host arrays to runs of `session`. An input that the session takes on its device has one value there for
    each shape. It is updated in place, and only where its content changes, so that a known shape needs no allocation.
    """

    def __init__(self, session: ort.InferenceSession, device: Device, kept: int | None = KEPT_VALUES) -> None:
        """`kept`: values that are kept at most; all where it is None."""
        infos: Any = getattr(session, "get_input_memory_infos", list)  # from ONNX Runtime 1.24 on
        taken = zip(session.get_inputs(), infos() if device.kind != "cpu" else (), strict=False)
        self._on_device = {value.name for value, info in taken if info.name != "Cpu"}
        self.session = session
        self._device = device
        self._kept = kept
        self._values: OrderedDict[tuple[str, tuple[int, ...]], tuple[ort.OrtValue, bytes]] = OrderedDict()
        """By name and shape the values and their contents."""

    def bind(self, binding: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
        """Binds `array` as the input `name`. It may be changed only after the run."""
        if name not in self._on_device or not array.size:
            binding.bind_cpu_input(name, array)
            return
        key, content = (name, array.shape), array.tobytes()
        value, last = self._values.pop(key, (None, content))
        if value is None:
            value = ort.OrtValue.ortvalue_from_numpy(array, self._device.kind, self._device.index)
            if self._kept is not None and len(self._values) == self._kept:
                self._values.popitem(last=False)
        elif last != content:
            value.update_inplace(array)
        self._values[key] = value, content
        binding.bind_ortvalue_input(name, value)

    def bind_inputs(self, binding: ort.IOBinding, specs: Sequence[InputSpec], layout: StepArrays) -> None:
        """Binds the inputs in `specs`, computed from a step's rows."""
        for spec in specs:
            if spec.role in COMPUTE:
                self.bind(binding, spec.tensor.name, input_array(spec, layout))


class KeptBinding(ort.IOBinding):  # type: ignore[misc]
    """A binding for many runs: a value or a device that is bound already is not bound again."""

    def __init__(self, session: ort.InferenceSession) -> None:
        super().__init__(session)
        self._inputs: dict[str, ort.OrtValue | None] = {}
        self._devices: dict[tuple[str, int], Any] = {}

    @override
    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        if self._inputs.get(name) is not value:
            super().bind_ortvalue_input(name, value)
            self._inputs[name] = value

    @override
    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        super().bind_cpu_input(name, array)
        self._inputs[name] = None

    def bind_output(self, name: str, kind: str = "cpu", index: int = 0, *place: Any) -> None:
        """Without a `place` (type, shape, address) ONNX Runtime allocates the output anew for each run."""
        if place:
            super().bind_output(name, kind, index, *place)
            return
        device = self._devices.get((kind, index))
        if device is None:
            device = self._devices[kind, index] = ort.OrtDevice.make(kind, index)._get_c_device()
        self._iobinding.bind_output(name, device)


MOST_PARTS = 8
"""The most batches that one run joins: each has inputs of its own in a graph, which is made for their number."""


class StackedPart(NamedTuple):
    """Rows of a batch and, for tensors that have positions, which of these, in which order."""

    values: Values
    rows: Sequence[int]
    positions: Sequence[int]
    is_whole: bool = False
    """Whether these are all rows and positions of the batch, in order: nothing has to be picked."""


class Stacker:
    """One graph for each number of parts, and for whole parts or not, opened when it is needed."""

    def __init__(
        self, open_graph: Callable[[bytes], ort.InferenceSession], device: Device, tensors: Sequence[RowTensor]
    ) -> None:
        self._open_graph = open_graph
        self._device = device
        self._tensors = tensors
        self._sessions: dict[tuple[int, bool], ort.InferenceSession] = {}

    def stack(self, parts: Sequence[StackedPart]) -> Values:
        """The parts' rows one after the other, in new memory. All parts have as many positions."""
        if not self._tensors:  # of a part of a graph above all caches
            return ()
        while len(parts) > MOST_PARTS:
            parts = [self._joined(parts[i : i + MOST_PARTS]) for i in range(0, len(parts), MOST_PARTS)]
        return self._run(parts)

    def _joined(self, parts: Sequence[StackedPart]) -> StackedPart:
        rows, positions = sum(len(part.rows) for part in parts), len(parts[0].positions)
        return StackedPart(self._run(parts), range(rows), range(positions), is_whole=True)

    def _run(self, parts: Sequence[StackedPart]) -> Values:
        form = len(parts), all(part.is_whole for part in parts)
        if form not in self._sessions:
            self._sessions[form] = self._open_graph(stack_graph(self._tensors, form[0], is_whole=form[1]))
        session = self._sessions[form]
        taken = {entry.name for entry in session.get_inputs()}
        inputs: dict[str, Any] = {}
        for place, part in enumerate(parts):
            inputs |= {f"x{i}_{place}": value for i, value in enumerate(part.values)}
            numbers = {f"rows_{place}": part.rows, f"positions_{place}": part.positions}
            inputs |= {name: np.array(values, np.int64) for name, values in numbers.items() if name in taken}
        outputs = [f"y{i}" for i in range(len(self._tensors))]
        return tuple(run_graph(session, inputs, outputs, self._device).values())


MEMORY_WORDS = (
    "to allocate",
    "smaller than requested bytes",
    "out of memory",
    "outofmemory",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)
"""How ONNX Runtime's arena (two), CUDA, DirectML, cuBLAS, cuDNN, C++ and numpy say that memory ran out."""

FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,
    MemoryError,
    *(kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""What ONNX Runtime, providers and allocators raise."""


@contextmanager
def named_ort_failures(doing: str) -> Iterator[None]:
    """Raises errors of ONNX Runtime as `named_failure`."""
    try:
        yield
    except FAILURES as error:
        raise named_failure(error, doing) from error


def named_failure(error: Exception, doing: str) -> Exception:
    """`MemoryShortageError` or `RunError` for what ONNX Runtime and allocators raise. Raises any other `error`."""
    if not isinstance(error, FAILURES):
        raise error
    shown = f"ONNX Runtime failed {doing}: {reason_of(error)}"
    return MemoryShortageError(shown) if is_memory_error(error) else RunError(shown)


def is_memory_error(error: Exception) -> bool:
    """Whether the message of ONNX Runtime, a provider or numpy says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in MEMORY_WORDS)
