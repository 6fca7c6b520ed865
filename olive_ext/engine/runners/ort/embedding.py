"""Token ids to what a decoder takes instead of them, on the device: for the text of multimodal packages."""

from __future__ import annotations

import onnxruntime as ort

from olive_ext.engine.runners.ort.feed import Feed
from olive_ext.engine.runners.ort.inputs import Layout
from olive_ext.engine.runners.ort.kv.base import Device, zeros
from olive_ext.model.types import EmbeddingSpec


class Embedding:
    """The embedding graph's session. Images and sound have no rows in text, and their graphs are not opened."""

    def __init__(self, session: ort.InferenceSession, spec: EmbeddingSpec, device: Device) -> None:
        self._session = session
        self._spec = spec
        self._device = device
        self._feed = Feed(session, device)

    def bind(self, layout: Layout, decoder: ort.IOBinding, tokens: ort.OrtValue | None) -> None:
        """Computes the embeddings of the step's tokens, or of `tokens` where given, and binds them as inputs of the
        decoder."""
        binding = self._session.io_binding()
        self._feed.bind_inputs(binding, self._spec.inputs, layout, tokens)
        for tensor in self._spec.features:
            binding.bind_ortvalue_input(tensor.name, zeros([0, int(tensor.shape[1])], tensor.elem_type))
        for name in self._spec.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        for name, value in zip(self._spec.outputs, binding.get_outputs(), strict=True):
            decoder.bind_ortvalue_input(name, value)
