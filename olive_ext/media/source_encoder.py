"""The encoder of an encoder-decoder model: what its decoder takes of the sources of its rows. All of it stays on the
device.

Knows no step and no cache of the decoder. Axes: B rows, T positions of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.graph.standalone_graphs import RowTensor
from olive_ext.media.graphs import ItemGraphs, SmallGraphs
from olive_ext.media.items import ItemStore, Source
from olive_ext.model.providers.bindings import StackedPart, Stacker, named_ort_failures, run_graph, zeros
from olive_ext.model.spec.encoder_spec import EncoderSpec
from olive_ext.model.spec.role_inputs import DTYPES
from olive_ext.model.types import TensorSpec

MOST_BATCHES = 2
"""For so many steps what their rows take together is kept: rows of two lengths decode in turns."""

Values = Mapping[str, ort.OrtValue]


@dataclass(frozen=True)
class Encoded:
    """What a decoder takes of the sources of some rows: hidden states and cross-attention KV, by its input names."""

    values: Values
    lengths: tuple[int, ...]
    """The number of encoder positions of each row."""


class SourceEncoder:
    """The encoder's session, and the session of cross-attention KV where that is a graph of its own.

    The results of the last `num_kept` sources are kept, so that several targets of one source encode it once; so are
    the joined rows of the last steps.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        cross: ort.InferenceSession | None,
        spec: EncoderSpec,
        graphs: ItemGraphs,
        num_kept: int,
    ) -> None:
        self.kind = spec.kind
        self.source = spec.source
        self.num_runs = 0
        self._graphs = graphs
        self._session = graphs.count.of(session, "the encoder")
        self._cross = graphs.count.of(cross, "the graph of cross-attention KV") if cross is not None else None
        self._spec = spec
        self._num_kept = num_kept
        self._small = SmallGraphs(graphs, "after the encoder")
        self._stacker: Stacker | None = None
        self._sources: ItemStore[Encoded] = ItemStore(num_kept, lambda _: 1)
        self._batches: ItemStore[Encoded] = ItemStore(MOST_BATCHES, lambda _: 1)

    def bind(self, sources: Sequence[Source | None], decoder: ort.IOBinding) -> None:
        """Binds what the decoder takes of each row's source, which is computed unless it is kept."""
        present = [source for source in sources if source is not None]
        assert len(present) == len(sources), "checked when the request came"
        key = " ".join(source.key for source in present)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._stacked([self._encoded(source) for source in present])
            self._batches.put(key, batch)
        for name, value in batch.values.items():
            decoder.bind_ortvalue_input(name, value)
        mask_BT = np.arange(max(batch.lengths)) < np.array(batch.lengths)[:, None]
        for tensor in self._spec.masks:
            decoder.bind_cpu_input(tensor.name, mask_BT.astype(DTYPES[tensor.elem_type]))
        for tensor in self._spec.unused:
            sizes = [len(present), *(size if isinstance(size, int) else 0 for size in tensor.shape[1:])]
            decoder.bind_ortvalue_input(tensor.name, zeros(sizes, tensor.elem_type))

    def describe(self) -> Mapping[str, Any]:
        """The encoder's inputs, and its counters."""
        facts = {"source": self._spec.kind.value, "encoder_runs": self.num_runs}
        return {**facts, "encoder_outputs_kept": self._num_kept, **self._graphs.count.describe()}

    def warm_up(self, source: Source) -> None:
        """Runs the encoder on a source of the one shape, and the graphs that join up to as many rows as are kept."""
        with named_ort_failures("on a source of the warm-up"):
            for num_rows in range(1, self._num_kept + 1):
                self._stacked([self._encoded(source)] * num_rows)
        self._graphs.count.freeze()
        self.num_runs = 0
        self.close()

    def close(self) -> None:
        """Drops all kept results."""
        self._sources.clear()
        self._batches.clear()

    def _encoded(self, source: Source) -> Encoded:
        encoded = self._sources.get(source.key)
        if encoded is None:
            encoded = self._encode(source)
            self._sources.put(source.key, encoded)
        return encoded

    def _stacked(self, rows: Sequence[Encoded]) -> Encoded:
        """The rows as one batch; shorter ones are padded, and masks hide the padding."""
        if len(rows) == 1:
            return rows[0]
        names, lengths = list(rows[0].values), [row.lengths[0] for row in rows]
        if self._stacker is None:
            shapes = [
                (value.element_type(), value.shape()) for value in rows[0].values.values()
            ]  # [.., positions, size]
            tensors = [RowTensor(elem_type, (*shape[1:-2], None, shape[-1])) for elem_type, shape in shapes]
            self._stacker = Stacker(self._small.open, self._graphs.device, tensors)
        parts = [
            StackedPart(
                tuple(row.values[name] for name in names),
                [0],
                [*range(length), *[0] * (max(lengths) - length)],
                is_whole=length == max(lengths),
            )
            for row, length in zip(rows, lengths, strict=True)
        ]
        return Encoded(dict(zip(names, self._stacker.stack(parts), strict=True)), tuple(lengths))

    def _encode(self, source: Source) -> Encoded:
        self.num_runs += 1
        spec, device = self._spec, self._graphs.device
        fed: dict[str, npt.NDArray[Any]] = {
            spec.source.name: np.ascontiguousarray(source.array[None], DTYPES[spec.source.elem_type])
        }
        if spec.mask is not None:
            fed[spec.mask.name] = _ones(spec.mask, len(source.array))
        outputs = run_graph(self._session, fed, (*spec.outputs.values(), spec.states), device)
        values = {name: outputs[output] for name, output in spec.outputs.items()}
        states = outputs[spec.states]
        if self._cross is not None and (first := spec.first_step) is not None:
            taken: dict[str, Any] = {first.states: states}
            taken |= {tensor.name: _ones(tensor, states.shape()[1]) for tensor in first.masks}
            taken |= {tensor.name: _ones(tensor, 1) for tensor in first.tokens}
            outputs = run_graph(self._cross, taken, first.outputs.values(), device)
            values |= {name: outputs[output] for name, output in first.outputs.items()}
        return Encoded(values, (states.shape()[1],))


def _ones(tensor: TensorSpec, length: int) -> npt.NDArray[Any]:
    return np.ones((1, length), DTYPES[tensor.elem_type])
