"""Has the provider capture decoding steps and replay them (CUDA graphs, WebGPU's graph capture): a replay launches all
kernels at once. Knows no tokens.

A captured step reads and writes the same addresses for good. So it has a binding of its own, which is filled once: what
goes in is written into values that are kept, and what comes out stays on the device until it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.forms.rows.buckets import Shape, shape_of
from olive_ext.engine.runners.ort.inputs import InputFeed
from olive_ext.engine.step import Step
from olive_ext.errors import RunError
from olive_ext.model.providers.devices import Device

RUN_OPTION = "gpu_graph_id"
"""ONNX Runtime's name for the number under which a run is captured or replayed; -1 does neither."""

NOT_CAPTURED = -1


class Captured:
    """Stands in for a binding: what is bound once stays."""

    def __init__(self, number: int, binding: ort.IOBinding, feed: InputFeed, outputs: Sequence[ort.OrtValue]) -> None:
        """`outputs`: the values of all outputs but the caches, which are bound."""
        self.number = number
        self.outputs = outputs
        self.options = run_options(number)
        self.binding = binding
        self.feed = feed
        self._bound: dict[str, Any] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        """Binds a value for good: it must be the same ever after."""
        if name not in self._bound:
            self.binding.bind_ortvalue_input(name, value)
        elif self._bound[name] is not value:
            raise RunError(f"a captured step got another value for '{name}'")
        self._bound[name] = value

    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """What the host knows was read when the step was captured, and must be the same ever after."""
        if name not in self._bound:
            self.binding._iobinding.bind_input(name, array)  # on WebGPU the wrapper takes values on the device only
        elif not np.array_equal(self._bound[name], array):
            raise RunError(f"a captured step got '{name}' = {array.tolist()} instead of {self._bound[name].tolist()}")
        self._bound[name] = array

    def bind_output(self, name: str, *_: Any) -> None:
        """Binds nothing: every output of a captured step has its value on the device already."""


class Capture:
    """The captured steps of one session: those in which all slots decode, one for each of their shapes."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session = session
        self._device = device
        self._types = {output.name: output for output in session.get_outputs()}
        self._steps: dict[Shape, Captured] = {}
        self._next_number = 1
        self._num_replayed = 0

    def prepared(self, step: Step, num_slots: int) -> tuple[Step, bool]:
        """The step as it is to run, and whether it is captured or replayed."""
        return step, step.width is not None and len(step.rows) == num_slots and len(step.rows[0].tokens) == 1

    def captured(self, step: Step, bind_caches: Callable[[], ort.IOBinding], outputs: Mapping[str, int]) -> Captured:
        """What the step is bound to. A new one gets the caches, and values for outputs with these numbers of rows."""
        shape = shape_of(step)
        if shape not in self._steps:
            binding = bind_caches()
            values = {name: self._zeros(name, size) for name, size in outputs.items()}
            for name, value in values.items():
                binding.bind_ortvalue_output(name, value)
            feed = InputFeed(self._session, self._device, kept=None)
            self._steps[shape] = Captured(self._next_number, binding, feed, [*values.values()])
            self._next_number += 1
        return self._steps[shape]

    def run(self, captured: Captured) -> Sequence[ort.OrtValue]:
        """The outputs, which stay where they are: the first run captures, others replay."""
        self._session.run_with_iobinding(captured.binding, captured.options)
        self._num_replayed += 1
        return captured.outputs

    def forget(self) -> None:
        """The slots are about to move: steps are to be captured anew."""
        release = getattr(self._session, "release_captured_graph", None)  # from ONNX Runtime 1.31 on
        for captured in self._steps.values():
            if release is not None:
                release(captured.number)
        self._steps.clear()

    def describe(self) -> dict[str, int]:
        """How many steps are captured, and how many runs were captured or replayed."""
        return {"steps_captured": len(self._steps), "steps_replayed": self._num_replayed}

    def _zeros(self, name: str, size: int) -> ort.OrtValue:
        declared = self._types[name]
        dtype = {"tensor(float)": np.float32, "tensor(int64)": np.int64}[declared.type]
        zeros = np.zeros([size, *declared.shape[1:]], dtype)
        return ort.OrtValue.ortvalue_from_numpy(zeros, self._device.kind, self._device.index)


def run_options(number: int) -> ort.RunOptions:
    """Options of a run that is captured or replayed under this number."""
    options = ort.RunOptions()
    options.add_run_config_entry(RUN_OPTION, str(number))
    return options
