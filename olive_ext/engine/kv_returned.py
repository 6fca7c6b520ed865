"""KV that the graph returns grown (concatenated past): kept as device tensors, never carried to the host.

Tensors are not written again, so a fork shares them; a rewind is a Slice on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.kv import Device
from olive_ext.engine.step import Batching, Copy, Row
from olive_ext.graph.rows import slice_graph
from olive_ext.model.types import KvTensor


@dataclass(frozen=True)
class _Held:
    """The first `length` positions of every KV tensor, [1, heads, length, head_size] each."""

    length: int
    values: tuple[ort.OrtValue, ...]


class ReturnedKv:
    """One set of device tensors for each slot; rows run one at a time."""

    batching = Batching.SINGLE

    def __init__(
        self,
        session: ort.InferenceSession,
        kv: Sequence[KvTensor],
        num_slots: int,
        device: Device,
        open_graph: Callable[[bytes], ort.InferenceSession],
    ) -> None:
        self.num_slots = num_slots
        self.capacity = 0
        self._session = session
        self._kv = kv
        self._device = device
        self._empty = _Held(0, tuple(self._empty_value(tensor) for tensor in kv))
        self._held = [self._empty] * num_slots
        self._open_graph = open_graph
        self._slicer: ort.InferenceSession | None = None

    def reserve(self, capacity: int) -> None:
        self.capacity = capacity
        self.close()

    def copy(self, copy: Copy) -> None:
        self._held[copy.target] = self._cut(self._held[copy.source], copy.length)

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        (row,) = rows
        held = self._held[row.slot] = self._cut(self._held[row.slot], row.past)
        binding = self._session.io_binding()
        for tensor, value in zip(self._kv, held.values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_output(tensor.present, self._device.kind, self._device.index)
        return binding

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:
        (row,) = rows
        self._held[row.slot] = _Held(row.past + len(row.tokens), tuple(presents))

    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "returned", "kv_binding": "present outputs stay on the device and become the next past"}

    def close(self) -> None:
        self._held = [self._empty] * self.num_slots

    def _cut(self, held: _Held, length: int) -> _Held:
        if length == held.length:
            return held
        if length == 0:
            return self._empty
        if self._slicer is None:
            self._slicer = self._open_graph(slice_graph([tensor.elem_type for tensor in self._kv]))
        binding = self._slicer.io_binding()
        for i, value in enumerate(held.values):
            binding.bind_ortvalue_input(f"x{i}", value)
            binding.bind_output(f"y{i}", self._device.kind, self._device.index)
        binding.bind_cpu_input("length", np.array([length], np.int64))
        self._slicer.run_with_iobinding(binding)
        return _Held(length, tuple(binding.get_outputs()))

    def _empty_value(self, tensor: KvTensor) -> ort.OrtValue:
        shape = [1, tensor.heads, 0, tensor.head_size]
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, tensor.elem_type, self._device.kind, self._device.index)
