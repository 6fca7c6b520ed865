"""The encoder of an encoder-decoder model: what its decoder takes of its rows' sources. All of it stays on the device.

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
    """The number of encoder positions of each row, without padding."""

    width: int
    """The number with padding, which the decoder's masks hide."""


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
        self.takes_padding = spec.takes_padding
        self.failure: str | None = None
        """How the padding of a source changes texts; empty where it does not, None where that was not tried."""

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
        for tensor in self._spec.masks:
            decoder.bind_cpu_input(tensor.name, _mask(tensor, batch.lengths, batch.width))
        for tensor in self._spec.unused:
            sizes = [len(present), *(size if isinstance(size, int) else 0 for size in tensor.shape[1:])]
            decoder.bind_ortvalue_input(tensor.name, zeros(sizes, tensor.elem_type))

    def describe(self) -> Mapping[str, Any]:
        """The encoder's inputs, and its counters."""
        facts = {"source": self._spec.kind.value, "encoder_runs": self.num_runs, "encoder_failure": self.failure}
        return {**facts, "encoder_outputs_kept": self._num_kept, **self._graphs.count.describe()}

    def warm_up(self, source: Source) -> None:
        """Runs the encoder on a source of the one shape, and the graphs that join up to as many rows as are kept."""
        with named_ort_failures("on a source of the warm-up"):
            for num_rows in range(1, self._num_kept + 1):
                self._stacked([self._encoded(source)] * num_rows)
        self._graphs.count.freeze()
        self.restart()

    def encode_padded(self, source: Source) -> None:
        """Keeps what a source gives with as much padding as it has positions. Raises `RunError`."""
        self.close()
        with named_ort_failures("on a padded source"):
            self._sources.put(source.key, self._encode(source, padding=len(source.array)))

    def restart(self) -> None:
        """Drops all kept results, and counts runs anew."""
        self.close()
        self.num_runs = 0

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
            # The shapes: [.., positions, size].
            shapes = [(value.element_type(), value.shape()) for value in rows[0].values.values()]
            tensors = [RowTensor(elem_type, (*shape[1:-2], None, shape[-1])) for elem_type, shape in shapes]
            self._stacker = Stacker(self._small.open, self._graphs.device, tensors)
        parts = [
            StackedPart(
                tuple(row.values[name] for name in names),
                [0],
                [*range(length), *[0] * (max(lengths) - length)],
                is_whole=row.width == max(lengths),
            )
            for row, length in zip(rows, lengths, strict=True)
        ]
        return Encoded(dict(zip(names, self._stacker.stack(parts), strict=True)), tuple(lengths), max(lengths))

    def _encode(self, source: Source, padding: int = 0) -> Encoded:
        """What a decoder takes of a source, with zeros of `padding` positions at its end."""
        self.num_runs += 1
        spec, device = self._spec, self._graphs.device
        array = np.pad(source.array, [(0, padding), *[(0, 0)] * (source.array.ndim - 1)])
        fed: dict[str, npt.NDArray[Any]] = {spec.source.name: array[None].astype(DTYPES[spec.source.elem_type])}
        if spec.mask is not None:
            fed[spec.mask.name] = _mask(spec.mask, [len(source.array)], len(array))
        outputs = run_graph(self._session, fed, (*spec.outputs.values(), spec.states), device)
        values = {name: outputs[output] for name, output in spec.outputs.items()}
        states = outputs[spec.states]
        width = states.shape()[1]
        length = width - padding
        if self._cross is not None and (first := spec.first_step) is not None:
            taken: dict[str, Any] = {first.states: states}
            taken |= {tensor.name: _mask(tensor, [length], width) for tensor in first.masks}
            taken |= {tensor.name: _mask(tensor, [1], 1) for tensor in first.tokens}
            outputs = run_graph(self._cross, taken, first.outputs.values(), device)
            values |= {name: outputs[output] for name, output in first.outputs.items()}
        return Encoded(values, (length,), width)


def _mask(tensor: TensorSpec, lengths: Sequence[int], width: int) -> npt.NDArray[Any]:
    return (np.arange(width) < np.array(lengths)[:, None]).astype(DTYPES[tensor.elem_type])
