"""The weights of a float graph and of the quantized one made of it: what a weight's nodes may become, and which weights
can be mended together alone (all of a node's experts, a head with the table that it is tied to).

Knows two graphs; changes neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from olive_ext.graph.nodes import reads
from olive_ext.model.files.constants import Array
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.diagnose.remedy.pairing import Target
from olive_ext.plugins.diagnose.remedy.precision import Precision
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, WeightUse

DATA = {"MatMul": 0, "Gemm": 0, "MatMulNBits": 0, "Gather": 1, "GatherBlockQuantized": 1}
"""By operator the input that is not the weight."""

BIAS = {"Gemm": 2, "MatMulNBits": 5}

TABLES = ("Gather", "GatherBlockQuantized")

_EXPERTS = (2, 5, 8)
"""The inputs of QMoE that are numbers of weights."""

_ROUTER_WEIGHTS = 14
"""The input of QMoE that MoE does not have."""

_ROWS = 1 << 12
"""Rows of a table that are compared at a time."""


@dataclass(frozen=True)
class Sources:
    """The weights of one graph of a package, of the float model's and of the quantized one's."""

    floats: GraphWeights
    quantized: GraphWeights

    @classmethod
    def of(cls, reference: Path, model: Path) -> Sources:
        """The sources of the graphs in two files."""
        return cls(*(GraphWeights(load_graph(file), file) for file in (reference, model)))

    def error(self, target: Target) -> float:
        """The error of a target's numbers: root mean square of the difference over that of the float ones."""
        lost = whole = 0.0
        for own, use in zip(target.floats, target.quantized, strict=True):
            numbers = np.asarray(self.floats.matrix(own), np.float32)
            lost += float(np.linalg.norm(numbers - use.as_in(own, self.quantized.matrix(use)))) ** 2
            whole += float(np.linalg.norm(numbers)) ** 2
        return float(np.sqrt(lost / whole)) if whole else 0.0

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
        """A function that reads a float weight as [K, N], a table [V, H] as [H, V], experts as [E, N, K]; None where
        its nodes do more than to transpose it."""
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
        if target.is_joined or target.is_constant:
            return target.is_constant and not precision.bits
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


def whole_experts(targets: Sequence[Target]) -> list[Target]:
    """The targets, the experts of one node as one: their number of bits is the node's."""
    groups: dict[tuple[str, ...], list[Target]] = {}
    for target in targets:
        node = target.quantized[0].node
        key = (target.part, *node.output) if target.is_of_experts and not target.is_joined else (target.name, "")
        groups.setdefault(key, []).append(target)
    return [_whole(group) if group[0].is_of_experts else group[0] for group in groups.values()]


def _whole(parts: Sequence[Target]) -> Target:
    first = parts[0]
    return replace(
        first,
        name=first.name.removesuffix(first.what).removesuffix(f"/{first.floats[0].part}") + first.what,
        floats=tuple(own for part in parts for own in part.floats),
        quantized=tuple(use for part in parts for use in part.quantized),
        float_bytes=sum(part.float_bytes for part in parts),
        bytes=sum(part.bytes for part in parts),
    )


def with_tables(targets: Sequence[Target], sources: Mapping[str, Sources]) -> dict[Target, Target]:
    """Quantized products, each with the table of the same weight; `sources` by part of the package."""
    pairs = {target: _with_table(target, sources[target.part]) for target in targets}
    return {target: pair for target, pair in pairs.items() if pair is not None}


def _with_table(target: Target, sources: Sources) -> Target | None:
    """A quantized product with the table of the same weight, which is float in the quantized graph and read by one
    lookup alone; None where there is none. They are one weight where the float graph's are equal."""
    own, use = target.floats[0], target.quantized[0]
    if len(target.floats) > 1 or len(target.quantized) > 1 or use.node.op_type != "MatMulNBits":
        return None
    read = list(reads(sources.quantized.model.graph.node))
    for name, lookup in sources.quantized.uses.items():
        table = sources.floats.uses.get(name)
        if lookup.node.op_type != "Gather" or table is None or table.node.op_type != "Gather":
            continue
        if all(read.count(root) == 1 for root in lookup.roots) and _is_one(table, own, sources):
            return replace(
                target,
                name=f"{target.name} and its table",
                floats=(own, table),
                quantized=(use, lookup),
                float_bytes=sum({one.roots: sources.floats.num_bytes(one) for one in (own, table)}.values()),
                bytes=target.bytes + sources.quantized.num_bytes(lookup),
            )
    return None


def _is_one(table: WeightUse, head: WeightUse, sources: Sources) -> bool:
    """Whether a float table [V, H] has the numbers of a float product [H, V]."""
    views = sources.weight(table), sources.weight(head)
    if views[0] is None or views[1] is None or views[0]().shape != views[1]().shape:
        return False
    first, second = views[0](), views[1]()
    return all(
        np.array_equal(first[:, n : n + _ROWS], second[:, n : n + _ROWS]) for n in range(0, first.shape[1], _ROWS)
    )
