"""The constants of a float graph and of the quantized one made of it, and what a weight's nodes may become.

Knows two graphs; changes neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from olive_ext.model.files.content import load_graph
from olive_ext.remedy.constants import Array, Constants
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.precision import Precision
from olive_ext.remedy.weights import WeightUse

DATA = {"MatMul": 0, "Gemm": 0, "MatMulNBits": 0, "Gather": 1, "GatherBlockQuantized": 1}
"""By operator the input that is not the weight."""

BIAS = {"Gemm": 2, "MatMulNBits": 5}

_ZEROS = {"MatMulNBits": 3, "GatherBlockQuantized": 3, "DequantizeLinear": 2}
"""By operator the input that is zero points."""

TABLES = ("Gather", "GatherBlockQuantized")


@dataclass(frozen=True)
class Sources:
    """The constants of the float graph and of the quantized one."""

    floats: Constants
    quantized: Constants

    @classmethod
    def of(cls, reference: Path, model: Path) -> Sources:
        """Of the graphs in two files."""
        return cls(Constants(load_graph(reference), reference), Constants(load_graph(model), model))

    def element_type(self, use: WeightUse) -> int:
        """ONNX's type of the floating-point numbers that a node of the quantized graph computes with."""
        return self.quantized.element_type(use.node.input[2] if use.is_packed else use.value)

    def is_symmetric(self, use: WeightUse) -> bool:
        """Whether a quantized weight is stored without zero points."""
        makers = [use.node] if use.is_packed else self.quantized.makers(use.value)
        return not any(_input(node, _ZEROS.get(node.op_type, -1)) for node in makers)

    def weight(self, own: WeightUse) -> Callable[[], Array] | None:
        """What gives a float weight as [K, N], of a table [V, H] as [H, V]; None where its nodes do more to it than to
        transpose it."""
        if self.floats.view(own.value) is None:
            return None
        is_turned = own.node.op_type in TABLES or own.is_transposed

        def read() -> Array:
            matrix = self.floats.view(own.value)
            assert matrix is not None
            return matrix.T if is_turned else matrix

        return read

    def offers(self, target: Target, precision: Precision) -> bool:
        """Whether all nodes of a weight can be given this precision."""
        if target.is_joined:
            return False
        pairs = list(zip(target.floats, target.quantized, strict=True))
        if any(use.node.op_type not in DATA for pair in pairs for use in pair):  # experts
            return False
        if not precision.bits:
            return not any(bias_of(own.node) and not bias_of(use.node) for own, use in pairs)
        if any(self.weight(own) is None or "Gemm" in (own.node.op_type, use.node.op_type) for own, use in pairs):
            return False
        widths = [self.floats.view(own.value) for own in target.floats if own.node.op_type in TABLES]
        return not any(width is None or width.shape[1] % precision.block_size for width in widths) and not (
            widths and precision.bits != 8
        )


def bias_of(node: onnx.NodeProto) -> str:
    """The input of a node that is added to its product; empty where it has none."""
    return _input(node, BIAS.get(node.op_type, -1))


def _input(node: onnx.NodeProto, number: int) -> str:
    return str(node.input[number]) if 0 <= number < len(node.input) else ""
