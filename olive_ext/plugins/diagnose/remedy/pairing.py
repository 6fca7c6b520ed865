"""Pairs the weights of a quantized graph with those of the float graph that it was made of.

Pairs are found by the names of the nodes, and checked by shapes and values. What has no counterpart is named, never
guessed. Also what a weight's nodes may become, and which weights can only be mended together (all of a node's experts,
a head with the table that it is tied to).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx

from olive_ext.errors import ModelError, counted
from olive_ext.graph.nodes import LAYER, layer_of, reads
from olive_ext.model.files.constants import JOINED, apart, broken, meant_others, outliers, pairs_of, plain_name
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.grids import Array, distance
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix, Precision, WeightUse

STRANGE = 0.9
"""From this relative error on, a weight is not a rounding of the other: random matrices have 1.4, and rounding to two
bits 0.4 to 0.6 on the quickstart's model."""


SMALLEST = 1e-30
"""The least relative error of numbers that are not equal."""


@dataclass(frozen=True, eq=False)
class Target:
    """A weight that both graphs have, stored otherwise in each."""

    name: str
    """The float graph's node, or the first one where several use the weight; of parts and their whole the whole's."""

    floats: tuple[WeightUse, ...]
    quantized: tuple[WeightUse, ...]
    float_bytes: int
    bytes: int
    part: str = ""
    """The encoder or the embedding graph that has it; empty for the decoder."""

    @property
    def is_joined(self) -> bool:
        """Whether one graph has as one weight what the other has in parts; otherwise its nodes are pairs."""
        return len(self.floats) != len(self.quantized)

    @property
    def is_constant(self) -> bool:
        """Whether it is a constant that both graphs should have alike: the float graph's mends it."""
        return self.floats[0].constant is not None

    @property
    def is_of_experts(self) -> bool:
        """Whether these are weights of experts: one of a node's, or all."""
        return bool(self.quantized[0].part)

    def numbers(self, floats: GraphWeights, quantized: GraphWeights) -> dict[str, Matrix]:
        """The quantized numbers by the names of the float graph's values, in its layout and element types."""
        arrays = {}
        whole = _joined(_columns(self.quantized, quantized)) if self.is_joined else None
        first = 0
        for number, own in enumerate(self.floats):
            as_float = floats.matrix(own)
            if whole is None:
                matrix = self.quantized[number].as_in(own, quantized.matrix(self.quantized[number]))
            else:
                num_outputs = as_float.shape[0 if own.is_transposed else 1]
                matrix, first = whole[:, first : first + num_outputs], first + num_outputs
                matrix = matrix.T if own.is_transposed else matrix
            arrays[own.value] = np.asarray(matrix.astype(as_float.dtype), order="C")
        return arrays

    @property
    def what(self) -> str:
        """A suffix for the names of groups of such targets."""
        return f", {self.part}" if self.part else ""

    @property
    def layer(self) -> int | None:
        """The decoder layer's number; None outside of the decoder's layers."""
        return None if self.part else layer_of(self.name)

    @property
    def kind(self) -> str:
        """The weight's name within its layer, e.g. "mlp/down_proj"."""
        return f"{kind_of(self.name.removesuffix(self.what))}{self.what}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The quantized graph's nodes."""
        return tuple(use.node.name for use in self.quantized)

    @property
    def values(self) -> tuple[str, ...]:
        """The float graph's constants that are replaced."""
        return tuple(own.value for own in self.floats)


def kind_of(name: str) -> str:
    """A node's name within its layer."""
    match = LAYER.search(name)
    words = re.split(r"[/.]", name[match.end() :] if match else name)
    return "/".join(word for word in words if word not in ("", "model", "MatMul", "Gather", "Gemm", "MoE"))


@dataclass
class Pairing:
    """The weights that differ in how they are stored, and what could not be paired."""

    targets: list[Target] = field(default_factory=list)
    unpaired: dict[str, str] = field(default_factory=dict)
    """Names of nodes of the quantized graph, or of the float graph, and why each has no counterpart."""

    damaged: dict[str, str] = field(default_factory=dict)
    """Constants, and weights, that are farther from the float graph's than any rounding, and how."""

    shares: dict[str, float] = field(default_factory=dict)
    """The share of each weight's numbers beyond rounding (`Distance`)."""


