"""The KV cache behind a runner: what its forms share. A store binds past and present of a step's rows to a session, and
keeps what comes back. Knows no tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.capacity import NO_BLOCKS, UNLIMITED, Blocks
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.step import Copy, Move, Row, Step
from olive_ext.graph.standalone_graphs import RowTensor, equal_parts, stack_graph, zeros_graph
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import ITEM_BYTES, DecoderSpec, KvTensor


@dataclass(frozen=True)
class KvPlace:
    """What a store serves and where: the decoder's session, its caches, the slots, and how helper graphs are opened."""

    session: ort.InferenceSession
    spec: DecoderSpec
    num_slots: int
    device: Device
    open_graph: Callable[[bytes], ort.InferenceSession]
    most_positions: int | None = None
    """Positions of all slots together that memory holds, where slots share it and that is known."""


MOST_PARTS = 8
"""Batches that one run puts together: each has its own inputs in a graph, which is made for their number."""

UINT8 = 2
"""ONNX's element type."""

MOST_FILLED = 2**30
"""Bytes that one run fills with zeros: CUDA's kernel counts them in 32 bits."""

Values = tuple[ort.OrtValue, ...]


class StackedPart(NamedTuple):
    """Rows of a batch, and for tensors that have positions which of these, in which order."""

    values: Values
    rows: Sequence[int]
    positions: Sequence[int]
    is_whole: bool = False
    """These are all rows and positions of the batch, in their order: nothing has to be picked."""


class Stacker:
    """One graph for each number of parts, and whether they are whole, opened when it is needed."""

    def __init__(
        self, open_graph: Callable[[bytes], ort.InferenceSession], device: Device, tensors: Sequence[RowTensor]
    ) -> None:
        self._open_graph = open_graph
        self._device = device
        self._tensors = tensors
        self._sessions: dict[tuple[int, bool], ort.InferenceSession] = {}

    def stack(self, parts: Sequence[StackedPart]) -> Values:
        """The parts' rows behind each other, in new memory. All parts have as many positions."""
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
        binding = session.io_binding()
        taken = {found.name for found in session.get_inputs()}
        for place, part in enumerate(parts):
            for i, value in enumerate(part.values):
                binding.bind_ortvalue_input(f"x{i}_{place}", value)
            for name, numbers in ((f"rows_{place}", part.rows), (f"positions_{place}", part.positions)):
                if name in taken:
                    binding.bind_cpu_input(name, np.array(numbers, np.int64))
        for i in range(len(self._tensors)):
            binding.bind_output(f"y{i}", self._device.kind, self._device.index)
        session.run_with_iobinding(binding)
        return tuple(binding.get_outputs())


class KeptBinding(ort.IOBinding):  # type: ignore[misc]
    """A binding for many runs: a value that is bound already is not bound anew, nor a device named anew."""

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


class KvStore(ABC):
    """KV of `num_slots` slots with `capacity` positions each."""

    form: StepForm
    """The form of the steps that the store can bind."""

    is_in_place: ClassVar[bool] = True
    """The graph writes into the memory that is bound, so that its present outputs need not be read."""

    pads_in_front = False
    """Rows of one step that have fewer positions than others are filled up in front, not behind."""

    def __init__(self, place: KvPlace) -> None:
        self.num_slots = place.num_slots
        self.capacity = 0
        self.touched = 0, 0
        """The most slots and the most positions of one that were in use since memory was allocated."""

        self._session = place.session
        self._spec = place.spec
        self._place = place
        self._device = place.device
        self._open_graph = place.open_graph

    @abstractmethod
    def reserve(self, capacity: int) -> None:
        """Allocates anew with `capacity` positions for each slot; what was resident is gone."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes the first positions of slots those of others, one copy after the other."""

    @abstractmethod
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        """A binding of the session in which past and present of `rows` are bound."""

    @property
    def blocks(self) -> Blocks:
        """Those that slots take as they grow, where slots are made of such."""
        return NO_BLOCKS

    def halve(self) -> bool:
        """Has the next `reserve` take half as much memory; False where less would not do."""
        if self.num_slots == 1:
            return False
        self.num_slots //= 2
        return True

    @property
    def most_positions(self) -> int:
        """Positions that all slots together may hold, where memory bounds them beside their number."""
        return UNLIMITED if self._place.most_positions is None else self._place.most_positions

    def is_worn(self, num_slots: int, positions: int) -> bool:
        """Whether so many slots of so many positions may be more than `most_positions`, with what others have touched
        beside them: few long ones and many short ones are each as much as that."""
        slots, longest = self.touched
        self.touched = max(slots, num_slots), max(longest, positions)
        most = max(num_slots * positions, self.most_positions * 5 // 4)
        return self.most_positions < UNLIMITED and math.prod(self.touched) > most

    @property
    def num_cells(self) -> int:
        """Cells that are held beside the slots, for texts that have none."""
        return 0

    def reserve_cells(self, num_cells: int) -> None:  # noqa: B027 (most stores have none)
        """Allocates so many cells anew."""

    def move(self, move: Move) -> None:
        """Moves cells."""
        raise TypeError(f"{type(self).__name__} has no cells")

    def bind_masks(self, bind: Callable[[str, npt.NDArray[Any]], None], step: Step) -> None:  # noqa: B027
        """Binds what the graph needs to know which cells a token sees."""

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        """Like `bind`, for those who keep the binding. Only caches that are written in place have such."""
        raise TypeError(f"{type(self).__name__} has caches that move")

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:  # noqa: B027 (nothing to do)
        """Takes in the present outputs, in the order of the caches, after the run; none of graphs in place."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Which form it is, for `describe_execution`."""

    def release_memory(self) -> None:
        """Releases the memory until `reserve` allocates anew."""
        self.close()
        self.capacity = 0

    @abstractmethod
    def close(self) -> None:
        """Releases the memory."""


def allocate(session: ort.InferenceSession, shape: list[int], elem_type: int, device: Device) -> ort.OrtValue:
    """Memory on `device` that several sessions bind. Values that a session makes belong to it alone everywhere but on
    WebGPU, whose values nothing else can make."""
    if device.kind == "webgpu":
        return session.create_ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)


