"""KV that the graph reads and writes in place.

In memory with addresses (CPU, CUDA) rows are bound by pointer, past and present in one:

    buffer [slots, heads, capacity, head_size]      rows 2 and 3 of a step = one view that starts at slot 2

On a device whose values have no address (WebGPU, DirectML) rows cannot be bound out of a buffer:

    pool [slots, ...]       decoding reads and writes all rows in place
    staging [1, ...]        a row with several tokens runs here; it stands for one slot until another one is needed

Between the two rows move on the device, in place, and only the positions that are resident. All copies between slots of
a step are one such run within the pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.forms.kv_store import UINT8, KeptBinding, KvPlace, KvStore, allocate, device_zeros
from olive_ext.engine.forms.rows.steps import AllSlots, NeighbouringSlots
from olive_ext.engine.step import Copy, Move, Row
from olive_ext.graph.standalone_graphs import RowTensor, copy_graph, move_graph
from olive_ext.model.types import ITEM_BYTES, KvTensor

Bytes = npt.NDArray[np.uint8]


class ViewKv(KvStore):
    """KV that the graph reads and writes in place."""

    form: StepForm = NeighbouringSlots()

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._buffers: list[_Buffer] = []
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._copier: ort.InferenceSession | None = None

    @override
    def reserve(self, capacity: int) -> None:
        self._free()
        self.capacity = capacity
        for tensor in self._spec.kv:
            self._buffers.append(_Buffer(tensor, self.num_slots, capacity, self._place))

    @override
    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if self._device.kind != "cpu":
                self._copy_on_device(copy)
                continue
            for buffer in self._buffers:
                buffer.copy(copy)

    def _copy_on_device(self, copy: Copy) -> None:
        if self._copier is None:
            self._copier = self._open_graph(copy_graph([UINT8] * len(self._buffers)))  # CUDA copies no fp8 by its type
        binding = self._copier.io_binding()
        for i, buffer in enumerate(self._buffers):
            binding.bind_input(f"x{i}", *buffer.bytes_of(copy.source))
            binding.bind_output(f"y{i}", *buffer.bytes_of(copy.target))
        self._copier.run_with_iobinding(binding)

    def move(self, move: Move) -> None:
        """Moves positions of slot 0, in the host's memory."""
        for buffer in self._buffers:
            buffer.move(move)

    @override
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self.bind_slots(rows[0].slot, len(rows))

    def bind_slots(self, first: int, count: int) -> ort.IOBinding:
        """A binding in which past and present of neighbouring slots are bound."""
        key = (first, count)
        if key not in self._bindings:
            self._bindings[key] = self._binding(*key)
        return self._bindings[key]

    @override
    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self._binding(rows[0].slot, len(rows))

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "in_place", "kv_binding": "rows by pointer, past and present share one buffer"}

    @override
    def close(self) -> None:
        self._free()

    def _free(self) -> None:
        """Its own memory alone: what a store keeps beside the slots stays where these are allocated anew."""
        self._bindings.clear()
        self._buffers.clear()

    def _binding(self, first: int, count: int) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, buffer in zip(self._spec.kv, self._buffers, strict=True):
            view = buffer.view(first, count)
            binding.bind_input(tensor.past, *view)
            binding.bind_output(tensor.present, *view)
        return binding


class _Buffer:
    """Zeroed memory of one KV tensor. Held as bytes, so that types numpy lacks are no matter."""

    def __init__(self, tensor: KvTensor, num_slots: int, capacity: int, place: KvPlace) -> None:
        self._tensor = tensor
        self._device = place.device
        self._shape = tensor.shape(1, capacity)[1:]
        *outer, inner = self._shape
        shape = [num_slots, *outer, inner * ITEM_BYTES[tensor.elem_type]]
        self._slot_bytes = math.prod(shape[1:])
        if place.device.kind == "cpu":
            memory: Bytes = np.zeros(shape, np.uint8)
            self._bytes_by_position = memory.swapaxes(1, tensor.position_axis)
            self._address = memory.ctypes.data
        else:
            self._value = device_zeros(place.open_graph, shape, place.device)
            self._address = self._value.data_ptr()

    def copy(self, copy: Copy) -> None:
        """Copies positions between slots in the host's memory."""
        memory = self._bytes_by_position
        positions = slice(copy.num_equal, copy.length)
        memory[copy.target, positions] = memory[copy.source, positions]

    def move(self, move: Move) -> None:
        """Moves positions of slot 0, which may overlap, in the host's memory."""
        memory = self._bytes_by_position[0]
        memory[move.target : move.target + len(move.source_N)] = memory[move.source_N]

    def bytes_of(self, slot: int) -> tuple[str, int, int, list[int], int]:
        """Arguments of IOBinding for one slot as bytes [1, 1, 1, bytes]."""
        address = self._address + slot * self._slot_bytes
        return self._device.kind, self._device.index, UINT8, [1, 1, 1, self._slot_bytes], address

    def view(self, first: int, count: int) -> tuple[str, int, int, list[int], int]:
        """Arguments of IOBinding for slots `first` to `first + count`: device, type, shape, address."""
        address = self._address + first * self._slot_bytes
        return self._device.kind, self._device.index, self._tensor.elem_type, [count, *self._shape], address