Couple: TypeAlias = tuple[list[WeightUse], list[WeightUse]]
"""Uses in the float graph and in the quantized one that are the same weight."""


def pair(floats: GraphWeights, quantized: GraphWeights, part: str = "") -> Pairing:
    """All targets of one graph, in the order of the quantized graph's nodes: first the constants that should be equal
    and are not. `part` is the graph's part of the package, which follows the names of all that is in it.

    A weight whose values are others is damaged where most are not: it is a target. Where most of its kind are, or of
    all weights, these are not the float graph's: they are named, as is what the other graph has otherwise.
    """
    pairing = _constants(floats, quantized)
    known = {own.value for target in pairing.targets for own in target.floats}
    others_known = {use.value for target in pairing.targets for use in target.quantized}
    couples: dict[str, Couple] = {}
    errors: dict[str, float] = {}
    num_alike = 0
    met: set[str] = {own.name for own in floats.uses.values() if own.roots <= known}
    for name, use in quantized.uses.items():
        if use.roots <= others_known:
            continue
        owns, uses = _couple(name, floats.uses, quantized.uses)
        met |= {own.name for own in owns}
        alone: float | str = "the float graph has no node of that name with a constant weight" if uses else 0.0
        error = _error(_columns(owns, floats), _columns(uses, quantized)) if owns else alone
        if isinstance(error, str):
            pairing.unpaired |= {use.node.name: error for use in uses}
        elif error:
            couples[name], errors[name] = (owns, uses), error
        num_alike += not isinstance(error, str) and error <= STRANGE
    strange = {name for name, error in errors.items() if not error <= STRANGE}
    if 2 * num_alike < len(quantized.uses):  # another model: its constants are no damage, either
        pairing.targets, pairing.damaged = [], {}
    others = strange if 2 * len(strange) > len(errors) else meant_others(errors, strange, kind_of)
    groups: dict[frozenset[str], Couple] = {}
    for name, (owns, uses) in couples.items():
        if name in others:
            why = f"its weight's values are others (relative error {errors[name]:.2g})"
            pairing.unpaired |= {use.node.name: why for use in uses}
            continue
        group = groups.setdefault(_shared(groups, owns, uses), ([], []))
        for side, more in zip(group, (owns, uses), strict=True):
            side += more
    for owns, uses in groups.values():
        values = {own.value for own in owns}  # a product with one of these would be given the group's quantized numbers
        if other := next((use.name for use in floats.uses.values() if use.value in values and use not in owns), ""):
            why = f"the float graph has one weight for it and for '{other}', which is not quantized with it"
            pairing.unpaired |= {use.node.name: why for use in uses}
            continue
        target = _target((uses if len(owns) > len(uses) else owns)[0].name, (owns, uses), floats, quantized)
        error = max(errors.get(use.name, 0.0) for use in uses)
        if any(use.name in strange for use in uses):
            pairing.damaged[target.name] = f"is not the float model's (relative error {error:.2g})"
        pairing.targets.append(target)
    named = {plain_name(node.name): node for node in reversed(quantized.model.graph.node)}
    for own in (own for name, own in floats.uses.items() if name not in met):
        node = named.get(plain_name(own.node.name))
        why = "the quantized graph has no node of that name"
        if node is not None:
            form = f"{node.op_type}, has its weight in a form that is not compared"  # as MatMulInteger's
            why = f"the quantized graph's node of that name, {form}"
        pairing.unpaired[own.node.name] = why
    far = {name: distance(*pair) for name, pair in pairs_of(floats, quantized).items()}
    damaged, suffix = outliers(far)[0] | pairing.damaged, f", {part}" if part else ""
    return Pairing(
        targets=[replace(target, name=target.name + suffix, part=part) for target in pairing.targets],
        unpaired={name + suffix: why for name, why in pairing.unpaired.items()},
        damaged={name + suffix: how for name, how in damaged.items()},
        shares={name + suffix: one.share for name, one in far.items()},
    )


def _target(name: str, couple: Couple, floats: GraphWeights, quantized: GraphWeights) -> Target:
    owns, uses = map(tuple, couple)
    return Target(name, owns, uses, _bytes(floats, owns), _bytes(quantized, uses))


