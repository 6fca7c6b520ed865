"""Runs the graphs that compare distributions on the rows of logits of runners. Knows no model and no request.

Axes: R rows, V vocabulary, N tokens of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import LogitsRow, Row, Step
from olive_ext.errors import NotComparableError
from olive_ext.graph.row_comparison import divergence_graph, record_graph, recorded_graph
from olive_ext.media.items import Source
from olive_ext.model.providers.bindings import InputFeed, named_ort_failures
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.providers.resolution import resolve_providers
from olive_ext.model.types import SourceKind
from olive_ext.records import Form

LogitRows: TypeAlias = "ort.OrtValue | npt.NDArray[np.float32]"
OpenGraph: TypeAlias = Callable[[bytes], ort.InferenceSession]
Array: TypeAlias = npt.NDArray[Any]

_FLOAT = 1
CPU_BYTES = 1 << 22
"""The most logits that one run of a graph takes on the CPU: intermediate values then stay in the processor's cache."""

DEVICE_BYTES = 1 << 28
"""The most bytes of logits that one run of a graph takes on other devices, to bound the memory."""


class DivergenceKernels:
    """Compares distributions by graphs that are opened on `device` at first use; one that fails raises `RunError`. Two
    models are compared on ids below `num_tokens`, because no token has others."""

    def __init__(self, open_graph: OpenGraph, device: Device, num_tokens: int | None = None) -> None:
        self.host_bytes = 0
        self.num_tokens = num_tokens
        self._open_graph = open_graph
        self._device = device
        self._graphs: dict[tuple[object, ...], InputFeed] = {}

    @classmethod
    def at(cls, runner: Runner, num_tokens: int | None = None) -> DivergenceKernels:
        """Graphs on the device where the runner leaves its logits rows; on the CPU if it returns them to the host."""
        if runner.open_graph is not None:
            return cls(runner.open_graph, runner.device, num_tokens)
        providers = resolve_providers("cpu", None)
        return cls(partial(open_session, providers=providers, label="divergence"), Device("cpu"), num_tokens)

    def compare(self, reference: LogitRows, candidate: LogitRows, reference_ids: Array, ids: Array) -> dict[str, Array]:
        """The outputs of `divergence_graph`, [R] each. `ids`: the rows' argmax. `ConfigError` for two vocabularies."""
        sizes = shape_of(candidate)[1], shape_of(reference)[1]
        graph = self._graph(divergence_graph, *sizes, comparable_tokens(*sizes, self.num_tokens))
        rows = {"reference_logits": reference, "logits": candidate}
        return self._run(graph, rows, {"reference_ids": reference_ids[:, None], "ids": ids[:, None]})

    def record(self, logits: LogitRows, form: Form, rng: np.random.Generator) -> npt.NDArray[np.void]:
        """Records of the rows: `form.dtype`[R]."""
        num_rows, vocab_size = shape_of(logits)
        records_R = np.empty(num_rows, form.dtype)
        if form.is_whole:
            host_RV = to_host(logits)
            self.host_bytes += host_RV.nbytes
            records_R["logits"] = host_RV - host_RV.max(-1, keepdims=True)
            return records_R
        spread = np.arange(form.drawn) + rng.random((num_rows, form.drawn))
        graph = self._graph(record_graph, vocab_size, form.top, form.drawn)
        outputs = self._run(graph, {"logits": logits}, {"uniforms": (spread / form.drawn).astype(np.float32)})
        for name, values in outputs.items():
            records_R[name] = values
        return records_R

    def compare_recorded(
        self, records_R: npt.NDArray[np.void], form: Form, logits: LogitRows, ids: Array
    ) -> dict[str, Array]:
        """As `compare`, [R] each, with the outputs of `recorded_graph` too, against records of the form."""
        vocab_size = shape_of(logits)[1]
        num_tokens = comparable_tokens(vocab_size, form.vocab_size, self.num_tokens)
        beyond = () if num_tokens == max(vocab_size, form.vocab_size) else (num_tokens,)
        if form.is_whole:
            kept = np.ascontiguousarray(records_R["logits"])
            return self.compare(kept, logits, kept.argmax(-1), ids)
        graph = self._graph(recorded_graph, vocab_size, form.top, form.drawn, *beyond)
        record = {
            "ids": ids[:, None],
            "record_ids": records_R["ids"].astype(np.int64),
            "record_logprobs": np.ascontiguousarray(records_R["logprobs"]),
            "tail": np.ascontiguousarray(records_R["tail"][:, None]),
        }
        outputs = self._run(graph, {"logits": logits}, record)
        return {**outputs, "reference_top_logprobs": record["record_logprobs"][:, 0]}

    def _graph(self, build: Callable[..., bytes], *sizes: int) -> InputFeed:
        key = (build, *sizes)
        if key not in self._graphs:
            self._graphs[key] = InputFeed(self._open_graph(build(*sizes)), self._device)
        return self._graphs[key]

    def _run(self, graph: InputFeed, rows: Mapping[str, LogitRows], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs of a graph over rows of logits and small arrays with as many rows, on the host. It is run on some
        rows at a time."""
        placed = {name: self._place(value) for name, value in rows.items()}
        num_rows, vocab_size = shape_of(next(iter(placed.values())))
        most = CPU_BYTES if self._device.kind == "cpu" else DEVICE_BYTES
        step = max(1, most // (4 * vocab_size)) if self._device.has_pointers else num_rows
        names = [output.name for output in graph.session.get_outputs()]
        parts = []
        with named_ort_failures(f"to compare {num_rows} rows of {vocab_size} logits"):
            for start in range(0, num_rows, step):
                stop = min(num_rows, start + step)
                binding = graph.session.io_binding()
                for name, value in placed.items():
                    self._bind_rows(binding, name, value, start, stop)
                for name, array in arrays.items():
                    graph.bind(binding, name, np.ascontiguousarray(array[start:stop]))
                for name in names:
                    binding.bind_output(name)
                graph.session.run_with_iobinding(binding)
                parts.append([value.numpy() for value in binding.get_outputs()])
        outputs = {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
        self.host_bytes += sum(array.nbytes for array in outputs.values())
        return outputs

    def _place(self, rows: LogitRows) -> LogitRows:
        if isinstance(rows, ort.OrtValue) and rows.device_name() == self._device.kind:
            return rows
        host = to_host(rows)
        if self._device.kind == "cpu":
            return host
        return ort.OrtValue.ortvalue_from_numpy(host, self._device.kind, self._device.index)

    def _bind_rows(self, binding: ort.IOBinding, name: str, rows: LogitRows, start: int, stop: int) -> None:
        if not isinstance(rows, ort.OrtValue):
            binding.bind_cpu_input(name, rows[start:stop])
        elif not self._device.has_pointers:
            binding.bind_ortvalue_input(name, rows)
        else:
            _, vocab_size = shape_of(rows)
            address = rows.data_ptr() + start * vocab_size * 4
            shape = [stop - start, vocab_size]
            binding.bind_input(name, self._device.kind, self._device.index, _FLOAT, shape, address)


def comparable_tokens(candidate: int, reference: int, num_tokens: int | None) -> int:
    """The number of ids on which two models are compared. Raises `ConfigError` for logits of two sizes, where one has
    more than the ids that belong to no token among `num_tokens`."""
    if reference != candidate and (num_tokens is None or num_tokens > min(reference, candidate)):
        raise NotComparableError(
            f"the reference has logits for {reference} tokens and the model for {candidate}: they are not comparable"
        )
    return min(candidate, reference, num_tokens or candidate)


def shape_of(rows: LogitRows) -> tuple[int, int]:
    """(R, V)."""
    shape = rows.shape() if isinstance(rows, ort.OrtValue) else rows.shape
    return int(shape[0]), int(shape[1])


def to_host(rows: LogitRows) -> npt.NDArray[np.float32]:
    """The rows [R, V] in the host's memory."""
    array: npt.NDArray[np.float32] = rows.numpy() if isinstance(rows, ort.OrtValue) else np.ascontiguousarray(rows)
    return array


def vocab_size_of(runner: Runner) -> int:
    """The number of logits of the model. A step of one token finds it, and that token is resident afterwards. After an
    encoder of features, of which there are none to try, the graph or its configuration names it."""
    encoder, known = runner.encoder, runner.vocab_size
    if encoder is not None and encoder.kind is SourceKind.FEATURES and known is not None:
        return known
    runner.reserve(1)
    source = Source(np.zeros(1, np.int64)) if encoder is not None else None
    output = runner.run(Step((Row(0, 0, (0,), source=source),), (LogitsRow(0, 0),)))
    return shape_of(output.logits_RV)[1]
