"""The KV cache behind a runner: what the four forms of it share.

A store binds past and present of a step's rows to a session, and keeps what comes back. It knows no tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort

from olive_ext.engine.step import Batching, Copy, Row
from olive_ext.model.types import DecoderSpec, KvTensor

ITEM_BYTES = {1: 4, 2: 1, 3: 1, 10: 2, 11: 8, 16: 2, 17: 1, 18: 1, 19: 1, 20: 1}
"""Bytes of an element by ONNX type (FLOAT 1, UINT8 2, INT8 3, FLOAT16 10, DOUBLE 11, BFLOAT16 16, FLOAT8* 17-20)."""

POINTER_DEVICES = frozenset({"cpu", "cuda"})
"""Devices whose values have an address that can be offset and bound."""


@dataclass(frozen=True)
class Device:
    """Where KV lives: ONNX Runtime's device type and number."""

    kind: str
    index: int = 0

    @property
    def has_pointers(self) -> bool:
        return self.kind in POINTER_DEVICES

    @property
    def arena(self) -> str | None:
        """The device's arena as ONNX Runtime's run options name it; None where it has none that can be shrunk."""
        return {"cpu": "cpu:0", "cuda": f"gpu:{self.index}"}.get(self.kind)


@dataclass(frozen=True)
class KvPlace:
    """What a store serves and where: the decoder's session, its caches, the slots, and how helper graphs are opened."""

    session: ort.InferenceSession
    spec: DecoderSpec
    num_slots: int
    device: Device
    open_graph: Callable[[bytes], ort.InferenceSession]


class KvStore(ABC):
    """KV of `num_slots` slots with `capacity` positions each."""

    batching: ClassVar[Batching]

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
    def copy(self, copy: Copy) -> None:
        """Makes the first positions of a slot those of another."""

    @abstractmethod
    def bind(self, rows: Sequence[Row]) -> ort.IOBinding:
        """A binding of the session in which past and present of `rows` are bound."""

    def bind_anew(self, rows: Sequence[Row]) -> ort.IOBinding:
        """Like `bind`, for those who keep the binding. Only caches that are written in place have such."""
        raise TypeError(f"{type(self).__name__} has caches that move")

    def collect(self, rows: Sequence[Row], presents: Sequence[ort.OrtValue]) -> None:  # noqa: B027 (nothing to do)
        """Takes in the present outputs, in the order of the caches, after the run: nothing where the graph has written
        in place."""

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


def bytes_per_position(kv: Sequence[KvTensor]) -> int:
    """Bytes of KV that one position of one slot takes, all layers together."""
    return sum(tensor.heads * tensor.head_size * ITEM_BYTES[tensor.elem_type] for tensor in kv)


def bytes_of_source(spec: DecoderSpec) -> int:
    """Bytes of what is kept of one source for the attention to it; as many positions as the decoder has where the graph
    does not say how many the encoder returns."""
    sizes = (
        [size if isinstance(size, int) else spec.context_length for size in tensor.shape[1:]]
        + [ITEM_BYTES[tensor.elem_type]]
        for tensor in (*spec.cross.states, *spec.cross.kv.values())
    )
    return sum(math.prod(size) for size in sizes)


def zeros(shape: list[int], elem_type: int) -> ort.OrtValue:
    """Zeros in the host's memory, which binding copies to the device. In every type zero is zero bytes."""
    unsigned = np.dtype(f"u{ITEM_BYTES[elem_type]}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, unsigned), elem_type)
