"""KV in memory with addresses (CPU, CUDA): one buffer for each tensor, rows bound by pointer, past and present in one.

buffer [slots, heads, capacity, head_size]      rows 2 and 3 of a step = one view that starts at slot 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.kv_store import Device, KeptBinding, KvPlace, KvStore
from olive_ext.engine.step import Batching, Copy, Move, Row
from olive_ext.graph.standalone_graphs import copy_graph
from olive_ext.model.types import ITEM_BYTES, KvTensor

Bytes = npt.NDArray[np.uint8]
UINT8 = 2
"""ONNX's element type."""


class ViewKv(KvStore):
    """KV that the graph reads and writes in place."""

    batching = Batching.RANGE

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._buffers: list[_Buffer] = []
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._copier: ort.InferenceSession | None = None

    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        for tensor in self._spec.kv:
            self._buffers.append(_Buffer(tensor, self.num_slots, capacity, self._device))

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if self._device.kind != "cpu":
                self._copy_on_device(copy)
                continue
            for buffer in self._buffers:
                buffer.copy(copy)

    def _copy_on_device(self, copy: Copy) -> None:
        """The whole slot."""
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

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self.bind_slots(rows[0].slot, len(rows))

    def bind_slots(self, first: int, count: int) -> ort.IOBinding:
        """A binding in which past and present of neighbouring slots are bound."""
        key = (first, count)
        if key not in self._bindings:
            self._bindings[key] = self._binding(*key)
        return self._bindings[key]

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self._binding(rows[0].slot, len(rows))

    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "in_place", "kv_binding": "rows by pointer, past and present share one buffer"}

    def close(self) -> None:
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

    def __init__(self, tensor: KvTensor, num_slots: int, capacity: int, device: Device) -> None:
        self._tensor = tensor
        self._device = device
        self._shape = tensor.shape(1, capacity)[1:]
        *outer, inner = self._shape
        memory: Bytes = np.zeros((num_slots, *outer, inner * ITEM_BYTES[tensor.elem_type]), np.uint8)
        self._slot_bytes = memory.nbytes // num_slots
        if device.kind == "cpu":
            self._bytes_by_position = memory.swapaxes(1, tensor.position_axis)
            self._address = memory.ctypes.data
        else:
            self._value = ort.OrtValue.ortvalue_from_numpy(memory, device.kind, device.index)
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
