"""Weights of a graph as inputs of it: other numbers are a binding, not another session; and what its steps leave for
runs of its parts.

ONNX Runtime packs constant weights for its CPU kernels once, and weights that are inputs anew in every run: short steps
cost more than those of constant weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import onnxruntime as ort

from olive_ext.engine.step import Step
from olive_ext.graph.edits import constants_as_inputs
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model.providers.devices import Device


class StepStates(ABC):
    """What one runner's steps take, or leave, at a border of the graph."""

    left: tuple[str, ...] = ()
    """Outputs of the graph that are kept."""

    @abstractmethod
    def bind(self, binding: ort.IOBinding, step: Step) -> None:
        """Binds what a step takes and leaves."""

    @abstractmethod
    def collect(self, outputs: Sequence[ort.OrtValue]) -> None:
        """Keeps what the step has left."""


OpenAbove: TypeAlias = Callable[[ModelProto, StepStates], Any]
"""Opens a runner (`OpenedRunner`) of a part of a decoder's graph that takes the states of its steps from the rest."""


class BoundWeights:
    """Values by the names that the graph has for them."""

    def __init__(self, values: Mapping[str, npt.NDArray[Any]], prepare: Callable[[ModelProto], None]) -> None:
        """`values` are those of the graph itself, which `prepare` has edited in place: it may bring some of them."""
        self._arrays, self._prepare = dict(values), prepare
        self._values: dict[str, ort.OrtValue] = {}
        self._device: Device | None = None
        self.states: StepStates | None = None
        """What the graph's steps leave for parts of it, as settings for `opened`."""

        self._early: dict[str, npt.NDArray[Any]] = {}
        """Arrays put before there was a session: encoders' sessions are opened when the first item comes."""

    def edit(self, proto: ModelProto) -> None:
        """Has the graph take the values as inputs, in place."""
        self._prepare(proto)
        constants_as_inputs(proto.graph, self._arrays)

    def attach(self, device: Device) -> None:
        """Puts the values on `device`."""
        self._device = device
        self.put(self._arrays | self._early)
        self._early = {}

    def opened(self, above: OpenAbove) -> None:
        """The decoder that takes the values is open; `above` opens a part of it, which binds them, too."""

    def put(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Other numbers for some weights, from the next step on; what is resident in slots is of the old ones."""
        for name, array in values.items():
            assert (array.shape, array.dtype) == (self._arrays[name].shape, self._arrays[name].dtype), name
        if self._device is None:
            self._early |= values
            return
        for name, array in values.items():
            self._values[name] = ort.OrtValue.ortvalue_from_numpy(array, self._device.kind, self._device.index)

    def put_back(self, names: Iterable[str]) -> None:
        """The graph's own numbers of these weights."""
        self.put({name: self._arrays[name] for name in names})

    def bind(self, binding: ort.IOBinding) -> None:
        """Binds all values to a step's binding."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
