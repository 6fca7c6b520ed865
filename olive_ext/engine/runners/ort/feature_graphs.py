"""Small graphs from features to features, on their device: rows are picked and joined there. Knows no item.

Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.encoder_arrays import Array
from olive_ext.engine.runners.ort.kv.kv_store import Device
from olive_ext.graph.standalone_graphs import FEATURES, join_graph, pick_graph, put_rows_graph


class Pieces(NamedTuple):
    """Rows of features on their device, of which the last value may have more than there are."""

    values: tuple[ort.OrtValue, ...]
    num_rows: int


class FeatureGraph:
    """A small graph from features to features, on their device."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session = session
        self._device = device

    def run(self, features: Mapping[str, ort.OrtValue], **numbers: Array) -> ort.OrtValue:
        binding = self._session.io_binding()
        for name, value in features.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in numbers.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array, np.int64))
        binding.bind_output(FEATURES, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        (found,) = binding.get_outputs()
        return found


class FeatureGraphs:
    """Those of features of one type, each opened when it is first needed."""

    def __init__(self, elem_type: int, device: Device, open_graph: Callable[[bytes], ort.InferenceSession]) -> None:
        self._elem_type = elem_type
        self._device = device
        self._open_graph = open_graph
        self._picks: dict[int, FeatureGraph] = {}

    def picked(self, features: ort.OrtValue, pieces: Sequence[Array], num_rows: int) -> Pieces:
        """Rows of `features`, whose axes before the last count rows, in pieces [N, H]; `num_rows` of them count."""
        rank = len(features.shape())
        if rank not in self._picks:
            self._picks[rank] = FeatureGraph(self._open_graph(pick_graph(self._elem_type, rank)), self._device)
        return Pieces(tuple(self._picks[rank].run({"x": features}, rows=rows_N) for rows_N in pieces), num_rows)

    def joined(self, parts: Sequence[ort.OrtValue]) -> ort.OrtValue:
        """The rows of all parts, one behind the other: [N, H]."""
        parts = list(parts)
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [self._join.run({"a": left, "b": right}) for left, right in pairs] + parts[len(parts) & ~1 :]
        return parts[0]

    def put(self, parts: Sequence[Pieces], base: ort.OrtValue) -> ort.OrtValue:
        """`base` [N, H] with the rows of all parts, one behind the other, in place of its first ones. The graph's
        shapes are those of the base and of a piece, however many rows of it count."""
        numbers_N, place = np.arange(base.shape()[0]), 0
        for part in parts:
            left = part.num_rows
            for value in part.values:
                count = min(left, value.shape()[0])
                rows_N = numbers_N.copy()
                rows_N[place : place + count] = len(numbers_N) + numbers_N[:count]
                base = self._put.run({"a": base, "b": value}, rows=rows_N)
                place, left = place + count, left - count
        return base

    @cached_property
    def _join(self) -> FeatureGraph:
        return FeatureGraph(self._open_graph(join_graph(self._elem_type)), self._device)

    @cached_property
    def _put(self) -> FeatureGraph:
        return FeatureGraph(self._open_graph(put_rows_graph(self._elem_type)), self._device)
