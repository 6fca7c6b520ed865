"""A cache that the graph returns anew (concatenated KV, states): kept as device tensors, never carried to the host.

Tensors are not written again, so the slots that go on from a checkpoint share them. KV is cut back by a Slice on the
device. A state cannot be cut: what was resident at a checkpoint is kept, and only to checkpoints can a slot go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.kv_store import KvPlace, KvStore, zeros
from olive_ext.engine.step import Batching, Copy, Row
from olive_ext.graph.standalone_graphs import slice_graph

Values = tuple[ort.OrtValue, ...]


@dataclass
class _Slot:
    """The values of all KV tensors and states at `length` positions, and at the checkpoints below."""

    length: int
    values: Values
    checkpoints: dict[int, Values] = field(default_factory=dict)


class ReturnedKv(KvStore):
    """Device tensors for each slot; rows run one at a time."""

    batching = Batching.SINGLE

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._empty: Values = (
            *(zeros(tensor.shape(1, 0), tensor.elem_type) for tensor in self._spec.kv),
            *(zeros([1, *state.shape], state.elem_type) for state in self._spec.states),
        )
        self._slots = self._fresh_slots()
        self._slicer: ort.InferenceSession | None = None

    def reserve(self, capacity: int) -> None:
        self.capacity = capacity
        self.close()

    def copy(self, copy: Copy) -> None:
        values = self._values_at(copy.source, copy.length)
        self._slots[copy.target] = _Slot(copy.length, values, {copy.length: values})

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        (row,) = rows
        values = self._values_at(row.slot, row.past)
        checkpoints = {length: kept for length, kept in self._slots[row.slot].checkpoints.items() if length <= row.past}
        self._slots[row.slot] = _Slot(row.past, values, checkpoints)
        binding = self._session.io_binding()
        for tensor, value in zip(self._spec.caches, values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_output(tensor.present, self._device.kind, self._device.index)
        return binding

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:
        (row,) = rows
        slot = self._slots[row.slot]
        slot.length, slot.values = row.past + len(row.tokens), tuple(presents)
        if row.is_checkpoint:
            slot.checkpoints[slot.length] = slot.values

    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "returned", "kv_binding": "present outputs stay on the device and become the next past"}

    def close(self) -> None:
        self._slots = self._fresh_slots()

    def _fresh_slots(self) -> list[_Slot]:
        return [_Slot(0, self._empty) for _ in range(self.num_slots)]

    def _values_at(self, number: int, length: int) -> Values:
        slot = self._slots[number]
        if length == slot.length:
            return slot.values
        if length == 0:
            return self._empty
        if length in slot.checkpoints:
            return slot.checkpoints[length]
        assert not self._spec.states, "a state cannot be cut"
        return self._cut(slot.values, length)

    def _cut(self, values: Values, length: int) -> Values:
        if self._slicer is None:
            self._slicer = self._open_graph(slice_graph([tensor.elem_type for tensor in self._spec.kv]))
        binding = self._slicer.io_binding()
        for i, value in enumerate(values):
            binding.bind_ortvalue_input(f"x{i}", value)
            binding.bind_output(f"y{i}", self._device.kind, self._device.index)
        binding.bind_cpu_input("length", np.array([length], np.int64))
        self._slicer.run_with_iobinding(binding)
        return tuple(binding.get_outputs())
