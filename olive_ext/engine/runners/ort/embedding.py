"""What a decoder of a multimodal package takes in place of token ids, computed on the device.

Knows no step and no cache of the decoder. Axes: B rows, S tokens of a row, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.media import Media, MediaItem
from olive_ext.engine.runners.ort.feature_graphs import FeatureGraph
from olive_ext.engine.runners.ort.inputs import Feed, Layout
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.engine.runners.ort.media_encoder import MediaEncoder
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
    ) -> None:
        self._session = session
        self._spec = spec
        self._device = device
        self._feed = Feed(session, device)
        self._encoders = {encoder.spec.modality: encoder for encoder in encoders}
        taken = {tensor for encoder in encoders for tensor in encoder.spec.features}
        self._unused = [tensor for tensor in spec.features if tensor not in taken]
        self._open_graph = open_graph
        self._folds: dict[int, FeatureGraph] = {}

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
        binding = self._session.io_binding()
        num_tokens, num_rows = len(layout.tokens_N), len(layout.past_B)
        # The graph counts placeholders from the beginning of each row, and features are counted over all rows.
        is_folded = bool(layout.items) and num_rows > 1 and len(self._spec.inputs[0].tensor.shape) == 2
        layout = replace(layout, past_B=layout.past_B[:1]) if is_folded else layout
        self._feed.bind_inputs(binding, self._spec.inputs, layout, tokens)
        for modality, encoder in self._encoders.items():
            encoder.bind(binding, [item for item in layout.items if item.modality is modality], num_tokens)
        for tensor in self._unused:
            binding.bind_ortvalue_input(tensor.name, zeros([0, int(tensor.shape[1])], tensor.elem_type))
        for name in self._spec.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        for name, value in zip(self._spec.outputs, binding.get_outputs(), strict=True):
            decoder.bind_ortvalue_input(name, self._fold(value, num_rows) if is_folded else value)

    def _fold(self, value: ort.OrtValue, num_rows: int) -> ort.OrtValue:
        """[B, S, H] of what was computed as one row."""
        elem_type = value.element_type()
        if elem_type not in self._folds:
            self._folds[elem_type] = FeatureGraph(self._open_graph(fold_graph(elem_type)), self._device)
        return self._folds[elem_type].run({"x": value}, rows=np.array([num_rows]))

    def warm_up(self, items: Sequence[MediaItem]) -> None:
        """Runs each encoder on its `items`."""
        for modality, encoder in self._encoders.items():
            encoder.warm_up([item for item in items if item.modality is modality])

    def describe(self) -> Mapping[str, Any]:
        """Counters of the encoders that there are."""
        return {name: value for encoder in self._encoders.values() for name, value in encoder.describe().items()}

    def close(self) -> None:
        """Releases the encoders' features."""
        for encoder in self._encoders.values():
            encoder.close()