def _constants(floats: GraphWeights, quantized: GraphWeights) -> Pairing:
    """The constants that differ where they should be equal, with the uses that only they have."""
    pairing = Pairing()
    both = floats.floats, quantized.floats
    unlike = {key: one.sentence(both[1][key]) for key, one in apart(*both).found.items()}
    for key, what in (unlike | broken(*both)).items():
        value, other = (graph.float_names.get(key, "") for graph in (floats, quantized))
        name = next((own.name for own in floats.uses.values() if own.value == value), key)
        pairing.damaged[name] = what
        own, use = floats.constant(value), quantized.constant(other)
        if own is None or use is None or floats.numbers(value).shape != quantized.numbers(other).shape:
            pairing.unpaired[name] = what
            continue
        alike = [(floats.uses.get(made.name), made) for made in quantized.uses.values() if made.roots == use.roots]
        owns = [own, *(first for first, _ in alike if first is not None and first.value != value)]
        uses = [use, *(second for first, second in alike if first is not None and first.value != value)]
        pairing.targets.append(_target(name, (owns, uses), floats, quantized))
    return pairing


def _couple(name: str, floats: Mapping[str, WeightUse], quantized: Mapping[str, WeightUse]) -> Couple:
    """The uses of both graphs that belong to that of the quantized one; no uses where another name has brought it."""
    if name in floats:
        return [floats[name]], [quantized[name]]
    for whole, parts in JOINED.items():
        names = [_renamed(name, whole, part) for part in parts]
        if names[0] != name and all(one in floats for one in names):
            return [floats[one] for one in names], [quantized[name]]
        part = next((part for part in parts if _renamed(name, part, whole) in floats), None)
        if part is not None:
            names = [_renamed(name, part, other) for other in parts]
            if all(one in quantized for one in names):
                float_use = floats[_renamed(name, part, whole)]
                return ([float_use], [quantized[one] for one in names]) if part == parts[0] else ([], [])
    return [], [quantized[name]]


def _renamed(name: str, word: str, other: str) -> str:
    return re.sub(rf"(?<![^/.]){word}(?![^/.])", other, name)


def _error(*sides: Sequence[Matrix]) -> float | str:
    """The relative error of two sides, 0 where they are one in the same precision, or why they are not one weight: root
    mean square of the difference over that of the float weight."""
    if any(len({part.shape[:-1] for part in side}) > 1 for side in sides):
        return "its parts have different numbers of inputs"
    numbers, others = map(_joined, sides)
    if numbers.shape != others.shape:
        return f"its weight is {list(others.shape)}, the float graph's {list(numbers.shape)}"
    if np.array_equal(numbers, others):
        return 0.0
    numbers = np.asarray(numbers, np.float32)
    return float(np.linalg.norm(numbers - others)) / max(float(np.linalg.norm(numbers)), SMALLEST) or SMALLEST


def _columns(uses: Sequence[WeightUse], weights: GraphWeights) -> list[Matrix]:
    """The weights, their outputs as the last axis where they are products."""
    return [weights.matrix(use).T if use.is_transposed else weights.matrix(use) for use in uses]


def _joined(parts: Sequence[Matrix]) -> Matrix:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _shared(
    groups: Mapping[frozenset[str], Couple], owns: Sequence[WeightUse], uses: Sequence[WeightUse]
) -> frozenset[str]:
    """The group of the same weight, as tied ones are: with an initializer of the quantized graph in common, or one
    value in the float graph, which is given other numbers as a whole; else a new one. A weight in parts is alone."""
    roots, values = frozenset().union(*(use.roots for use in uses)), {own.value for own in owns}

    def is_same(other: frozenset[str]) -> bool:
        first, second = groups[other]
        return len(first) == len(second) and (bool(other & roots) or any(own.value in values for own in first))

    return next((group for group in groups if is_same(group)), roots) if len(owns) == len(uses) else roots


def _bytes(weights: GraphWeights, uses: Iterable[WeightUse]) -> int:
    return sum({use.roots: weights.num_bytes(use) for use in uses}.values())


def refuse_nothing(pairing: Pairing, num_weights: int) -> None:
    """Raises `ModelError` for a model of `num_weights` weights that has nothing to compare."""
    if not pairing.unpaired:
        raise ModelError("no weight of the model is stored otherwise than in the reference: there is nothing to locate")
    name, why = next(iter(pairing.unpaired.items()))
    whole = counted(num_weights or len(pairing.unpaired), "weight")
    raise ModelError(f"no weight can be paired with the reference's: of {whole} '{name}': {why}", code="not_comparable")


