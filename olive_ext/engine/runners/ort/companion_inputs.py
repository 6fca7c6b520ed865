"""Inputs of a decoder that come from other files: an encoder's outputs, the weights of adapters.

All of them stay on the device. Knows no step and no cache of the decoder.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.requests import Source
from olive_ext.engine.runners.ort.counted_session import CountedSession, ShapeCount
from olive_ext.engine.runners.ort.kv.kv_store import Device, zeros
from olive_ext.engine.runners.ort.kv.stacking import Part, Stacker
from olive_ext.engine.runners.runner import refuse_other_source
from olive_ext.errors import ModelError
from olive_ext.graph.standalone_graphs import StackedTensor
from olive_ext.model.encoder_spec import EncoderSpec, FirstStepSpec
from olive_ext.model.ort_session import read_adapter
from olive_ext.model.types import TensorSpec

_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}
"""numpy's type for the ONNX element types that features may have."""
_INTEGERS = {6: np.int32, 7: np.int64}

MOST_BATCHES = 2
"""Steps with other sources than the last one's whose values are kept: rows of two lengths decode in turns."""

Values = Mapping[str, ort.OrtValue]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Encoded:
    """What a decoder takes of the sources of some rows: hidden states and cross KV, by the decoder's inputs."""

    values: Values
    lengths: tuple[int, ...]
    """The encoder's positions of each row."""

    def mask(self, tensor: TensorSpec) -> npt.NDArray[Any]:
        """1 for each of a row's positions, [B, T]."""
        lengths_B1 = np.array(self.lengths)[:, None]
        return (np.arange(max(self.lengths)) < lengths_B1).astype(_INTEGERS[tensor.elem_type])


