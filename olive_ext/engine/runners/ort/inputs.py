"""The inputs that a decoder takes besides its caches: a step's rows as arrays, handed to the session.

Knows no cache and no outputs. Axes: B rows, S tokens of a row where all have as many, N tokens of all rows, T cells or
positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.media import MediaItem, rotary_positions, runs_within
from olive_ext.engine.requests import integers
from olive_ext.engine.runners.ort.kv.kv_store import Device
from olive_ext.engine.step import Row, Step, visible_cells
from olive_ext.graph.tree_attention import BiasInput
from olive_ext.model.role_inputs import COMPUTE, StepArrays, input_array
from olive_ext.model.types import InputSpec, Role

Array = npt.NDArray[Any]

BIASES: Mapping[int, tuple[type[np.floating[Any]], float]] = {1: (np.float32, -1e30), 10: (np.float16, -6e4)}
"""numpy's type by ONNX type (FLOAT 1, FLOAT16 10), and the number that is added to an attention score to hide a cell:
finite, because a block of cells that are all hidden must not make NaN."""

KEPT_VALUES = 64
"""Device values that are kept for updating; the longest unused goes first."""


@dataclass(frozen=True)
class Layout(StepArrays):
    """A step's rows as arrays. A tree batch is one row to the graph."""

    items: tuple[MediaItem, ...] = ()
    """Pictures and sounds whose features take the places of placeholders, in the order of these."""

    @classmethod
    def of(cls, step: Step, pads_in_front: bool = False) -> Layout:
        """The layout of a step's rows; those of a tree batch where it is one. A mask ends with the longest row where
        the step gives no width."""
        rows, first_cell = step.rows, step.first_cell
        tokens = [row.tokens for row in rows]
        tokens_N, lengths = integers(list(chain.from_iterable(tokens))), np.array(list(map(len, tokens)))
        past = positions_N = np.array([row.past for row in rows])
        if len(tokens_N) > len(rows):
            starts = np.cumsum(lengths) - lengths
            positions_N = np.repeat(past - starts, lengths) + np.arange(len(tokens_N))
        items: tuple[MediaItem, ...] = ()
        rotary_3N: Array | None = None
        if [row for row in rows if row.media]:
            tokens_N = tokens_N.copy()
            items, rotary_3N = _place_media(rows, tokens_N, positions_N)
        if first_cell is not None:
            lengths, past = np.array([len(tokens_N)]), np.array([first_cell])
        total = past + lengths
        most = step.width or int(np.maximum.reduce(total))
        arrays = tokens_N, lengths, past, total, positions_N, most
        return cls(*arrays, rotary_3N, pads_in_front, step.whole_length, items)


def _place_media(rows: Sequence[Row], tokens_N: Array, positions_N: Array) -> tuple[tuple[MediaItem, ...], Array]:
    """Puts the placeholders of the rows' items into `tokens_N`; the items, and the rotary positions of all tokens."""
    items, rotary_3N = [], np.stack([positions_N] * 3)
    starts = accumulate([len(row.tokens) for row in rows], initial=0)
    for row, start in zip(rows, starts, strict=False):
        place, length = start - row.past, len(row.tokens)
        for run in runs_within(row.media, row.past, row.past + length):
            tokens_N[place + run.start : place + run.stop] = run.item.placeholder
            items.append(run.item)
        own = slice(start, start + length)
        rotary_3N[:, own] = rotary_positions(row.media, positions_N[own])
    return tuple(items), rotary_3N


class Feed:
    """Binds host arrays. An input that the session takes on its device has one value there for each shape, updated in
    place, so that nothing is allocated for a shape that has been met, and only where its content changes."""

    def __init__(self, session: ort.InferenceSession, device: Device, kept: int | None = KEPT_VALUES) -> None:
        """`kept`: values that are kept at most; all where it is None."""
        infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        self._on_device = {value.name for value, info in infos if info.name != "Cpu"} if device.kind != "cpu" else set()
        self._device = device
        self._kept = kept
        self._values: OrderedDict[tuple[str, tuple[int, ...]], ort.OrtValue] = OrderedDict()
        self._contents: dict[tuple[str, tuple[int, ...]], bytes] = {}

    def bind(self, binding: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
        """Binds `array` as the input `name`; it may be changed after the run only."""
        if name not in self._on_device or not array.size:
            binding.bind_cpu_input(name, array)
            return
        key, content = (name, array.shape), array.tobytes()
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = ort.OrtValue.ortvalue_from_numpy(array, self._device.kind, self._device.index)
            if self._kept is not None and len(self._values) > self._kept:
                del self._contents[self._values.popitem(last=False)[0]]
        else:
            self._values.move_to_end(key)
            if self._contents[key] != content:
                value.update_inplace(array)
        self._contents[key] = content
        binding.bind_ortvalue_input(name, value)

    def bind_inputs(
        self, binding: ort.IOBinding, specs: Sequence[InputSpec], layout: Layout, tokens: ort.OrtValue | None = None
    ) -> None:
        """Binds the inputs in `specs`, computed from a step's rows in the types that the graph declares; `tokens`
        replace the token ids where given."""
        for spec in specs:
            role, tensor = spec.role, spec.tensor
            if tokens is not None and role is Role.INPUT_IDS:
                binding.bind_ortvalue_input(tensor.name, tokens)
            elif role in COMPUTE:
                self.bind(binding, tensor.name, input_array(spec, layout))

    def bind_biases(self, binding: ort.IOBinding, inputs: Sequence[BiasInput], step: Step) -> None:
        """Binds the graph's bias inputs. Attention itself hides what comes after a token."""
        for found in inputs:
            dtype, hidden = BIASES[found.elem_type]
            if step.first_cell is not None:
                visible = visible_cells(step.rows, step.first_cell, found.window)
            else:
                visible = visible_positions(step.rows, found.window)
            self.bind(binding, found.name, np.where(visible, dtype(0), dtype(hidden)))


def visible_positions(rows: Sequence[Row], window: int | None) -> Array:
    """[1 or B, 1, S, T]: all positions, or those within the window."""
    num_tokens = len(rows[0].tokens)
    past_B = integers([row.past for row in rows])
    num_positions = int(past_B.max()) + num_tokens
    if window is None:
        return np.ones((1, 1, num_tokens, num_positions), np.bool_)
    distance_BST = past_B[:, None, None] + np.arange(num_tokens)[:, None] - np.arange(num_positions)
    return (distance_BST < window)[:, None]