def device_zeros(open_graph: Callable[[bytes], ort.InferenceSession], shape: list[int], device: Device) -> ort.OrtValue:
    """Zero bytes on `device`, whose values have addresses; made there, because the host may have no room for them."""
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


def zeros(shape: list[int], elem_type: int) -> ort.OrtValue:
    """Zeros in the host's memory, which binding copies to the device. In every type zero is zero bytes."""
    unsigned = np.dtype(f"u{ITEM_BYTES[elem_type]}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, unsigned), elem_type)


COPIED_BYTES = 128
"""Bytes of a pool that one index stands for at most, and so one thread of ScatterND on CUDA copies. Whole blocks, of
262,144 bytes an index, took 10.1 ms a tensor and 98 % of the device's time; rows of 128 bytes take 0.007 ms, and
scoring went from 20 to 622 questions a second (one H200, 27 November 2026, onnxruntime-gpu 1.31.1, Llama-3.2-1B, fp16).
They are words of 8 bytes, because CUDA's Gather counts elements in 32 bits: 16 GiB a tensor."""

WORDS = {1: UINT8, 2: 5, 4: 6, 8: 7}
"""ONNX's integers by their bytes: CUDA copies no fp8 by its type."""


class Pool:
    """Zeroed memory of one KV tensor's blocks [N, positions, heads, size]: what lies behind a row's last position must
    be finite. Held as bytes where values have addresses."""

    def __init__(
        self,
        session: ort.InferenceSession,
        tensor: KvTensor,
        num_blocks: int,
        device: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
    ) -> None:
        shape = [num_blocks, BLOCK_SIZE, tensor.heads, tensor.head_size]
        size = math.prod(shape[2:]) * ITEM_BYTES[tensor.elem_type]
        word = gcd(size, 8)
        parts = equal_parts(size // word, COPIED_BYTES // word)
        self.words = WORDS[word], parts
        """A type of integers, and the rows of such that make a position: as these it is copied by address."""

        self._device = device
        self._typed = tensor.elem_type, shape
        self._rows = [num_blocks * BLOCK_SIZE * parts, size // word // parts]
        if device.has_pointers:
            self._value = device_zeros(open_graph, [num_blocks, BLOCK_SIZE, size], device)
        else:
            self._value = allocate(session, shape, tensor.elem_type, device)

    def bind(self, binding: ort.IOBinding, past: str, present: str) -> None:
        """Binds the pool as the cache that goes in and comes out."""
        self._bind(binding, past, present, *self._typed)

    def bind_copy(self, binding: ort.IOBinding, i: int) -> None:
        """Binds the pool as tensor `i` of the graph that copies."""
        if not self._device.has_pointers:
            binding.bind_ortvalue_input(f"r{i}", self._value)
        self._bind(binding, f"x{i}", f"y{i}", self.words[0], self._rows)

    def _bind(self, binding: ort.IOBinding, past: str, present: str, elem_type: int, shape: list[int]) -> None:
        if self._device.has_pointers:
            place = self._device.kind, self._device.index, elem_type, shape, self._value.data_ptr()
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)
        else:
            binding.bind_ortvalue_input(past, self._value)
            binding.bind_ortvalue_output(present, self._value)
