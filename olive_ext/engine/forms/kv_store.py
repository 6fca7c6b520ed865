"""The KV cache of a runner: what its forms share. A store binds past and present of a step's rows to a session, and
keeps what comes back. Knows no tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.capacity import NO_BLOCKS, UNLIMITED, Blocks
from olive_ext.engine.forms.base import StepForm
from olive_ext.engine.step import Copy, Move, Row, Step
from olive_ext.graph.standalone_graphs import equal_parts
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.providers.bindings import UINT8, allocate, device_zeros
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import ITEM_BYTES, DecoderSpec, KvTensor


@dataclass(frozen=True)
class KvPlace:
    """The surroundings of a store: the decoder's session, its caches, the slots, and how helper graphs are opened."""

    session: ort.InferenceSession
    spec: DecoderSpec
    num_slots: int
    device: Device
    open_graph: Callable[[bytes], ort.InferenceSession]
    most_positions: int | None = None
    """Positions of all slots together that memory holds, where slots share it and that is known."""


class KvStore(ABC):
    """KV of `num_slots` slots with `capacity` positions each."""

    form: StepForm
    """The form of the steps that the store can bind."""

    is_in_place: ClassVar[bool] = True
    """The graph writes into the memory that is bound, so that its present outputs need not be read."""

    pads_in_front = False
    """Rows of one step that have fewer positions than others are filled up in front, not at the end."""

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
        """The blocks that slots take as they grow, where slots are made of blocks."""
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

    def has_outgrown(self, num_slots: int, positions: int) -> bool:
        """Whether the memory touched so far (most slots times the longest slot) is more than this request needs, and
        than 125 % of `most_positions`."""
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


COPIED_BYTES = 128
"""Bytes of a pool that one index stands for at most, and so one thread of ScatterND on CUDA copies. Whole blocks, of
262,144 bytes an index, took 10.1 ms a tensor and 98 % of the device's time; rows of 128 bytes take 0.007 ms, and
scoring went from 20 to 622 questions a second (one H200, 27 November 2026, onnxruntime-gpu 1.31.1, Llama-3.2-1B, fp16).
They are words of 8 bytes, because CUDA's Gather counts elements in 32 bits: 16 GiB a tensor."""

WORDS = {1: UINT8, 2: 5, 4: 6, 8: 7}
"""ONNX's integers by their bytes: CUDA copies no fp8 by its type."""


class Pool:
    """Zeroed memory of one KV tensor's blocks [N, positions, heads, size]: what lies after a row's last position must
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
