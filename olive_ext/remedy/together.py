"""Weights that can be mended together alone: all of a node's experts, and a head with the table that it is tied to.

Knows weights of two graphs; no choice and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from olive_ext.graph.nodes import reads
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.sources import Sources
from olive_ext.remedy.weights import GraphWeights, WeightUse

_ROWS = 1 << 12
"""Rows of a table that are compared at a time."""


@dataclass(frozen=True)
class Graphs:
    """The weights of one graph of a package, of the float model and of the quantized one."""

    floats: GraphWeights
    quantized: GraphWeights
    sources: Sources

    def error(self, target: Target) -> float:
        """Of all numbers of a target: root mean square of the difference over that of the float ones."""
        lost = whole = 0.0
        for own, use in zip(target.floats, target.quantized, strict=True):
            numbers = np.asarray(self.floats.matrix(own), np.float32)
            lost += float(np.linalg.norm(numbers - use.as_in(own, self.quantized.matrix(use)))) ** 2
            whole += float(np.linalg.norm(numbers)) ** 2
        return float(np.sqrt(lost / whole)) if whole else 0.0


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


def with_tables(targets: Sequence[Target], graphs: Mapping[str, Graphs]) -> dict[Target, Target]:
    """Quantized products, each with the table of the same weight; `graphs` by part of the package."""
    pairs = {target: _with_table(target, graphs[target.part]) for target in targets}
    return {target: pair for target, pair in pairs.items() if pair is not None}


def _with_table(target: Target, graphs: Graphs) -> Target | None:
    """A quantized product with the table of the same weight, which is float in the quantized graph and read by one
    lookup alone; None where there is none. They are one weight where the float graph's are equal."""
    own, use = target.floats[0], target.quantized[0]
    if len(target.floats) > 1 or len(target.quantized) > 1 or use.node.op_type != "MatMulNBits":
        return None
    read = list(reads(graphs.quantized.model.graph.node))
    for name, lookup in graphs.quantized.uses.items():
        table = graphs.floats.uses.get(name)
        if lookup.node.op_type != "Gather" or table is None or table.node.op_type != "Gather":
            continue
        if all(read.count(root) == 1 for root in lookup.roots) and _is_one(table, own, graphs.sources):
            return replace(
                target,
                name=f"{target.name} and its table",
                floats=(own, table),
                quantized=(use, lookup),
                float_bytes=sum({one.roots: graphs.floats.num_bytes(one) for one in (own, table)}.values()),
                bytes=target.bytes + graphs.quantized.num_bytes(lookup),
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
