"""A cache that the graph returns anew (concatenated KV, states): kept as device tensors, never carried to the host.

The rows of a step are a batch: what it returns is the next one's past as it is, while the rows stay the same. Where
they change, rows of several batches are put together on the device, those with fewer positions filled up. Tensors are
not written again, so the slots that go on from a checkpoint share them. A state cannot be cut: what was resident at a
checkpoint is kept, and only to checkpoints can a slot go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.base import ONE_ROW
from olive_ext.engine.forms.kv_store import KvPlace, KvStore, StackedPart, Stacker, Values, zeros
from olive_ext.engine.step import Copy, Row
from olive_ext.graph.standalone_graphs import RowTensor


@dataclass(frozen=True, eq=False)
class _ReturnedBatch:
    values: Values
    num_rows: int
    width: int


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch, `length` positions of it."""

    batch: _ReturnedBatch
    row: int
    length: int


@dataclass
class _Slot:
    """Where a slot's content lies, and what was resident at the checkpoints below."""

    place: BatchRow
    checkpoints: dict[int, BatchRow] = field(default_factory=dict)


class ReturnedKv(KvStore):
    """Rows of batches on the device, one for each slot."""

    form = ONE_ROW
    """Until it has been tried which rows may share a step."""

    is_in_place = False

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._nothing = BatchRow(self._empty(1), 0, 0)
        self._blank = self._empty(1, 1)
        self._slots = self._fresh_slots()
        kv = [RowTensor(tensor.elem_type, tensor.row_shape) for tensor in self._spec.kv]
        states = [RowTensor(state.elem_type, state.shape) for state in self._spec.states]
        self._stacker = Stacker(place.open_graph, place.device, [*kv, *states])

    def pad_in_front(self, is_in_front: bool) -> None:
        """Sets where rows with fewer positions than others are filled up; what is resident is forgotten."""
        self.pads_in_front = is_in_front
        self.close()

    @override
    def reserve(self, capacity: int) -> None:
        self.capacity = capacity
        self.close()

    @override
    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            place = self._place_at(copy.source, copy.length)
            self._slots[copy.target] = _Slot(place, {copy.length: place})

    @override
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        places = [self._place_at(row.slot, row.past) for row in rows]
        batch = self._together(places)
        self._detach({id(place.batch) for place in places if place.batch is not batch}, {row.slot for row in rows})
        for number, row in enumerate(rows):
            checkpoints = self._slots[row.slot].checkpoints
            kept = {length: place for length, place in checkpoints.items() if length <= row.past}
            self._slots[row.slot] = _Slot(BatchRow(batch, number, row.past), kept)
        binding = self._session.io_binding()
        for tensor, value in zip(self._spec.caches, batch.values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_output(tensor.present, self._device.kind, self._device.index)
        return binding

    @override
    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:
        batch = _ReturnedBatch(tuple(presents), len(rows), max(row.past + len(row.tokens) for row in rows))
        for number, row in enumerate(rows):
            slot = self._slots[row.slot]
            slot.place = BatchRow(batch, number, row.past + len(row.tokens))
            if row.is_checkpoint:
                slot.checkpoints[slot.place.length] = self._alone(slot.place, slot.place.length)

    @override
    def describe(self) -> Mapping[str, Any]:
        return {"kv_cache": "returned", "kv_binding": "present outputs stay on the device and become the next past"}

    @override
    def close(self) -> None:
        self._slots = self._fresh_slots()

    def _fresh_slots(self) -> list[_Slot]:
        return [_Slot(self._nothing) for _ in range(self.num_slots)]

    def _empty(self, num_rows: int, width: int = 0) -> _ReturnedBatch:
        kv = (zeros(tensor.shape(num_rows, width), tensor.elem_type) for tensor in self._spec.kv)
        states = (zeros([num_rows, *state.shape], state.elem_type) for state in self._spec.states)
        return _ReturnedBatch((*kv, *states), num_rows, width)

    def _place_at(self, number: int, length: int) -> BatchRow:
        slot = self._slots[number]
        if length == slot.place.length:
            return slot.place
        if length == 0:
            return self._nothing
        if length in slot.checkpoints:
            return slot.checkpoints[length]
        assert not self._spec.states, "a state cannot be cut"
        return self._alone(slot.place, length)

    def _alone(self, place: BatchRow, length: int) -> BatchRow:
        if place.batch.num_rows == 1 and place.length == place.batch.width == length:
            return place
        values = self._stacker.stack([self._part([place], length, length)])
        return BatchRow(_ReturnedBatch(values, 1, length), 0, length)

    def _together(self, places: Sequence[BatchRow]) -> _ReturnedBatch:
        """A batch of these rows, in this order, in which the longest one fills the width."""
        batch, width = places[0].batch, max(place.length for place in places)
        is_whole = [place.row for place in places if place.batch is batch] == list(range(batch.num_rows))
        if is_whole and len(places) == batch.num_rows and batch.width == width:
            return batch
        if width == 0:
            return self._empty(len(places))
        runs = [list(run) for _, run in groupby(places, key=lambda place: id(place.batch))]
        return _ReturnedBatch(self._stacker.stack([self._part(run, width) for run in runs]), len(places), width)

    def _part(self, run: Sequence[BatchRow], width: int, cut: int | None = None) -> StackedPart:
        """Rows of one batch, the first `cut` positions of the longest of them, or all, filled up to `width` by one of
        these: masks and lengths hide what is filled up."""
        batch, longest = run[0].batch, max(place.length for place in run)
        if longest == 0:  # nothing of its own to be filled up with
            return StackedPart(self._blank.values, [0] * len(run), [0] * width)
        begin = batch.width - longest if self.pads_in_front else 0
        inside = range(begin, begin + (longest if cut is None else cut))
        filling = [begin] * (width - len(inside))
        positions = (*filling, *inside) if self.pads_in_front else (*inside, *filling)
        rows = [place.row for place in run]
        is_whole = rows == list(range(batch.num_rows)) and list(positions) == list(range(batch.width))
        return StackedPart(batch.values, rows, positions, is_whole)

    def _detach(self, batches: set[int], busy: set[int]) -> None:
        """Gives idle slots copies of their rows of `batches`, of which otherwise all rows would stay in memory."""
        for number, slot in enumerate(self._slots):
            if number not in busy and id(slot.place.batch) in batches and slot.place.length:
                slot.place = self._alone(slot.place, slot.place.length)
