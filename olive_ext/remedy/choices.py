"""What each weight of a quantized model may be stored as, with bytes and loss, and the choice among them.

Loss is KL(float || float with this weight so) in nats a position. That of the quantized weight is measured; that of a
finer one is estimated by the square of the weight's error, of which a small loss is a quadratic form, until measured.
Knows no session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from onnx import TensorProto, helper

from olive_ext.graph.nodes import attribute
from olive_ext.remedy import knapsack
from olive_ext.remedy.mended_graph import alternative
from olive_ext.remedy.pairing import Target, relative_error
from olive_ext.remedy.precision import FLOAT, Precision
from olive_ext.remedy.sources import Sources
from olive_ext.remedy.weights import GraphWeights, Matrix, WeightUse

CANDIDATES = (Precision(4, 64), Precision(4, 32), Precision(8, 128), Precision(8, 32), FLOAT)
"""What ONNX Runtime has kernels for on CPU, CUDA and WebGPU (MatMulNBits of 4 and 8 bits), coarse to fine."""

Answer: TypeAlias = tuple[int, ...]
"""The number of the choice of each weight."""

_BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8}

WHOLE = 1 << 30
"""Block size of a weight with one scale a channel, or one alone."""


@dataclass(frozen=True)
class Choice:
    """One way in which a weight may be stored."""

    precision: Precision | None
    """None as it is in the quantized model."""

    bytes: int
    kl: float
    is_measured: bool

    @property
    def name(self) -> str:
        """The precision in words."""
        return "as it is" if self.precision is None else self.precision.name


class Menu:
    """The choices of all weights of a model, the first of each being the weight as it is."""

    def __init__(self, choices: Mapping[Target, Sequence[Choice]], kernels: float = 0.0) -> None:
        """`kernels`: what the quantized model loses beside its weights, by rounded activations and other kernels. Each
        weight that stays quantized is charged its share, by its size."""
        self.targets = tuple(choices)
        self._choices = [list(choices[target]) for target in self.targets]
        whole = sum(target.float_bytes for target in self.targets) or 1
        self._shares = [max(0.0, kernels) * target.float_bytes / whole for target in self.targets]

    @classmethod
    def of(
        cls,
        losses: Mapping[Target, float],
        sources: Sources,
        floats: GraphWeights,
        quantized: GraphWeights,
        kernels: float = 0.0,
    ) -> Menu:
        """For weights whose losses were measured as they are."""
        choices = {target: list(_choices(target, kl, sources, floats, quantized)) for target, kl in losses.items()}
        return cls(choices, kernels)

    def of_target(self, number: int) -> Sequence[Choice]:
        """The choices of one weight."""
        return self._choices[number]

    def learn(self, number: int, choice: int, kl: float) -> None:
        """Puts a measured loss in the place of an estimated one."""
        self._choices[number][choice] = replace(self._choices[number][choice], kl=max(0.0, kl), is_measured=True)

    @property
    def unchanged(self) -> Answer:
        """Every weight as it is."""
        return (0,) * len(self.targets)

    def smallest(self, most_kl: float) -> Answer:
        """The choice of each weight with the fewest bytes whose losses sum up to at most `most_kl`; the least loss
        where none has so little."""
        return knapsack.cheapest(self._bytes, self._kl, most_kl) or self.finest

    def best(self, most_bytes: float) -> Answer:
        """That with the least loss in at most so many bytes; every weight as it is where nothing fits."""
        return knapsack.cheapest(self._kl, self._bytes, most_bytes) or self.unchanged

    def front(self, num_points: int) -> list[Answer]:
        """Choices that nothing beats in both bytes and loss, small to large."""
        return knapsack.front(self._kl, self._bytes, num_points)

    def uniform(self, precision: Precision | None) -> Answer:
        """All weights in one precision, as they are where they cannot have it."""
        return tuple(
            next((n for n, one in enumerate(choices) if one.precision == precision), 0) for choices in self._choices
        )

    @property
    def finest(self) -> Answer:
        """The choice of each weight with the least loss."""
        return tuple(int(np.argmin(losses)) for losses in self._kl)

    def kl(self, answer: Sequence[int]) -> float:
        """The sum of the losses, with what is charged for kernels."""
        return knapsack.total(self._kl, answer)

    def num_bytes(self, answer: Sequence[int]) -> int:
        """Of all weights together."""
        return int(knapsack.total(self._bytes, answer))

    def precisions(self, answer: Sequence[int]) -> dict[Target, Precision | None]:
        """By weight, None for one that stays."""
        return {
            target: choices[choice].precision
            for target, choices, choice in zip(self.targets, self._choices, answer, strict=True)
        }

    @property
    def _kl(self) -> list[list[float]]:
        return [
            [one.kl + (0.0 if one.precision == FLOAT else share) for one in choices]
            for choices, share in zip(self._choices, self._shares, strict=True)
        ]

    @property
    def _bytes(self) -> list[list[float]]:
        return [[float(one.bytes) for one in choices] for choices in self._choices]


def _choices(
    target: Target, kl: float, sources: Sources, floats: GraphWeights, quantized: GraphWeights
) -> Iterable[Choice]:
    """The weight as it is, then what is finer and larger."""
    kl = max(0.0, kl)
    yield Choice(None, target.bytes, kl, is_measured=True)
    own, use = target.floats[0], target.quantized[0]
    bits, block_size = form_of(use, sources)
    offered = [precision for precision in CANDIDATES if sources.offers(target, precision)]
    if not bits or not offered:
        return
    numbers = floats.matrix(own)
    error = relative_error(numbers, use.as_in(own, quantized.matrix(use)))
    for precision in offered:
        is_finer = not precision.bits or (precision.bits, -precision.block_size) > (bits, -block_size)
        if not is_finer or precision.block_size > _width(own, numbers):
            continue
        if precision == FLOAT:
            yield Choice(FLOAT, _float_bytes(target, sources), 0.0, is_measured=True)
            continue
        other, weights = alternative(target, precision, sources)
        finer = other.quantized[0]
        share = relative_error(numbers, finer.as_in(own, weights.matrix(finer))) / error if error else 0.0
        yield Choice(precision, other.bytes, kl * share**2, is_measured=False)


def form_of(use: WeightUse, sources: Sources) -> tuple[int, int]:
    """Bits and block size of a quantized weight; no bits for one in floating point."""
    if use.is_packed:
        return int(attribute(use.node, "bits", 4)), int(attribute(use.node, "block_size", WHOLE))
    for node in sources.quantized.makers(use.value):
        stored = sources.quantized.initializers.get(node.input[0])
        if node.op_type == "DequantizeLinear" and stored is not None:
            return _BITS.get(stored.data_type, 0), int(attribute(node, "block_size", 0)) or WHOLE
    return 0, 0


def _float_bytes(target: Target, sources: Sources) -> int:
    """Of the float graph's initializers in the quantized graph's type; none of one that is in that graph already."""
    size, data_type = 0, sources.element_type(target.quantized[0])
    old = {name for use in target.quantized for name in use.roots}
    for name in {name for own in target.floats for name in own.roots}:
        tensor, here = sources.floats.initializers[name], sources.quantized.initializers.get(name)
        if here is None or name in old or (list(here.dims), here.data_type) != (list(tensor.dims), data_type):
            itemsize = helper.tensor_dtype_to_np_dtype(data_type).itemsize
            size += int(np.prod(tensor.dims, dtype=np.int64)) * itemsize
    return size


def _width(own: WeightUse, numbers: Matrix) -> int:
    """The length of what is cut into blocks."""
    is_turned = own.node.op_type == "Gather" or own.is_transposed
    return int(numbers.shape[1 if is_turned else 0])
