"""From a source to what a decoder takes of it on every run: encoder states and cross-attention KV, on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.requests import Source
from olive_ext.engine.runners.ort.kv.base import Device, zeros
from olive_ext.errors import OliveExtError
from olive_ext.model.encoder_spec import EncoderSpec, FirstStepSpec
from olive_ext.model.types import SourceKind, TensorSpec

_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}
"""numpy's type for the ONNX element types that features may have."""
_INTEGERS = {6: np.int32, 7: np.int64}

Values = Mapping[str, ort.OrtValue]


class Encoder:
    """The encoder's session, and the one that computes cross-attention KV where that is another graph's work.

    What the last `num_kept` sources gave is kept, so that several targets behind one source encode it once.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        cross: ort.InferenceSession | None,
        spec: EncoderSpec,
        device: Device,
        num_kept: int,
    ) -> None:
        self.kind = spec.kind
        self.num_runs = 0
        self._session = session
        self._cross = cross
        self._spec = spec
        self._device = device
        self._num_kept = num_kept
        self._kept: OrderedDict[str, Values] = OrderedDict()

    def check(self, source: Source | None) -> None:
        """Raises `OliveExtError` for a source that the graph does not take."""
        kind = self._spec.kind
        if source is None:
            raise OliveExtError(f"this model is an encoder-decoder: a request needs a source ({kind.value})")
        declared = self._spec.source.shape[1:]
        shape = source.array.shape
        is_features = source.array.dtype.kind == "f"
        fits = len(shape) == len(declared) and all(
            size == wanted or not isinstance(wanted, int) for size, wanted in zip(shape, declared, strict=True)
        )
        if is_features is not (kind is SourceKind.FEATURES) or not fits or 0 in shape:
            raise OliveExtError(
                f"the source is of type {source.array.dtype} and shape {list(shape)}; the encoder takes {kind.value} "
                f"of shape {list(declared)}"
            )

    def bind(self, source: Source | None, decoder: ort.IOBinding) -> None:
        """Binds what the decoder takes of `source`; computes it unless it is kept."""
        assert source is not None, "checked when the request came"
        values = self._kept.get(source.key)
        if values is None:
            values = self._kept[source.key] = self._encode(source)
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(source.key)
        for name, value in values.items():
            decoder.bind_ortvalue_input(name, value)

    def describe(self) -> Mapping[str, Any]:
        return {"source": self._spec.kind.value, "encoder_runs": self.num_runs, "encoder_outputs_kept": self._num_kept}

    def close(self) -> None:
        self._kept.clear()

    def _encode(self, source: Source) -> Values:
        self.num_runs += 1
        spec = self._spec
        dtype = {**_FLOATS, **_INTEGERS}[spec.source.elem_type]
        feed: dict[str, npt.NDArray[np.generic]] = {spec.source.name: source.array[None].astype(dtype)}
        if spec.mask is not None:
            feed[spec.mask.name] = _ones(spec.mask, len(source.array))
        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        found = self._run(self._session, binding, dict.fromkeys((*spec.outputs.values(), spec.states)))
        values = {name: found[output] for name, output in spec.outputs.items()}
        states = found[spec.states]
        if self._cross is not None and spec.first_step is not None:
            values.update(self._cross_values(self._cross, spec.first_step, states))
        num_positions = states.shape()[1]
        for tensor in spec.masks:
            values[tensor.name] = ort.OrtValue.ortvalue_from_numpy(_ones(tensor, num_positions))
        for tensor in spec.unused:
            sizes = [1, *(size if isinstance(size, int) else 0 for size in tensor.shape[1:])]
            values[tensor.name] = zeros(sizes, tensor.elem_type)
        return values

    def _cross_values(self, session: ort.InferenceSession, spec: FirstStepSpec, states: ort.OrtValue) -> Values:
        binding = session.io_binding()
        binding.bind_ortvalue_input(spec.states, states)
        for tensor in spec.masks:
            binding.bind_cpu_input(tensor.name, _ones(tensor, states.shape()[1]))
        for tensor in spec.tokens:
            binding.bind_cpu_input(tensor.name, _ones(tensor, 1))
        found = self._run(session, binding, dict.fromkeys(spec.outputs.values()))
        return {name: found[output] for name, output in spec.outputs.items()}

    def _run(self, session: ort.InferenceSession, binding: ort.IOBinding, outputs: Mapping[str, None]) -> Values:
        for output in outputs:
            binding.bind_output(output, self._device.kind, self._device.index)
        session.run_with_iobinding(binding)
        return dict(zip(outputs, binding.get_outputs(), strict=True))


def _ones(tensor: TensorSpec, length: int) -> npt.NDArray[Any]:
    return np.ones((1, length), _INTEGERS[tensor.elem_type])
