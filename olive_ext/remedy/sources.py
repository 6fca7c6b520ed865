"""The constants of a float graph and of the quantized one made of it, and what a weight's nodes may become.

Knows two graphs; changes neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from olive_ext.graph.onnx_file import external_locations, relocate
from olive_ext.model.files.content import external_data_plan, load_graph
from olive_ext.remedy.constants import Array, Constants
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.precision import Precision
from olive_ext.remedy.weights import GraphWeights, WeightUse

DATA = {"MatMul": 0, "Gemm": 0, "MatMulNBits": 0, "Gather": 1, "GatherBlockQuantized": 1}
"""By operator the input that is not the weight."""

BIAS = {"Gemm": 2, "MatMulNBits": 5}

TABLES = ("Gather", "GatherBlockQuantized")

_EXPERTS = (2, 5, 8)
"""The inputs of QMoE that are numbers of weights."""

_ROUTER_WEIGHTS = 14
"""The input of QMoE that MoE does not have."""


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
        return self.quantized.element_type(use.node.input[use.inputs[1]] if use.is_packed else use.value)

    def is_symmetric(self, use: WeightUse) -> bool:
        """Whether a quantized weight is stored without zero points."""
        if use.is_packed:
            return not _input(use.node, use.inputs[2])
        makers = self.quantized.makers(use.value)
        return not any(_input(node, 2) for node in makers if node.op_type == "DequantizeLinear")

    def weight(self, own: WeightUse) -> Callable[[], Array] | None:
        """What gives a float weight as [K, N], of a table [V, H] as [H, V], of experts [E, N, K]; None where its nodes
        do more to it than to transpose it."""
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
        if target.is_of_experts:
            return self._offers_experts(target, precision)
        if any(use.node.op_type not in DATA for pair in pairs for use in pair):
            return False
        if not precision.bits:
            return not any(bias_of(own.node) and not bias_of(use.node) for own, use in pairs)
        if any(self.weight(own) is None or "Gemm" in (own.node.op_type, use.node.op_type) for own, use in pairs):
            return False
        widths = [self.floats.view(own.value) for own in target.floats if own.node.op_type in TABLES]
        return not any(width is None or width.shape[1] % precision.block_size for width in widths)

    def _offers_experts(self, target: Target, precision: Precision) -> bool:
        """Whether a QMoE can be given this precision: all of its weights at once, in blocks that divide their rows."""
        own, node = target.floats[0].node, target.quantized[0].node
        if (own.op_type, node.op_type) != ("MoE", "QMoE") or len({use.node.name for use in target.quantized}) > 1:
            return False
        if {use.value for use in target.quantized} != {name for n in _EXPERTS if (name := _input(node, n))}:
            return False
        if not precision.bits:
            return not _input(node, _ROUTER_WEIGHTS)
        weights = [self.floats.view(use.value) for use in target.floats]
        return not any(weight is None or weight.shape[2] % precision.block_size for weight in weights)


def bias_of(node: onnx.NodeProto) -> str:
    """The input of a node that is added to its product; empty where it has none."""
    return _input(node, BIAS.get(node.op_type, -1))


def _input(node: onnx.NodeProto, number: int) -> str:
    return str(node.input[number]) if 0 <= number < len(node.input) else ""


def weights_in(file: Path) -> GraphWeights:
    """The weights of the graph in a file, also where links lead to it."""
    graph = load_graph(file)
    folder, renames = external_data_plan(file, external_locations(graph))  # onnx reads no weights through links
    return GraphWeights(relocate(graph, renames), folder)
