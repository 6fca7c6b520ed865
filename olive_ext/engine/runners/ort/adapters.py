"""LoRA adapters (.onnx_adapter): weights that a graph takes as inputs, read once and bound for every run.

They are bound like other inputs, because ONNX Runtime ignores the adapters of its run options where inputs are bound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.base import Device
from olive_ext.errors import ModelError
from olive_ext.model.ort_session import read_adapter


class Adapters:
    """The parameters of some adapters, by the names of the inputs that take them."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Raises `ModelError` for a file that is missing or no adapter, and where two give the same parameter."""
        self._read = [(path, read_adapter(path)) for path in paths]  # they own the parameters' memory
        self.digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path, _ in self._read}
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

    @property
    def names(self) -> frozenset[str]:
        """Inputs that the adapters fill."""
        return frozenset(self._values)

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
        return {"adapters": self.digests} if self.digests else {}


def _fits(shape: list[int], wanted: list[int | str | None]) -> bool:
    """A symbolic length takes any, and so does one of 0: that of a default that stands for no adapter."""
    return len(shape) == len(wanted) and all(
        size == length or length == 0 or not isinstance(length, int) for size, length in zip(shape, wanted, strict=True)
    )