Values = list[ort.OrtValue]


class StagedKv(KvStore):
    """KV that the graph reads and writes in place, in a pool or in the staging row."""

    form = AllSlots()

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._mover: ort.InferenceSession | None = None
        self._staging: Values = []
        self._pool: Values = []
        self._bindings: dict[int, ort.IOBinding] = {}
        self._staged_slot: int | None = None
        self._staged_length: int | None = None
        """The positions of the staged slot, where the pool lacks some of them."""

    @override
    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        self._staging = [self._allocate(tensor, 1) for tensor in self._spec.kv]
        self._bindings[1] = self._binding(self._staging)
        if self.num_slots > 1:
            self._pool = [self._allocate(tensor, self.num_slots) for tensor in self._spec.kv]
            self._bindings[self.num_slots] = self._binding(self._pool)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Positions from the first on, as many of each as the longest copy has. All are read before one is written."""
        self._write_back()
        sources: dict[int, int] = {}
        for copy in copies:
            sources[copy.target] = sources.get(copy.source, copy.source)
        self._move(self._pool, self._pool, sources, max(copy.length for copy in copies))
        if self._staged_slot in sources:
            self._staged_slot = None

    @override
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        slot, past, tokens = rows[0][:3]
        if len(rows) > 1:
            self._write_back()
            self._staged_slot = None
        elif self._pool:
            if self._staged_slot != slot:
                self._write_back()
                if past:
                    self._move(self._staging, self._pool, {0: slot}, past)
            self._staged_slot, self._staged_length = slot, past + len(tokens)
        return self._bindings[len(rows)]

    @override
    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self._binding(self._staging if len(rows) == 1 else self._pool)

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "in_place", "kv_binding": "device values without address: a pool and a staging row"}

    @override
    def close(self) -> None:
        self._bindings.clear()
        self._staging.clear()
        self._pool.clear()
        self._staged_slot = self._staged_length = None

    def _write_back(self) -> None:
        if self._staged_slot is not None and self._staged_length is not None:
            self._move(self._pool, self._staging, {self._staged_slot: 0}, self._staged_length)
            self._staged_length = None

    def _move(self, into: Values, out_of: Values, sources: Mapping[int, int], length: int) -> None:
        """Moves the first positions between rows, `sources` by target. Up to a power of two: few shapes."""
        if self._mover is None:
            rows = [RowTensor(tensor.elem_type, tensor.row_shape) for tensor in self._spec.kv]
            self._mover = self._open_graph(move_graph(rows))
        binding = self._mover.io_binding()
        for i, (target, source) in enumerate(zip(into, out_of, strict=True)):
            binding.bind_ortvalue_input(f"x{i}", target)
            binding.bind_ortvalue_input(f"r{i}", source)
            binding.bind_ortvalue_output(f"y{i}", target)
        for name, numbers in (("source", sources.values()), ("target", sources)):
            binding.bind_cpu_input(name, np.array([*numbers], np.int32).reshape(-1, 1, 1, 1))
        binding.bind_cpu_input("count", np.array([min(self.capacity, 1 << (length - 1).bit_length())], np.int64))
        self._mover.run_with_iobinding(binding)

    def _binding(self, values: Values) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, value in zip(self._spec.kv, values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_ortvalue_output(tensor.present, value)
        return binding

    def _allocate(self, tensor: KvTensor, num_rows: int) -> ort.OrtValue:
        return allocate(self._session, tensor.shape(num_rows, self.capacity), tensor.elem_type, self._device)
