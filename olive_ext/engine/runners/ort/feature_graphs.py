"""Small graphs from features to features, on their device: rows are picked and joined there. Knows no item.

Axes: N rows of features, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.encoder_arrays import Array
from olive_ext.engine.runners.ort.kv.kv_store import Device
from olive_ext.graph.standalone_graphs import FEATURES, join_graph, pick_graph


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

    def picked(self, features: ort.OrtValue, rows_N: Array) -> ort.OrtValue:
        """Rows `rows_N` of `features`, whose axes before the last count rows: [N, H]."""
        rank = len(features.shape())
        if rank not in self._picks:
            self._picks[rank] = FeatureGraph(self._open_graph(pick_graph(self._elem_type, rank)), self._device)
        return self._picks[rank].run({"x": features}, rows=rows_N)

    def joined(self, parts: Sequence[ort.OrtValue]) -> ort.OrtValue:
        """The rows of all parts, one behind the other: [N, H]."""
        parts = list(parts)
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [self._join.run({"a": left, "b": right}) for left, right in pairs] + parts[len(parts) & ~1 :]
        return parts[0]

    @cached_property
    def _join(self) -> FeatureGraph:
        return FeatureGraph(self._open_graph(join_graph(self._elem_type)), self._device)
