"""What a decoder of a multimodal package takes in place of token ids, computed on the device.

Knows no step and no cache of the decoder. Axes: B rows, S tokens of a row, H size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.forms.kv_store import zeros
from olive_ext.engine.media.encoder import MediaEncoder
from olive_ext.engine.media.graphs import ItemGraphs, SmallGraphs
from olive_ext.engine.media.items import Media, MediaItem, token_bucket, token_buckets
from olive_ext.engine.runners.ort.bound_weights import BoundWeights
from olive_ext.engine.runners.ort.inputs import InputFeed, Layout
from olive_ext.engine.step import Row, Step
from olive_ext.errors import OliveExtError
from olive_ext.graph.standalone_graphs import fold_graph
from olive_ext.model.spec.media_types import WORDS, EmbeddingSpec


class Embedding:
    """The session of the graph that turns token ids into what the decoder of a multimodal package takes in their place,
    with the features of pictures and sound among them. Text has no features, and the encoders are not opened for it.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: EmbeddingSpec,
        encoders: Sequence[MediaEncoder],
        graphs: ItemGraphs,
        weights: BoundWeights | None = None,
    ) -> None:
        """`graphs` counts the encoders' shapes, too; where it is bucketed a step's tokens are filled up. `weights`: of
        the session's graph, bound to its runs."""
        self._weights = weights
        self._graphs = graphs
        self._session = graphs.count.of(session, "the embedding graph")
        self._spec = spec
        self._feed = InputFeed(self._session, graphs.device)
        self._encoders = {encoder.spec.modality: encoder for encoder in encoders}
        taken = {tensor for encoder in encoders for tensor in encoder.spec.features}
        self._unused = [tensor for tensor in spec.features if tensor not in taken]
        self._small = SmallGraphs(graphs, "behind the embedding graph")

    def check(self, media: Media) -> None:
        """Raises `OliveExtError` for items that there is no encoder of."""
        for run in media:
            if run.item.modality not in self._encoders:
                taken = " and ".join(f"{WORDS[modality].kind}s" for modality in self._encoders) or "text only"
                kind = WORDS[run.item.modality].kind
                raise OliveExtError(f"the request has a {kind}; this model's encoders take {taken}")

    def expect(self, media: Media) -> None:
        """Takes note of the items of a request that waits."""
        for modality, encoder in self._encoders.items():
            encoder.expect(run.item for run in media if run.item.modality is modality)

    def bind(self, layout: Layout, decoder: ort.IOBinding, tokens: ort.OrtValue | None) -> None:
        """Computes the embeddings of the step's tokens, features among them, as inputs of the decoder."""
        # Packed rows are one to the graph.
        num_rows = len(layout.past_B) if len(self._spec.inputs[0].tensor.shape) == 2 else 1
        # The graph counts placeholders from the beginning of each row, and features are counted over all rows.
        is_one_row = self._graphs.is_bucketed or bool(layout.items)
        shape = [num_rows, len(layout.tokens_N) // num_rows]
        if is_one_row:
            layout = replace(layout, past_B=layout.past_B[:1])
        for name, value in self._embedded(layout, tokens).items():
            is_folded = is_one_row and value.shape()[:2] != shape
            decoder.bind_ortvalue_input(name, self._fold(value, shape) if is_folded else value)

    def _embedded(self, layout: Layout, tokens: ort.OrtValue | None = None) -> Mapping[str, ort.OrtValue]:
        """The graph's outputs, by name; with buckets those of a bucket of tokens."""
        num_rows = None
        if self._graphs.is_bucketed:
            assert tokens is None, "steps of few shapes take their tokens from the host"
            num_rows = token_bucket(len(layout.tokens_N) - 1)
            layout = replace(layout, tokens_N=np.pad(layout.tokens_N, (0, num_rows - len(layout.tokens_N))))
        binding, device = self._session.io_binding(), self._graphs.device
        self._feed.bind_inputs(binding, self._spec.inputs, layout, tokens)
        for modality, encoder in self._encoders.items():
            encoder.bind(binding, [item for item in layout.items if item.modality is modality], num_rows)
        if self._weights is not None:
            self._weights.bind(binding)
        for tensor in self._unused:
            binding.bind_ortvalue_input(tensor.name, zeros([0, int(tensor.shape[1])], tensor.elem_type))
        for name in self._spec.outputs:
            binding.bind_output(name, device.kind, device.index)
        self._session.run_with_iobinding(binding)
        return dict(zip(self._spec.outputs, binding.get_outputs(), strict=True))

    def _fold(self, value: ort.OrtValue, shape: Sequence[int]) -> ort.OrtValue:
        """The first tokens of what was computed as one row, in the shape of a step's."""
        form = value.element_type(), len(value.shape())
        return self._small.run(fold_graph, form, {"x": value}, rows=shape, count=[prod(shape)])

    def warm_up(self, items: Sequence[MediaItem], most: int) -> None:
        """Runs each encoder on its `items`, and all graphs behind them for steps of up to `most` tokens."""
        sizes = token_buckets(most - 1)
        for modality, encoder in self._encoders.items():
            encoder.warm_up([item for item in items if item.modality is modality], sizes)
        for size in sizes:
            for value in self._embedded(Layout.of(Step((Row(0, 0, (0,) * size),)))).values():
                self._fold(value, [1, 1])
        self._graphs.count.freeze()

    def describe(self) -> Mapping[str, Any]:
        """Counters of the encoders that there are."""
        counters = {name: value for encoder in self._encoders.values() for name, value in encoder.describe().items()}
        return {**counters, **self._graphs.count.describe()}

    def close(self) -> None:
        """Releases the encoders' features."""
        for encoder in self._encoders.values():
            encoder.close()