class Encoder:
    """The encoder's session, and the one that computes cross-attention KV where that is another graph's work.

    What the last `num_kept` sources gave is kept, so that several targets behind one source encode it once. So is what
    the rows of the last steps take together.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        cross: ort.InferenceSession | None,
        spec: EncoderSpec,
        device: Device,
        num_kept: int,
        open_graph: Callable[[bytes], ort.InferenceSession],
        count: ShapeCount,
    ) -> None:
        self.kind = spec.kind
        self.source = spec.source
        self.num_runs = 0
        self._count = count
        self._session = count.of(session, "the encoder")
        self._cross = count.of(cross, "the graph of cross-attention KV") if cross is not None else None
        self._spec = spec
        self._device = device
        self._num_kept = num_kept
        self._open_graph = count.opener(open_graph, "behind the encoder")
        self._stacker: Stacker | None = None
        self._sources: OrderedDict[str, Encoded] = OrderedDict()
        self._batches: OrderedDict[tuple[str, ...], Encoded] = OrderedDict()

    def check(self, source: Source | None) -> None:
        """Raises `OliveExtError` for a source that the graph does not take."""
        refuse_other_source(source, self._spec.kind, self._spec.source)

    def bind(self, sources: Sequence[Source | None], decoder: ort.IOBinding) -> None:
        """Binds what the decoder takes of each row's source; computes it unless it is kept."""
        keys = tuple(source.key for source in sources if source is not None)
        assert len(keys) == len(sources), "checked when the request came"
        batch = _kept(
            self._batches, keys, MOST_BATCHES, lambda: self._stacked([self._encoded(s) for s in sources if s])
        )
        for name, value in batch.values.items():
            decoder.bind_ortvalue_input(name, value)
        for tensor in self._spec.masks:
            decoder.bind_cpu_input(tensor.name, batch.mask(tensor))
        for tensor in self._spec.unused:
            sizes = [len(keys), *(size if isinstance(size, int) else 0 for size in tensor.shape[1:])]
            decoder.bind_ortvalue_input(tensor.name, zeros(sizes, tensor.elem_type))

    def describe(self) -> Mapping[str, Any]:
        facts = {"source": self._spec.kind.value, "encoder_runs": self.num_runs}
        return {**facts, "encoder_outputs_kept": self._num_kept, **self._count.describe()}

    def warm_up(self, source: Source) -> None:
        """Runs the encoder on a source of the shape that all have, and what makes a batch of up to as many as are kept
        for the rows of a step."""
        for num_rows in range(1, self._num_kept + 1):
            self._stacked([self._encoded(source)] * num_rows)
        self._count.freeze()
        self.num_runs = 0
        self.close()

    def close(self) -> None:
        self._sources.clear()
        self._batches.clear()

    def _encoded(self, source: Source) -> Encoded:
        return _kept(self._sources, source.key, self._num_kept, lambda: self._encode(source))

    def _stacked(self, rows: Sequence[Encoded]) -> Encoded:
        """The rows as one batch, shorter ones filled up, which masks hide."""
        if len(rows) == 1:
            return rows[0]
        names, lengths = list(rows[0].values), [row.lengths[0] for row in rows]
        if self._stacker is None:
            ranks = [(value.element_type(), len(value.shape())) for value in rows[0].values.values()]
            tensors = [StackedTensor(elem_type, rank, rank - 2) for elem_type, rank in ranks]  # [.., positions, size]
            self._stacker = Stacker(self._open_graph, self._device, tensors)
        parts = [
            Part(
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
        spec = self._spec
        dtype = {**_FLOATS, **_INTEGERS}[spec.source.elem_type]
        binding = self._session.io_binding()
        binding.bind_cpu_input(spec.source.name, np.ascontiguousarray(source.array[None], dtype))
        if spec.mask is not None:
            binding.bind_cpu_input(spec.mask.name, _ones(spec.mask, len(source.array)))
        found = self._run(self._session, binding, dict.fromkeys((*spec.outputs.values(), spec.states)))
        values = {name: found[output] for name, output in spec.outputs.items()}
        states = found[spec.states]
        if self._cross is not None and spec.first_step is not None:
            values.update(self._cross_values(self._cross, spec.first_step, states))
        return Encoded(values, (states.shape()[1],))

    def _cross_values(self, session: CountedSession, spec: FirstStepSpec, states: ort.OrtValue) -> Values:
        binding = session.io_binding()
        binding.bind_ortvalue_input(spec.states, states)
        for tensor in spec.masks:
            binding.bind_cpu_input(tensor.name, _ones(tensor, states.shape()[1]))
        for tensor in spec.tokens:
            binding.bind_cpu_input(tensor.name, _ones(tensor, 1))
        found = self._run(session, binding, dict.fromkeys(spec.outputs.values()))
        return {name: found[output] for name, output in spec.outputs.items()}

    def _run(self, session: CountedSession, binding: ort.IOBinding, outputs: Mapping[str, None]) -> Values:
        for output in outputs:
            binding.bind_output(output, self._device.kind, self._device.index)
        session.run_with_iobinding(binding)
        return dict(zip(outputs, binding.get_outputs(), strict=True))


class Adapters:
    """The parameters of LoRA adapters (.onnx_adapter), by the names of the inputs that take them; read once.

    They are bound like other inputs, because ONNX Runtime ignores the adapters of its run options where inputs are
    bound.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Raises `ModelError` for a file that is missing or no adapter, and where two give the same parameter."""
        self._read = [(path, read_adapter(path)) for path in paths]  # they own the parameters' memory
        self._digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path, _ in self._read}
        self._origins: dict[str, str] = {}
        self._values: dict[str, ort.OrtValue] = {}
        for path, adapter in self._read:
            for name, value in adapter.get_parameters().items():
                if name in self._origins:
                    raise ModelError(
                        f"'{self._origins[name]}' and '{path}' in engine.adapters both give '{name}'; give one of them"
                    )
                self._origins[name] = path
                self._values[name] = value

    def attach(self, session: ort.InferenceSession, device: Device) -> None:
        """Puts the parameters where `session` wants them. Raises `ModelError` for one that it does not take."""
        taken = {value.name: value for value in (*session.get_inputs(), *session.get_overridable_initializers())}
        for name, value in self._values.items():
            if name not in taken:
                raise ModelError(f"adapter '{self._origins[name]}' gives '{name}', which is no input of the decoder")
            wanted, shape = taken[name], value.shape()
            if value.data_type() != wanted.type or not _fits(shape, wanted.shape):
                raise ModelError(
                    f"adapter '{self._origins[name]}' gives '{name}' as {value.data_type()} {shape}; the decoder takes "
                    f"{wanted.type} {wanted.shape}"
                )
        if device.kind != "cpu":
            self._values = {
                name: ort.OrtValue.ortvalue_from_numpy(value.numpy(), device.kind, device.index)
                for name, value in self._values.items()
            }

    def bind(self, binding: ort.IOBinding) -> None:
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)

    def describe(self) -> Mapping[str, object]:
        """The files and a digest of each, where there are any."""
        return {"adapters": self._digests} if self._digests else {}


def _fits(shape: list[int], wanted: list[int | str | None]) -> bool:
    """A symbolic length takes any, and so does one of 0: that of a default that stands for no adapter."""
    return len(shape) == len(wanted) and all(
        size == length or length == 0 or not isinstance(length, int) for size, length in zip(shape, wanted, strict=True)
    )


def _kept(kept: OrderedDict[Key, Encoded], key: Key, most: int, compute: Callable[[], Encoded]) -> Encoded:
    """The value under `key`, computed unless it is among the `most` last used ones, which are kept."""
    if key not in kept:
        kept[key] = compute()
        if len(kept) > most:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def _ones(tensor: TensorSpec, length: int) -> npt.NDArray[Any]:
    return np.ones((1, length), _INTEGERS[tensor.elem_type])
