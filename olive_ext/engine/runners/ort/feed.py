"""Hands small host arrays to a session's inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.runners.ort.inputs import Layout, compute_inputs
from olive_ext.engine.runners.ort.kv.base import Device
from olive_ext.model.types import InputSpec, Role

KEPT_VALUES = 64
"""Device values that are kept for updating; the longest unused goes first."""


class Feed:
    """Binds arrays. An input that the session wants on its device has one value there for each shape, updated in place,
    so that nothing is allocated for a shape that has been met."""

    def __init__(self, session: ort.InferenceSession, device: Device, kept: int | None = KEPT_VALUES) -> None:
        """`kept`: values that are kept at most; all where it is None."""
        infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        self._on_device = {value.name for value, info in infos if info.name != "Cpu"} if device.kind != "cpu" else set()
        self._device = device
        self._kept = kept
        self._values: OrderedDict[tuple[str, tuple[int, ...]], ort.OrtValue] = OrderedDict()

    def bind(self, binding: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
        """Binds `array` as the input `name`; it may be changed after the run only."""
        if name not in self._on_device or not array.size:
            binding.bind_cpu_input(name, array)
            return
        key = (name, array.shape)
        if key in self._values:
            self._values.move_to_end(key)
            self._values[key].update_inplace(array)
        else:
            self._values[key] = ort.OrtValue.ortvalue_from_numpy(array, self._device.kind, self._device.index)
            if self._kept is not None and len(self._values) > self._kept:
                self._values.popitem(last=False)
        binding.bind_ortvalue_input(name, self._values[key])

    def bind_inputs(
        self, binding: ort.IOBinding, specs: Sequence[InputSpec], layout: Layout, tokens: ort.OrtValue | None = None
    ) -> None:
        """Binds what `specs` ask of a step's rows; `tokens`, where given, in place of the rows' token ids."""
        computed = [spec for spec in specs if tokens is None or spec.role is not Role.INPUT_IDS]
        for spec in specs:
            if spec not in computed:
                binding.bind_ortvalue_input(spec.tensor.name, tokens)
        for name, array in compute_inputs(computed, layout).items():
            self.bind(binding, name, array)
