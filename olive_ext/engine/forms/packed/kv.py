"""KV in blocks that a table assigns to rows (PagedAttention, on CUDA and WebGPU): rows of any lengths run together.

Slots that share a prefix name its blocks; the blocks in which such a prefix ends are copied, all of a step in one run,
when a slot is about to write there. The graph writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd, prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.capacity import UNLIMITED, Blocks
from olive_ext.engine.forms.base import MIN_FORK, ReadySequences, ScoredSteps, ScoringRule, StepForm
from olive_ext.engine.forms.kv_store import UINT8, KeptBinding, KvPlace, KvStore, allocate, device_zeros
from olive_ext.engine.forms.packed.rewrite import KERNELS
from olive_ext.engine.scheduling.blocks import BlockCopy, BlockTables
from olive_ext.engine.scheduling.chosen_rows import ChosenRows, PlannedRow
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import Columns, Copy, Row, Step
from olive_ext.graph.standalone_graphs import RowTensor, copy_positions_graph, equal_parts, move_graph
from olive_ext.model.decisions import BLOCK_SIZE, planned_positions
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import ITEM_BYTES, KvTensor, Role

IDLE_SLOT = -2
"""The slot of rows that a step is filled up with, behind the others: they write into a block that no slot names."""


def longest_step(device: str) -> int:
    """The most tokens of a step that the device is known to survive."""
    return KERNELS[device].most_tokens if device in KERNELS else UNLIMITED


@dataclass(frozen=True)
class PackedSteps(StepForm):
    """A step has any slots, with any numbers of tokens."""

    name: ClassVar[str] = "packed"
    has_blocks: ClassVar[bool] = True

    most_cells: int = UNLIMITED
    """Rows of a step times positions of the longest, for kernels that gather the keys and values of all rows."""

    longest_step: int = UNLIMITED

    def _within(self, lengths: Iterable[int]) -> int:
        """How many rows of these lengths, from the first on, a step holds: one at least."""
        if self.most_cells >= UNLIMITED:
            return UNLIMITED
        longest, count = 0, 0
        for length in lengths:
            longest = max(longest, length)
            if count and (count + 1) * longest > self.most_cells:
                break
            count += 1
        return count

    @override
    def decoding(self, sequences: list[Sequence], limit: int) -> list[Sequence]:
        return sequences[: min(limit, self._within(one.computed + 1 for one in sequences))]

    @override
    def with_other(self, other: StepForm) -> StepForm:
        most = other.most_cells if isinstance(other, PackedSteps) else UNLIMITED
        return replace(self, most_cells=min(self.most_cells, most))

    @override
    def next_rows(self, ready: ReadySequences) -> ChosenRows:
        inputs, short = ready.split()
        decoding = self.decoding(short, ready.limit)
        plain = [one for one in decoding if one.is_plain and one.computed >= one.num_input]
        rows: list[PlannedRow] = []
        if len(plain) < len(decoding):
            known = set(plain)
            rows = [(one, ready.row(one, 1)) for one in decoding if one not in known]
        num_short, room = len(rows), ready.most_tokens - len(decoding)
        for one in inputs:
            if room <= 0 and (rows or plain):
                break
            row = ready.row(one, max(1, room))
            if one.media and len(row.tokens) > room:  # it begins with an item, which is not cut
                if len(rows) == num_short:
                    return ChosenRows([(one, row)])
                continue
            rows.append((one, row))
            room -= len(row.tokens)
        lengths = chain((one.computed + 1 for one in plain), (row.past + len(row.tokens) for _, row in rows))
        return ChosenRows(rows[: max(0, self._within(lengths) - len(plain))], plain)

    @override
    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        return most_tokens - pending, UNLIMITED

    @override
    def min_copy(self, answer_tokens: int) -> int:
        return MIN_FORK

    @override
    def scored_steps(self, chunk_size: int, rule: ScoringRule) -> ScoredSteps:
        return ScoredSteps("packed", rule.reason)

    @override
    def runs(self, other: StepForm) -> bool:
        return True


class PagedKv(KvStore):
    """A pool of blocks for each KV tensor, past and present in one."""

    form = PackedSteps()

    def __init__(self, place: KvPlace, *, has_idle_rows: bool = False) -> None:
        super().__init__(place)
        self._num_spare = int(has_idle_rows)
        cells = place.num_slots * planned_positions(place.spec) if place.spec.gathered_bytes else UNLIMITED
        self.form = PackedSteps(cells, longest_step(place.device.kind))
        self._most_blocks = super().most_positions // BLOCK_SIZE
        self._tables = BlockTables(self.num_slots, 0, BLOCK_SIZE)
        self._forker: ort.InferenceSession | None = None
        self._pools: list[Pool] = []
        self._forking: ort.IOBinding | None = None
        self._binding: ort.IOBinding | None = None
        self._table = next(found.tensor.name for found in self._spec.inputs if found.role is Role.BLOCK_TABLE)

    @property
    @override
    def blocks(self) -> Blocks:
        return Blocks(self._tables.num_blocks, BLOCK_SIZE)

    @property
    @override
    def most_positions(self) -> int:
        return UNLIMITED  # blocks bound them

    @override
    def halve(self) -> bool:
        fewer = self._tables.num_blocks // 2
        if fewer < self._tables.blocks_per_slot:  # the longest sequence would not fit
            return False
        self._most_blocks = fewer
        return True

    @override
    def reserve(self, capacity: int) -> None:
        self.close()
        self.capacity = capacity
        longest = -(-capacity // BLOCK_SIZE)
        number = max(longest, min(self._most_blocks, self.num_slots * longest))
        self._tables = BlockTables(self.num_slots, capacity, BLOCK_SIZE, number)
        for tensor in self._spec.kv:
            number = self._tables.num_blocks + self._num_spare
            self._pools.append(Pool(self._session, tensor, number, self._device, self._open_graph))
        self._binding = self._bound(KeptBinding(self._session))

    def copy(self, copies: Items[Copy]) -> None:
        """Moves nothing: the blocks get another name."""
        for copy in copies:
            self._tables.fork(copy)

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        copies = [self._tables.make_room(*row) for row in self._tables.without_room(Columns.of(rows))]
        self._copy_blocks([copy for copy in copies if copy is not None])
        assert self._binding is not None
        return self._binding

    @override
    def bind_anew(self, rows: Items[Row]) -> ort.IOBinding:
        return self._bound(self._session.io_binding())

    @override
    def bind_masks(self, bind: Callable[[str, npt.NDArray[Any]], None], step: Step) -> None:
        slots_B, tables = step.columns.slots_B, self._tables
        tables_BP = np.full((len(slots_B), tables.blocks_per_slot), tables.num_blocks, np.int32)
        is_used_B = slots_B != IDLE_SLOT
        tables_BP[is_used_B] = tables.tables_SP[slots_B[is_used_B]]
        number = None if step.width is None else tables.covering(step.width)
        bind(self._table, np.ascontiguousarray(tables_BP[:, :number]))

    @override
    def describe(self) -> Mapping[str, Any]:
        return {
            "kv_cache": "in_place",
            "kv_binding": f"blocks of {BLOCK_SIZE} positions, which slots share where their prefixes are equal",
            "kv_blocks": self._tables.num_blocks,
        }

    @override
    def close(self) -> None:
        self._binding = self._forking = None
        self._pools.clear()

    def _bound(self, binding: ort.IOBinding) -> ort.IOBinding:
        for tensor, pool in zip(self._spec.kv, self._pools, strict=True):
            pool.bind(binding, tensor.past, tensor.present)
        return binding

    def _copy_blocks(self, copies: Items[BlockCopy]) -> None:
        """All copies in one run, which reads before it writes: a block may be both source and target."""
        if not copies:
            return
        by_address = self._device.has_pointers
        if self._forker is None:
            rows = [RowTensor(tensor.elem_type, (None, tensor.heads, tensor.head_size)) for tensor in self._spec.kv]
            words = [pool.words for pool in self._pools]
            self._forker = self._open_graph(copy_positions_graph(words) if by_address else move_graph(rows))
        if (binding := self._forking) is None:
            binding = self._forking = self._forker.io_binding()
            for i, pool in enumerate(self._pools):
                pool.bind_copy(binding, i)
        *blocks, lengths_K = np.array(copies, np.int64).T
        within_M = np.concatenate([np.arange(length) for length in lengths_K])
        for name, blocks_K in zip(("source", "target"), blocks, strict=True):
            rows_K = blocks_K.astype(np.int32).reshape(-1, 1, 1, 1)
            positions_M = np.repeat(blocks_K * BLOCK_SIZE, lengths_K) + within_M
            binding.bind_cpu_input(name, positions_M if by_address else rows_K)
        if not by_address:  # what lies behind the shorter ones is written before it is read
            binding.bind_cpu_input("count", lengths_K.max(keepdims=True))
        self._forker.run_with_iobinding(binding)


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
        size = prod(shape[2:]) * ITEM_BYTES[tensor.elem_type]
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
