"""How each weight of a quantized model may be stored, with bytes and loss, and the choice among these.

Loss is KL(float || float with this weight so) in nats a position. That of the quantized weight is measured. That of a
finer one is estimated by the square of the weight's error, of which a small loss is a quadratic form, until it is
measured. Knows no session.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper
from scipy import optimize, sparse

from olive_ext.graph.nodes import attribute
from olive_ext.plugins.diagnose.remedy.mended_package import alternative, mended_alone
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target
from olive_ext.plugins.diagnose.remedy.weights import FLOAT, Precision, WeightUse

CANDIDATES = (Precision(4, 64), Precision(4, 32), Precision(8, 128), Precision(8, 32), FLOAT)
"""What ONNX Runtime has kernels for on CPU, CUDA and WebGPU (MatMulNBits of 4 and 8 bits), coarse to fine."""

Selection: TypeAlias = tuple[int, ...]
"""The number of the choice of each weight."""

_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8}

UNCUT = 1 << 30
"""Block size of a weight with one scale for each channel, or for all of it."""


@dataclass(frozen=True)
class Choice:
    """One way in which a weight may be stored."""

    precision: Precision | None
    """None: as it is in the quantized model."""

    bytes: int
    kl: float
    is_measured: bool
    together: Target | None = None
    """The weight with the table that it is tied to, where both are stored in this way, as one."""

    @property
    def name(self) -> str:
        """The precision in words."""
        words = "as it is" if self.precision is None else self.precision.name
        return f"{words}, one with the table" if self.together is not None else words


class WeightChoices:
    """The choices of all weights of a model, the first of each being the weight as it is."""

    def __init__(
        self, choices: Mapping[Target, Sequence[Choice]], kernels: float = 0.0, damaged: Collection[str] = ()
    ) -> None:
        """`kernels`: what the quantized model loses beside its weights, by rounded activations and other kernels. Each
        weight that stays quantized is charged its share, by its size. `damaged`: names of those that are never left as
        they are, if they have another choice."""
        self.targets = tuple(choices)
        self.choices = [list(choices[target]) for target in self.targets]
        self._damaged = damaged
        whole = sum(target.float_bytes for target in self.targets) or 1
        self._shares = [max(0.0, kernels) * target.float_bytes / whole for target in self.targets]

    def learn(self, number: int, choice: int, kl: float) -> None:
        """Puts a measured loss in the place of an estimated one."""
        self.choices[number][choice] = replace(self.choices[number][choice], kl=max(0.0, kl), is_measured=True)

    @property
    def unchanged(self) -> Selection:
        """Every weight as it is."""
        return (0,) * len(self.targets)

    def cured(self, selection: Selection) -> Selection:
        """The selection with what is damaged in the smallest other form."""
        cured = list(selection)
        for number, offered in enumerate(self.choices):
            if self.targets[number].name in self._damaged and len(offered) > 1 and not selection[number]:
                cured[number] = 1 + int(np.argmin([one.bytes for one in offered[1:]]))
        return tuple(cured)

    def smallest(self, most_kl: float) -> Selection:
        """The choice of each weight with the fewest bytes whose losses sum up to at most `most_kl`; the least loss
        where none has so little."""
        return self.cured(cheapest(self.sizes, self.losses, most_kl) or self.finest)

    def best(self, most_bytes: float) -> Selection:
        """The selection with the least loss in at most so many bytes; every weight as it is where nothing fits."""
        return self.cured(cheapest(self.losses, self.sizes, most_bytes) or self.unchanged)

    @property
    def finest(self) -> Selection:
        """The choice of each weight with the least loss."""
        return tuple(int(np.argmin(losses)) for losses in self.losses)

    def kl(self, selection: Sequence[int]) -> float:
        """The sum of the losses, with what is charged for kernels."""
        return total(self.losses, selection)

    def num_bytes(self, selection: Sequence[int]) -> int:
        """The bytes of all weights together."""
        return int(total(self.sizes, selection))

    @property
    def least(self) -> Selection:
        """The choice of each weight with the fewest bytes."""
        return tuple(int(np.argmin(sizes)) for sizes in self.sizes)

    def precisions(self, selection: Sequence[int]) -> dict[Target, Precision | None]:
        """By weight, or by weight with its table, None for one that stays."""
        return {
            choices[choice].together or target: choices[choice].precision
            for target, choices, choice in zip(self.targets, self.choices, selection, strict=True)
        }

    @property
    def losses(self) -> list[list[float]]:
        """By weight and choice, with what is charged for kernels."""
        return [
            [choice.kl + (0.0 if choice.precision == FLOAT else share) for choice in choices]
            for choices, share in zip(self.choices, self._shares, strict=True)
        ]

    @property
    def sizes(self) -> list[list[float]]:
        """Bytes by weight and choice."""
        return [[float(choice.bytes) for choice in choices] for choices in self.choices]


def choices_of(
    target: Target, kl: float, together: Target | None, sources: Sources, is_damaged: bool = False
) -> Iterator[Choice]:
    """The weight as it is, then what is finer and larger; of one that is tied to a table (`together`) with the bytes
    of both, and with what is as fine for both in one."""
    kl = max(0.0, kl)
    beside = together.bytes - target.bytes if together is not None else 0
    yield Choice(None, target.bytes + beside, kl, is_measured=True)
    if target.is_constant:
        yield Choice(FLOAT, target.bytes, 0.0, is_measured=True)
        return
    bits, block_size = form_of(target.quantized[0], sources)
    offered = [precision for precision in CANDIDATES if bits and sources.offers(target, precision)]
    if not offered:
        return
    error, width = sources.error(target), UNCUT
    for own in target.floats:  # the shortest axis that is cut into blocks
        numbers = sources.floats.view(own.value)
        is_last = own.part or own.node.op_type == "Gather" or own.is_transposed
        width = min(width, UNCUT if numbers is None else int(numbers.shape[-1 if is_last else 0]))
    for precision in offered:
        form, own_form = (precision.bits, -precision.block_size), (bits, -block_size)
        if precision.block_size > width:
            continue
        if together is not None and sources.offers(together, precision):
            is_one = together.floats[0].roots == together.floats[1].roots
            if precision == FLOAT and is_one:
                yield Choice(FLOAT, _float_bytes(together, sources), 0.0, is_measured=True, together=together)
            elif precision != FLOAT and form >= own_form:
                size = mended_alone(together, precision, sources).new_bytes
                yield Choice(precision, size, kl, is_measured=False, together=together)
        if precision == FLOAT:
            yield Choice(FLOAT, _float_bytes(target, sources) + beside, 0.0, is_measured=True)
        elif form > own_form or (form == own_form and is_damaged):
            other, weights = alternative(target, precision, sources)
            share = replace(sources, quantized=weights).error(other) / error if 0 < error < np.inf else 0.0
            yield Choice(precision, other.bytes + beside, kl * share**2, is_measured=False)


def form_of(use: WeightUse, sources: Sources) -> tuple[int, int]:
    """Bits and block size of a quantized weight; no bits for one in floating point."""
    if use.is_packed:
        bits = attribute(use.node, "expert_weight_bits" if use.part else "bits", 4)
        return int(bits), int(attribute(use.node, "block_size", 0)) or UNCUT
    for node in sources.quantized.makers(use.value):
        stored = sources.quantized.initializers.get(node.input[0])
        if node.op_type == "DequantizeLinear" and stored is not None:
            return _BITS.get(stored.data_type, 0), int(attribute(node, "block_size", 0)) or UNCUT
    return 0, 0


def _float_bytes(target: Target, sources: Sources) -> int:
    """The bytes of the float graph's initializers in the quantized graph's type; 0 for one that this graph has."""
    size, data_type = 0, sources.element_type(target.quantized[0])
    old = {name for use in target.quantized for name in use.roots}
    for name in {name for own in target.floats for name in own.roots}:
        tensor, here = sources.floats.initializers[name], sources.quantized.initializers.get(name)
        if here is None or name in old or (list(here.dims), here.data_type) != (list(tensor.dims), data_type):
            itemsize = helper.tensor_dtype_to_np_dtype(data_type).itemsize
            size += int(np.prod(tensor.dims, dtype=np.int64)) * itemsize
    return size


Table: TypeAlias = Sequence[Sequence[float]]
"""By item and option."""

SLACK = 1e-5
"""The share of the limit that is left free where a selection breaks it: HiGHS tolerates 1e-6."""

SMALLEST = 1e-8
"""The share of the limit, or of the largest cost, below which a number counts as zero, as HiGHS drops it."""

STDOUT = 1

SECONDS = 60.0
"""Seconds after which the best selection so far is taken; 800 options took 0.1 s."""


def cheapest(costs: Table, burdens: Table, limit: float) -> tuple[int, ...] | None:
    """The option of each item with the smallest sum of costs whose burdens sum up to at most `limit`; None where there
    is none. No number is negative."""
    sizes = [len(options) for options in costs]
    cost, burden = _flat(costs, max(map(max, costs))), _flat(burdens, limit)
    if sum(min(options) for options in burdens) > limit:
        return None
    each = sparse.block_diag([np.ones((1, size)) for size in sizes], format="csr")
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    for slack in (0.0, SLACK):
        with _silent():
            result = optimize.milp(
                cost,
                integrality=np.ones(len(cost)),
                bounds=optimize.Bounds(0, 1),
                constraints=[
                    optimize.LinearConstraint(each, 1, 1),
                    optimize.LinearConstraint(burden[None, :], -np.inf, (1 - slack) if limit else 0.0),
                ],
                options={"mip_rel_gap": 0, "time_limit": SECONDS, "presolve": False},
            )
        if result.x is None:
            break
        parts = (result.x[start : start + size] for start, size in zip(starts, sizes, strict=True))
        selection = tuple(int(np.argmax(part)) for part in parts)
        if total(burdens, selection) <= limit:
            return selection
    return tuple(int(np.argmin(options)) for options in burdens)  # nothing else fits within the solver's tolerance


def front(costs: Table, burdens: Table, num_points: int) -> list[tuple[int, ...]]:
    """Answers for `num_points` limits, evenly spaced from the least burden to the one of the cheapest options, without
    those that another one beats in both sums."""
    least = sum(min(options) for options in burdens)
    most = sum(burden[int(np.argmin(cost))] for cost, burden in zip(costs, burdens, strict=True))
    every = {cheapest(costs, burdens, limit) for limit in np.linspace(least, max(least, most), num_points).tolist()}
    points = sorted((total(burdens, one), total(costs, one), one) for one in every if one is not None)
    kept: list[tuple[int, ...]] = []
    best = np.inf
    for _, cost, selection in points:
        if cost < best:
            kept.append(selection)
            best = cost
    return kept


def total(table: Table, selection: Sequence[int]) -> float:
    """The sum over all items of the option that a selection takes."""
    return float(sum(options[choice] for options, choice in zip(table, selection, strict=True)))


@contextmanager
def _silent() -> Iterator[None]:
    """Within it, stdout leads nowhere: HiGHS prints a line of its own, past Python, where it repairs a selection."""
    library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)
    sys.stdout.flush()
    library.fflush(None)
    stdout, nowhere = os.dup(STDOUT), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    try:
        yield
    finally:
        library.fflush(None)
        os.dup2(stdout, STDOUT)
        os.close(stdout)
        os.close(nowhere)


def _flat(table: Table, unit: float) -> npt.NDArray[np.float64]:
    numbers = np.array([value for options in table for value in options], np.float64) / (unit or 1.0)
    return np.where(numbers < SMALLEST, 0.0, numbers)
