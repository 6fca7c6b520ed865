"""KV in blocks that a table assigns to rows (PagedAttention, on CUDA and WebGPU): rows of any lengths run together.

Each slot owns the same number of neighbouring blocks, so the table of a row is a range. The graph writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.kv_store import KvPlace, KvStore, allocate
from olive_ext.engine.step import Batching, Copy, IntArray, Row
from olive_ext.graph.standalone_graphs import fork_graph
from olive_ext.model.types import Role

BLOCK_SIZE = 256
"""Positions of a block. FlashAttention's tiles on CUDA are made for multiples of 256."""


class PagedKv(KvStore):
    """A pool of blocks for each KV tensor, past and present in one."""

    batching = Batching.PACKED

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._forker: ort.InferenceSession | None = None
        self._pools: list[ort.OrtValue] = []
        self._table = next(found.tensor.name for found in self._spec.inputs if found.role is Role.BLOCK_TABLE)

    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        num_blocks = self.num_slots * self._blocks_per_slot
        for tensor in self._spec.kv:
            shape = [num_blocks, BLOCK_SIZE, tensor.heads, tensor.head_size]
            self._pools.append(allocate(self._session, shape, tensor.elem_type, self._device))

    def copy(self, copy: Copy) -> None:
        """Whole blocks; what lies behind the copied positions in the last one is written over before it is read."""
        if self._forker is None:
            self._forker = self._open_graph(fork_graph([tensor.elem_type for tensor in self._spec.kv]))
        count = -(-copy.length // BLOCK_SIZE)
        binding = self._forker.io_binding()
        for i, pool in enumerate(self._pools):
            binding.bind_ortvalue_input(f"x{i}", pool)
            binding.bind_ortvalue_output(f"y{i}", pool)
        binding.bind_cpu_input("source", self._blocks(copy.source)[:count].astype(np.int64))
        binding.bind_cpu_input("target", self._blocks(copy.target)[:count, None].astype(np.int64))
        self._forker.run_with_iobinding(binding)

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        binding = self._session.io_binding()
        for tensor, pool in zip(self._spec.kv, self._pools, strict=True):
            binding.bind_ortvalue_input(tensor.past, pool)
            binding.bind_ortvalue_output(tensor.present, pool)
        binding.bind_cpu_input(self._table, np.stack([self._blocks(row.slot) for row in rows]).astype(np.int32))
        return binding

    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "in_place", "kv_binding": f"blocks of {BLOCK_SIZE} positions, each slot its own"}

    def close(self) -> None:
        self._pools.clear()

    @property
    def _blocks_per_slot(self) -> int:
        return -(-self.capacity // BLOCK_SIZE)

    def _blocks(self, slot: int) -> IntArray:
        return np.arange(slot * self._blocks_per_slot, (slot + 1) * self._blocks_per_slot)
