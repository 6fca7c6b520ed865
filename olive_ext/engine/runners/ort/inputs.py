"""A decoder's inputs besides its caches: a step's rows as arrays, LoRA adapters, and weights as inputs, whose numbers
can change without a new session. ONNX Runtime packs constant weights for its CPU kernels once, but weights that are
inputs anew in every run: short steps cost more than with constant weights.

Knows no cache and no outputs. Axes: B rows, S tokens of a row where all rows have as many, N tokens of all rows, T
cells or positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import onnxruntime as ort

from olive_ext.engine.step import IntArray, Row, Step
from olive_ext.errors import MismatchError
from olive_ext.graph.edits import constants_as_inputs
from olive_ext.graph.nodes import ModelProto
from olive_ext.media.items import Array, Arrays, MediaItem, rotary_positions, runs_within
from olive_ext.model.files.content import digest_of
from olive_ext.model.providers.devices import Device
from olive_ext.model.providers.ort_session import read_adapter
from olive_ext.model.spec.role_inputs import StepArrays


@dataclass(frozen=True)
class Layout(StepArrays):
    """A step's rows as arrays. A tree batch is one row to the graph."""

    items: tuple[MediaItem, ...] = ()
    """Pictures and sounds whose features replace placeholders, in the order of these."""

    @classmethod
    def of(cls, step: Step, pads_in_front: bool = False, greedy_R: IntArray | None = None) -> Layout:
        """The layout of a step's rows or tree batch. Without a width, masks end with the longest row. `greedy_R`: the
        greedy tokens of the step before, which rows may follow."""
        rows, first_cell = step.rows, step.first_cell
        _, past, lengths, starts, tokens_N = step.columns
        positions_N = past
        if len(tokens_N) > len(rows):
            positions_N = np.repeat(past - starts, lengths) + np.arange(len(tokens_N))
        if greedy_R is not None:
            tokens_N = step.columns.tokens_after(step.follows, greedy_R)
        items: tuple[MediaItem, ...] = ()
        rotary_3N: Array | None = None
        if [row for row in rows if row.media]:
            tokens_N = tokens_N.copy()
            items, rotary_3N = _place_media(rows, tokens_N, positions_N)
        if first_cell is not None:
            lengths, past = np.array([len(tokens_N)]), np.array([first_cell])
        total = past + lengths
        most = step.width or int(np.maximum.reduce(total))
        arrays = tokens_N, lengths, past, total, positions_N, most
        return cls(*arrays, rotary_3N, pads_in_front, step.whole_length, items)


def _place_media(rows: Sequence[Row], tokens_N: Array, positions_N: Array) -> tuple[tuple[MediaItem, ...], Array]:
    """Puts the placeholders of items into `tokens_N`. Returns the items, and the rotary positions of all tokens."""
    items, rotary_3N = [], np.stack([positions_N] * 3)
    starts = accumulate([len(row.tokens) for row in rows], initial=0)
    for row, start in zip(rows, starts, strict=False):
        place, length = start - row.past, len(row.tokens)
        for run in runs_within(row.media, row.past, row.past + length):
            tokens_N[place + run.start : place + run.stop] = run.item.placeholder
            items.append(run.item)
        span = slice(start, start + length)
        rotary_3N[:, span] = rotary_positions(row.media, positions_N[span])
    return tuple(items), rotary_3N


class Adapters:
    """The parameters of LoRA adapters (.onnx_adapter), by the names of the inputs that take them; read once.

    They are bound like other inputs, because ONNX Runtime ignores its run options' adapters where inputs are bound.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Raises `ModelError` for a file that is missing or no adapter, and where two files have the same parameter."""
        self._read = [(path, read_adapter(path)) for path in paths]  # they own the parameters' memory
        self._digests = {path: digest_of([("adapter", Path(path))])[:16] for path, _ in self._read}
        self._origins: dict[str, str] = {}
        self._values: dict[str, ort.OrtValue] = {}
        for path, adapter in self._read:
            for name, value in adapter.get_parameters().items():
                if name in self._origins:
                    raise MismatchError(
                        f"'{self._origins[name]}' and '{path}' in engine.adapters both give '{name}'; give one of them"
                    )
                self._origins[name] = path
                self._values[name] = value

    def attach(self, session: ort.InferenceSession, device: Device) -> None:
        """Puts the parameters where `session` wants them. Raises `ModelError` for one that it does not take."""
        taken = {value.name: value for value in (*session.get_inputs(), *session.get_overridable_initializers())}
        for name, value in self._values.items():
            if name not in taken:
                raise MismatchError(f"adapter '{self._origins[name]}' gives '{name}', which is no input of the decoder")
            wanted, shape = taken[name], value.shape()
            if value.data_type() != wanted.type or not _fits(shape, wanted.shape):
                fault = f"gives '{name}' as {value.data_type()} {shape}; the decoder takes {wanted.type} {wanted.shape}"
                raise MismatchError(f"adapter '{self._origins[name]}' {fault}")
        if device.kind != "cpu":
            self._values = {
                name: ort.OrtValue.ortvalue_from_numpy(value.numpy(), device.kind, device.index)
                for name, value in self._values.items()
            }

    def bind(self, binding: ort.IOBinding) -> None:
        """Binds all parameters as inputs of the decoder."""
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)

    def describe(self) -> Mapping[str, object]:
        """The files with a digest of each; empty where there are none."""
        return {"adapters": self._digests} if self._digests else {}


def _fits(shape: list[int], wanted: list[int | str | None]) -> bool:
    """Whether the shape fits. A symbolic length takes any; so does a length of 0, that of a default for no adapter."""
    return len(shape) == len(wanted) and all(
        size == length or length == 0 or not isinstance(length, int) for size, length in zip(shape, wanted, strict=True)
    )


class BoundWeights:
    """Values by the names that the graph has for them."""

    def __init__(self, values: Arrays) -> None:
        """`values` are those of the graph itself."""
        self._arrays = dict(values)
        self._values: dict[str, ort.OrtValue] = {}
        self._device: Device | None = None
        self._early: dict[str, Array] = {}
        """Arrays that were put before there was a session: encoders' sessions are opened when the first item comes."""

    def edit(self, proto: ModelProto) -> None:
        """Makes the values inputs of the graph, in place."""
        constants_as_inputs(proto.graph, self._arrays)

    def attach(self, device: Device) -> None:
        """Puts the values on `device`."""
        self._device = device
        self.put(self._arrays | self._early)
        self._early = {}

    def put(self, values: Arrays) -> None:
        """Puts other numbers for some weights, from the next step on. Resident content is that of the old ones."""
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
