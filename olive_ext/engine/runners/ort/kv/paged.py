"""KV in blocks that a table assigns to rows (PagedAttention, on CUDA and WebGPU): rows of any lengths run together.

Slots that share a prefix name its blocks; the blocks in which such a prefix ends are copied, all of a step in one run,
when a slot is about to write there. The graph writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.block_tables import BlockCopy, BlockTables
from olive_ext.engine.runners.ort.kv.kv_store import Device, KeptBinding, KvPlace, KvStore, allocate
from olive_ext.engine.step import Batching, Copy, Row
from olive_ext.graph.standalone_graphs import fork_graph
from olive_ext.model.types import ITEM_BYTES, KvTensor, Role

BLOCK_SIZE = 256
"""Positions of a block. FlashAttention's tiles on CUDA are made for multiples of 256."""

UINT8 = 2
"""ONNX's element type."""


class PagedKv(KvStore):
    """A pool of blocks for each KV tensor, past and present in one."""

    batching = Batching.PACKED

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._tables = BlockTables(self.num_slots, 0, BLOCK_SIZE)
        self._forker: ort.InferenceSession | None = None
        self._pools: list[Pool] = []
        self._binding: ort.IOBinding | None = None
        self._table = next(found.tensor.name for found in self._spec.inputs if found.role is Role.BLOCK_TABLE)

    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        self._tables = BlockTables(self.num_slots, capacity, BLOCK_SIZE)
        for tensor in self._spec.kv:
            self._pools.append(Pool(self._session, tensor, self._tables.num_blocks, self._device))
        self._binding = KeptBinding(self._session)
        for tensor, pool in zip(self._spec.kv, self._pools, strict=True):
            pool.bind(self._binding, tensor.past, tensor.present)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Moves nothing: the blocks get another name."""
        for copy in copies:
            self._tables.fork(copy)

    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        copies = [self._tables.make_room(row.slot, row.past, len(row.tokens)) for row in rows]
        self._copy_blocks([copy for copy in copies if copy is not None])
        assert self._binding is not None
        self._binding.bind_cpu_input(self._table, self._tables.tables_SP[[row.slot for row in rows]])
        return self._binding

    def describe(self) -> Mapping[str, Any]:
        return {
            "kv_cache": "in_place",
            "kv_binding": f"blocks of {BLOCK_SIZE} positions, which slots share where their prefixes are equal",
            "kv_blocks": self._tables.num_blocks,
        }

    def close(self) -> None:
        self._binding = None
        self._pools.clear()

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """All copies in one run, which reads before it writes: a block may be the source of one and the target of
        another."""
        if not copies:
            return
        if self._forker is None:
            self._forker = self._open_graph(fork_graph([pool.copied_type for pool in self._pools]))
        binding = self._forker.io_binding()
        for i, pool in enumerate(self._pools):
            pool.bind_copy(binding, f"x{i}", f"y{i}")
        source_K, target_K = np.array(copies, np.int64).T
        binding.bind_cpu_input("source", np.ascontiguousarray(source_K))
        binding.bind_cpu_input("target", np.ascontiguousarray(target_K[:, None]))
        self._forker.run_with_iobinding(binding)


class Pool:
    """Zeroed memory of one KV tensor's blocks [N, positions, heads, size]: what lies behind a row's last position must
    be finite. Held as bytes where values have addresses, because CUDA copies no fp8 by its type."""

    def __init__(self, session: ort.InferenceSession, tensor: KvTensor, num_blocks: int, device: Device) -> None:
        shape = [num_blocks, BLOCK_SIZE, tensor.heads, tensor.head_size]
        self.copied_type = UINT8 if device.has_pointers else tensor.elem_type
        if device.has_pointers:
            memory = np.zeros([*shape[:-1], shape[-1] * ITEM_BYTES[tensor.elem_type]], np.uint8)
            self._value = ort.OrtValue.ortvalue_from_numpy(memory, device.kind, device.index)
        else:
            self._value = allocate(session, shape, tensor.elem_type, device)
        self._typed = (device.kind, device.index, tensor.elem_type, shape) if device.has_pointers else None

    def bind(self, binding: ort.IOBinding, past: str, present: str) -> None:
        if self._typed is None:
            self.bind_copy(binding, past, present)
            return
        binding.bind_input(past, *self._typed, self._value.data_ptr())
        binding.bind_output(present, *self._typed, self._value.data_ptr())

    def bind_copy(self, binding: ort.IOBinding, past: str, present: str) -> None:
        """Binds the pool in the type in which blocks are copied."""
        binding.bind_ortvalue_input(past, self._value)
        binding.bind_ortvalue_output(present, self._value)