DATA = {"MatMul": 0, "Gemm": 0, "MatMulNBits": 0, "Gather": 1, "GatherBlockQuantized": 1}
"""The input that is not the weight, by operator."""

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
            return not input_of(use.node, use.inputs[2])
        makers = self.quantized.makers(use.value)
        return not any(input_of(node, 2) for node in makers if node.op_type == "DequantizeLinear")

    def weight(self, float_use: WeightUse) -> Array | None:
        """A float weight as [K, N], a table [V, H] as [H, V], experts as [E, N, K], as a view of its file; None where
        its nodes do more than to transpose it."""
        matrix = self.floats.view(float_use.value)
        is_turned = float_use.node.op_type in TABLES or float_use.is_transposed
        return matrix.T if matrix is not None and is_turned else matrix

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
        if {use.value for use in target.quantized} != {name for n in _EXPERTS if (name := input_of(node, n))}:
            return False
        if not precision.bits:
            return not input_of(node, _ROUTER_WEIGHTS)
        weights = [self.floats.view(use.value) for use in target.floats]
        return not any(weight is None or weight.shape[2] % precision.block_size for weight in weights)


def bias_of(node: onnx.NodeProto) -> str:
    """The input of a node that is added to its product; empty where it has none."""
    return input_of(node, BIAS.get(node.op_type, -1))


def input_of(node: onnx.NodeProto, number: int) -> str:
    """The name of a node's input; empty where it has none."""
    return str(node.input[number]) if 0 <= number < len(node.input) else ""


def whole_experts(targets: Sequence[Target]) -> list[Target]:
    """The targets, the experts of one node as one: their number of bits is the node's."""
    groups: dict[tuple[str, ...], list[Target]] = {}
    for target in targets:
        node = target.quantized[0].node
        key = (target.part, *node.output) if target.is_of_experts and not target.is_joined else (target.name, "")
        groups.setdefault(key, []).append(target)
    for group in (group for group in groups.values() if group[0].is_of_experts):
        first, parts = group[0], [*group]
        whole = replace(
            first,
            name=first.name.removesuffix(first.what).removesuffix(f"/{first.floats[0].part}") + first.what,
            floats=tuple(own for part in parts for own in part.floats),
            quantized=tuple(use for part in parts for use in part.quantized),
            float_bytes=sum(part.float_bytes for part in parts),
            bytes=sum(part.bytes for part in parts),
        )
        group[:] = [whole]
    return [group[0] for group in groups.values()]


def with_tables(targets: Sequence[Target], sources: Mapping[str, Sources]) -> dict[Target, Target]:
    """Quantized products, each with the table of the same weight, which is float in the quantized graph and read by one
    lookup alone. They are one weight where the float graph's are equal. `sources` by part of the package."""
    wholes: dict[Target, Target] = {}
    for target in targets:
        own, other = sources[target.part].floats, sources[target.part].quantized
        (float_use, *more), (use, *others) = target.floats, target.quantized
        if more or others or use.node.op_type != "MatMulNBits":
            continue
        read = list(reads(other.model.graph.node))
        for name, lookup in other.uses.items():
            table = own.uses.get(name)
            if lookup.node.op_type != "Gather" or table is None or table.node.op_type != "Gather":
                continue
            is_read_once = all(read.count(root) == 1 for root in lookup.roots)
            if target not in wholes and is_read_once and _is_one(table, float_use, sources[target.part]):
                wholes[target] = replace(
                    target,
                    name=f"{target.name} and its table",
                    floats=(float_use, table),
                    quantized=(use, lookup),
                    float_bytes=_bytes(own, (float_use, table)),
                    bytes=target.bytes + other.num_bytes(lookup),
                )
    return wholes


def _is_one(table: WeightUse, head: WeightUse, sources: Sources) -> bool:
    """Whether a float table [V, H] has the numbers of a float product [H, V]."""
    first, second = sources.weight(table), sources.weight(head)
    if first is None or second is None or first.shape != second.shape:
        return False
    return all(
        np.array_equal(first[:, n : n + _ROWS], second[:, n : n + _ROWS]) for n in range(0, first.shape[1], _ROWS)
    )
