"""The KV cache behind a runner: what the four forms of it share.

A store binds past and present of a step's rows to a session, and keeps what comes back. It knows no tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.step import Batching, Copy, Row
from olive_ext.model.types import ITEM_BYTES, DecoderSpec
from olive_ext.model.types import Device as Device


@dataclass(frozen=True)
class KvPlace:
    """What a store serves and where: the decoder's session, its caches, the slots, and how helper graphs are opened."""

    session: ort.InferenceSession
    spec: DecoderSpec
    num_slots: int
    device: Device
    open_graph: Callable[[bytes], ort.InferenceSession]


class KeptBinding(ort.IOBinding):  # type: ignore[misc]
    """A binding that is used again and again: a value that is bound already is not bound anew, and what names a device
    is made once."""

    def __init__(self, session: ort.InferenceSession) -> None:
        super().__init__(session)
        self._inputs: dict[str, ort.OrtValue | None] = {}
        self._devices: dict[tuple[str, int], Any] = {}

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        if self._inputs.get(name) is not value:
            super().bind_ortvalue_input(name, value)
            self._inputs[name] = value

    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        super().bind_cpu_input(name, array)
        self._inputs[name] = None

    def bind_output(self, name: str, kind: str = "cpu", index: int = 0, *place: Any) -> None:
        """Without a `place` (type, shape, address) ONNX Runtime allocates the output anew for each run."""
        if place:
            super().bind_output(name, kind, index, *place)
            return
        device = self._devices.get((kind, index))
        if device is None:
            device = self._devices[kind, index] = ort.OrtDevice.make(kind, index)._get_c_device()
        self._iobinding.bind_output(name, device)


class KvStore(ABC):
    """KV of `num_slots` slots with `capacity` positions each."""

    batching: ClassVar[Batching]
    is_in_place: ClassVar[bool] = True
    """The graph writes into the memory that is bound, so that its present outputs need not be read."""

    pads_in_front = False
    """Rows of one step that have fewer positions than others are filled up in front, not behind."""

    def __init__(self, place: KvPlace) -> None:
        self.num_slots = place.num_slots
        self.capacity = 0
        self._session = place.session
        self._spec = place.spec
        self._device = place.device
        self._open_graph = place.open_graph

    @abstractmethod
    def reserve(self, capacity: int) -> None:
        """Allocates anew with `capacity` positions for each slot; what was resident is gone."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes the first positions of slots those of others, one copy after the other."""

    @abstractmethod
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        """A binding of the session in which past and present of `rows` are bound."""

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        """Like `bind`, for those who keep the binding. Only caches that are written in place have such."""
        raise TypeError(f"{type(self).__name__} has caches that move")

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:  # noqa: B027 (nothing to do)
        """Takes in the present outputs, in the order of the caches, after the run: none where the graph has written in
        place."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Which form it is, for `describe_execution`."""

    def release_memory(self) -> None:
        """Releases the memory until `reserve` allocates anew."""
        self.close()
        self.capacity = 0

    @abstractmethod
    def close(self) -> None:
        """Releases the memory."""


def allocate(session: ort.InferenceSession, shape: list[int], elem_type: int, device: Device) -> ort.OrtValue:
    """Memory on `device` that several sessions bind. Values that a session makes belong to it alone everywhere but on
    WebGPU, whose values nothing else can make."""
    if device.kind == "webgpu":
        return session.create_ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, elem_type, device.kind, device.index)


def zeros(shape: list[int], elem_type: int) -> ort.OrtValue:
    """Zeros in the host's memory, which binding copies to the device. In every type zero is zero bytes."""
    unsigned = np.dtype(f"u{ITEM_BYTES[elem_type]}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, unsigned), elem_type)
