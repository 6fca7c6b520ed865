"""What a graph has at its borders in each step, kept for runs of its upper parts, which begin there.

A run of steps begins with nothing resident. What a step computes is decided by the steps before it and by itself, so a
digest of all of these is its key: another run of the same requests has the same steps, or finds nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from typing_extensions import override

from olive_ext.engine.runners.ort.bound_weights import StepStates
from olive_ext.engine.step import Step

Values: TypeAlias = dict[str, Any]
"""Values on their device (`onnxruntime.OrtValue`) by name."""


class MissingStatesError(Exception):
    """Nothing is kept of a step: the whole graph is to be run."""


class KeptStates:
    """Values by runs and steps, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._runs: OrderedDict[Hashable, dict[bytes, Values]] = OrderedDict()
        self._borders: dict[Hashable, list[tuple[str, ...]]] = {}

    def borders(self, run: Hashable) -> Sequence[tuple[str, ...]]:
        """The borders that are kept of every step of a run."""
        return self._borders.get(run, ())

    def begin(self, run: Hashable, borders: Iterable[tuple[str, ...]]) -> None:
        """Keeps the values of these borders of the steps that come, beside those of other runs while there is room."""
        self.drop(run)
        self._runs[run], self._borders[run] = {}, list(borders)

    def names(self, run: Hashable) -> frozenset[str]:
        """All values of a run's borders."""
        return frozenset(name for border in self.borders(run) for name in border)

    def type_of(self, run: Hashable, name: str) -> tuple[int, list[None]]:
        """ONNX's element type of a value of the run's, and as many lengths as it has axes."""
        value = next(iter(self._runs[run].values()))[name]
        return int(value.element_type()), [None] * len(value.shape())

    def get(self, run: Hashable, step: bytes) -> Mapping[str, Any]:
        """The states of one step. Raises `MissingStatesError`."""
        try:
            return self._runs[run][step]
        except KeyError:
            raise MissingStatesError from None

    def put(self, run: Hashable, step: bytes, values: Values) -> None:
        """Keeps a step's values. Where there is no room, runs that began earlier are dropped, then borders of this
        one: every second."""
        if run not in self._runs:
            return
        self._runs[run][step] = values
        self._num_bytes += _num_bytes(values.values())
        while self._num_bytes > self._most_bytes and self._borders[run]:
            oldest = next(iter(self._runs))
            if oldest != run:
                self.drop(oldest)
            else:
                self._thin(run)

    def drop(self, run: Hashable) -> None:
        """Forgets a run."""
        for values in self._runs.pop(run, {}).values():
            self._num_bytes -= _num_bytes(values.values())
        self._borders.pop(run, None)

    def _thin(self, run: Hashable) -> None:
        self._borders[run] = self._borders[run][1::2]
        names = self.names(run)
        for values in self._runs[run].values():
            for name in set(values) - names:
                self._num_bytes -= _num_bytes([values.pop(name)])


class KeptStepStates(StepStates):
    """The states that one runner's steps take, or leave."""

    def __init__(self, kept: KeptStates, taken: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> None:
        """`taken`: inputs of the graph, `left`: outputs."""
        self._kept, self._taken, self.left = kept, taken, left
        self._source: Hashable = None
        self._targets: tuple[Hashable, ...] = ()
        self._digest = b""

    def begin(self, source: Hashable = None, targets: Iterable[Hashable] = ()) -> None:
        """Another run begins, with nothing resident: it takes the states of the run `source`, and leaves its own in
        those of `targets`."""
        self._source, self._targets, self._digest = source, tuple(targets), b""

    @override
    def bind(self, binding: Any, step: Step) -> None:
        """Binds what a step takes and leaves. Raises `MissingStatesError`."""
        self._digest = hashlib.blake2b(self._digest + _content(step), digest_size=16).digest()
        if self._taken:
            values = self._kept.get(self._source, self._digest)
            for name in self._taken:
                binding.bind_ortvalue_input(name, values[name])
        for name in self.left:
            binding.bind_output(name)

    @override
    def collect(self, outputs: Sequence[Any]) -> None:
        """Keeps what the step has left."""
        values = dict(zip(self.left, outputs, strict=True))
        for run in self._targets:
            names = self._kept.names(run)
            self._kept.put(run, self._digest, {name: value for name, value in values.items() if name in names})


def _content(step: Step) -> bytes:
    """All that decides what a step computes, besides what is resident."""
    rows = [
        (
            *row[:3],
            None if row.cells_P is None else row.cells_P.tobytes(),
            [(run.item.key, run.start, run.stop) for run in row.media],
        )
        for row in step.rows
    ]
    moves = [(move.source_N.tobytes(), move.target) for move in step.moves]
    read = [row[:2] for row in step.logits_rows]
    return repr((rows, step.copies, moves, step.first_cell, step.width, step.whole_length, read)).encode()


def _num_bytes(values: Iterable[Any]) -> int:
    return sum(value.tensor_size_in_bytes() for value in values)
