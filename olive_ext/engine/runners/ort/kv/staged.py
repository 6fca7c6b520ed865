"""KV on a device whose values have no address (WebGPU, DirectML): rows cannot be bound out of a buffer by pointer.

    pool [slots, ...]       decoding reads and writes all rows in place
    staging [1, ...]        a row with several tokens runs here; it stands for one slot until another one is needed

Between the two rows move on the device: Gather takes one out of the pool, ScatterND puts one back in place. All copies
between slots of a step are one such run within the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.kv_store import KeptBinding, KvPlace, KvStore, allocate
from olive_ext.engine.step import Batching, Copy, IntArray, Row
from olive_ext.graph.standalone_graphs import fork_graph, put_row_graph, take_row_graph
from olive_ext.model.types import KvTensor

Values = list[ort.OrtValue]


class StagedKv(KvStore):
    """KV that the graph reads and writes in place, in a pool or in the staging row."""

    batching = Batching.POOL

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        elem_types = [tensor.elem_type for tensor in self._spec.kv]
        self._take = self._open_graph(take_row_graph(elem_types)) if self.num_slots > 1 else None
        self._put = self._open_graph(put_row_graph(elem_types)) if self.num_slots > 1 else None
        self._fork = self._open_graph(fork_graph(elem_types)) if self.num_slots > 1 else None
        self._staging: Values = []
        self._pool: Values = []
        self._bindings: dict[int, ort.IOBinding] = {}
        self._staged_slot: int | None = None
        self._is_staging_newer = False

    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        self._staging = [self._allocate(tensor, 1) for tensor in self._spec.kv]
        self._bindings[1] = self._binding(self._staging)
        if self.num_slots > 1:
            self._pool = [self._allocate(tensor, self.num_slots) for tensor in self._spec.kv]
            self._bindings[self.num_slots] = self._binding(self._pool)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Whole rows, since parts of them cannot be addressed. All are read before one is written."""
        assert self._fork is not None
        self._write_back()
        sources: dict[int, int] = {}
        for copy in copies:
            sources[copy.target] = sources.get(copy.source, copy.source)
        binding = self._fork.io_binding()
        for i, pool in enumerate(self._pool):
            binding.bind_ortvalue_input(f"x{i}", pool)
            binding.bind_ortvalue_output(f"y{i}", pool)
        binding.bind_cpu_input("source", np.array(list(sources.values()), np.int64))
        binding.bind_cpu_input("target", np.array(list(sources), np.int64)[:, None])
        self._fork.run_with_iobinding(binding)
        if self._staged_slot in sources:
            self._staged_slot = None

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        if len(rows) == 1:
            self._stage(rows[0].slot)
            self._is_staging_newer = True
        else:
            self._write_back()
            self._staged_slot = None
        return self._bindings[len(rows)]

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        return self._binding(self._staging if len(rows) == 1 else self._pool)

    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "in_place", "kv_binding": "device values without address: a pool and a staging row"}

    def close(self) -> None:
        self._bindings.clear()
        self._staging.clear()
        self._pool.clear()
        self._staged_slot = None
        self._is_staging_newer = False

    def _stage(self, slot: int) -> None:
        if self._staged_slot == slot:
            return
        self._write_back()
        if self._take is not None and self._pool:
            binding = self._take.io_binding()
            for i, (pool, staging) in enumerate(zip(self._pool, self._staging, strict=True)):
                binding.bind_ortvalue_input(f"x{i}", pool)
                binding.bind_ortvalue_output(f"y{i}", staging)
            self._run(self._take, binding, np.array([slot], np.int64))
        self._staged_slot = slot

    def _write_back(self) -> None:
        if self._put is None or self._staged_slot is None or not self._is_staging_newer:
            return
        binding = self._put.io_binding()
        for i, (pool, staging) in enumerate(zip(self._pool, self._staging, strict=True)):
            binding.bind_ortvalue_input(f"x{i}", pool)
            binding.bind_ortvalue_input(f"r{i}", staging)
            binding.bind_ortvalue_output(f"y{i}", pool)
        self._run(self._put, binding, np.array([[self._staged_slot]], np.int64))
        self._is_staging_newer = False

    @staticmethod
    def _run(session: ort.InferenceSession, binding: ort.IOBinding, row: IntArray) -> None:
        binding.bind_cpu_input("row", row)
        session.run_with_iobinding(binding)

    def _binding(self, values: Values) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, value in zip(self._spec.kv, values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_ortvalue_output(tensor.present, value)
        return binding

    def _allocate(self, tensor: KvTensor, num_rows: int) -> ort.OrtValue:
        return allocate(self._session, tensor.shape(num_rows, self.capacity), tensor.elem_type, self._device)
