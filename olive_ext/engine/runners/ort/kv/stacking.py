"""Puts rows of several batches of tensors together, on the device. Knows no slot and no session but its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from olive_ext.graph.standalone_graphs import StackedTensor, stack_graph
from olive_ext.model.types import Device

MOST_PARTS = 8
"""Batches that one run puts together: each has its own inputs in a graph, which is made for their number."""

Values = tuple[ort.OrtValue, ...]


class Part(NamedTuple):
    """Rows of a batch, and for tensors that have positions which of these, in which order."""

    values: Values
    rows: Sequence[int]
    positions: Sequence[int]
    is_whole: bool = False
    """These are all rows and positions of the batch, in their order: nothing has to be picked."""


class Stacker:
    """One graph for each number of parts, and whether they are whole, opened when it is needed."""

    def __init__(
        self, open_graph: Callable[[bytes], ort.InferenceSession], device: Device, tensors: Sequence[StackedTensor]
    ) -> None:
        self._open_graph = open_graph
        self._device = device
        self._tensors = tensors
        self._sessions: dict[tuple[int, bool], ort.InferenceSession] = {}

    def stack(self, parts: Sequence[Part]) -> Values:
        """The parts' rows behind each other, in new memory. All parts have as many positions."""
        while len(parts) > MOST_PARTS:
            parts = [self._joined(parts[i : i + MOST_PARTS]) for i in range(0, len(parts), MOST_PARTS)]
        return self._run(parts)

    def _joined(self, parts: Sequence[Part]) -> Part:
        rows, positions = sum(len(part.rows) for part in parts), len(parts[0].positions)
        return Part(self._run(parts), range(rows), range(positions), is_whole=True)

    def _run(self, parts: Sequence[Part]) -> Values:
        form = len(parts), all(part.is_whole for part in parts)
        if form not in self._sessions:
            self._sessions[form] = self._open_graph(stack_graph(self._tensors, form[0], is_whole=form[1]))
        session = self._sessions[form]
        binding = session.io_binding()
        taken = {found.name for found in session.get_inputs()}
        for place, part in enumerate(parts):
            for i, value in enumerate(part.values):
                binding.bind_ortvalue_input(f"x{i}_{place}", value)
            for name, numbers in ((f"rows_{place}", part.rows), (f"positions_{place}", part.positions)):
                if name in taken:
                    binding.bind_cpu_input(name, np.array(numbers, np.int64))
        for i in range(len(self._tensors)):
            binding.bind_output(f"y{i}", self._device.kind, self._device.index)
        session.run_with_iobinding(binding)
        return tuple(binding.get_outputs())
