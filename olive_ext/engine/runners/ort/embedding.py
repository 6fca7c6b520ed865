"""What a decoder of a multimodal package takes in place of token ids, computed on the device.

Knows no step and no cache of the decoder. Axes: B rows, S tokens of a row, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.media import Media, MediaItem, token_bucket, token_buckets
from olive_ext.engine.runners.ort.counted_session import ShapeCount
from olive_ext.engine.runners.ort.feature_graphs import FeatureGraph
from olive_ext.engine.runners.ort.inputs import Feed, Layout
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.engine.runners.ort.media_encoder import MediaEncoder
from olive_ext.engine.step import Row, Step
from olive_ext.errors import OliveExtError
from olive_ext.graph.standalone_graphs import fold_graph
from olive_ext.model.media_types import WORDS, EmbeddingSpec


class Embedding:
    """The session of the graph that turns token ids into what the decoder of a multimodal package takes in their place,
    with the features of pictures and sound among them. Text has no features, and the encoders are not opened for it.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: EmbeddingSpec,
        device: Device,
        encoders: Sequence[MediaEncoder],
        open_graph: Callable[[bytes], ort.InferenceSession],
        count: ShapeCount,
        *,
        is_bucketed: bool = False,
    ) -> None:
        """`count` has the encoders' shapes, too. With `is_bucketed` the tokens of a step are filled up to one of
        a few numbers."""
        self._count = count
        self._is_bucketed = is_bucketed
        self._session = count.of(session, "the embedding graph")
        self._spec = spec
        self._device = device
        self._feed = Feed(self._session, device)
        self._encoders = {encoder.spec.modality: encoder for encoder in encoders}
        taken = {tensor for encoder in encoders for tensor in encoder.spec.features}
        self._unused = [tensor for tensor in spec.features if tensor not in taken]
        self._open_graph = count.opener(open_graph, "behind the embedding graph")
        self._folds: dict[tuple[int, int], FeatureGraph] = {}

    def check(self, media: Media) -> None:
        """Raises `OliveExtError` for items that there is no encoder of."""
        for run in media:
            if run.item.modality not in self._encoders:
                taken = " and ".join(f"{WORDS[modality].kind}s" for modality in self._encoders) or "text only"
                kind = WORDS[run.item.modality].kind
                raise OliveExtError(f"the request has a {kind}; this model's encoders take {taken}")

    def expect(self, media: Media) -> None:
        """The items of a request that waits."""
        for modality, encoder in self._encoders.items():
            encoder.expect(run.item for run in media if run.item.modality is modality)

    def bind(self, layout: Layout, decoder: ort.IOBinding, tokens: ort.OrtValue | None) -> None:
        """Computes the embeddings of the step's tokens, or of `tokens` where given, with the features that take the
        place of some, and binds them as inputs of the decoder."""
        # Packed rows are one to the graph.
        num_rows = len(layout.past_B) if len(self._spec.inputs[0].tensor.shape) == 2 else 1
        # The graph counts placeholders from the beginning of each row, and features are counted over all rows.
        is_one_row = self._is_bucketed or bool(layout.items)
        shape = [num_rows, len(layout.tokens_N) // num_rows]
        if is_one_row:
            layout = replace(layout, past_B=layout.past_B[:1])
        for name, value in self._embedded(layout, tokens).items():
            is_folded = is_one_row and value.shape()[:2] != shape
            decoder.bind_ortvalue_input(name, self._fold(value, shape) if is_folded else value)

    def _embedded(self, layout: Layout, tokens: ort.OrtValue | None = None) -> Mapping[str, ort.OrtValue]:
        """The graph's outputs, by name; with buckets those of a bucket of tokens."""
        num_rows = None
        if self._is_bucketed:
            assert tokens is None, "steps of few shapes take their tokens from the host"
            num_rows = token_bucket(len(layout.tokens_N) - 1)
            layout = replace(layout, tokens_N=np.pad(layout.tokens_N, (0, num_rows - len(layout.tokens_N))))
        binding = self._session.io_binding()
        self._feed.bind_inputs(binding, self._spec.inputs, layout, tokens)
        for modality, encoder in self._encoders.items():
            encoder.bind(binding, [item for item in layout.items if item.modality is modality], num_rows)
        for tensor in self._unused:
            binding.bind_ortvalue_input(tensor.name, zeros([0, int(tensor.shape[1])], tensor.elem_type))
        for name in self._spec.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        return dict(zip(self._spec.outputs, binding.get_outputs(), strict=True))

    def _fold(self, value: ort.OrtValue, shape: Sequence[int]) -> ort.OrtValue:
        """The first tokens of what was computed as one row, in the shape of a step's."""
        form = value.element_type(), len(value.shape())
        if form not in self._folds:
            graph = fold_graph(*form)
            self._folds[form] = FeatureGraph(self._open_graph(graph), self._device)
        return self._folds[form].run({"x": value}, rows=np.array(shape), count=np.array([prod(shape)]))

    def warm_up(self, items: Sequence[MediaItem], most: int) -> None:
        """Runs each encoder on its `items`, and all graphs behind them for steps of up to `most` tokens."""
        sizes = token_buckets(most - 1)
        for modality, encoder in self._encoders.items():
            encoder.warm_up([item for item in items if item.modality is modality], sizes)
        for size in sizes:
            for value in self._embedded(Layout.of(Step((Row(0, 0, (0,) * size),)))).values():
                self._fold(value, [1, 1])
        self._count.freeze()

    def describe(self) -> Mapping[str, Any]:
        """Counters of the encoders that there are."""
        told = {name: value for encoder in self._encoders.values() for name, value in encoder.describe().items()}
        return {**told, **self._count.describe()}

    def close(self) -> None:
        """Releases the encoders' features."""
        for encoder in self._encoders.values():
            encoder.close()
