"""Tree attention: a bias masks cells of the KV cache, so that one row of a step continues a shared prefix in many ways.

GroupQueryAttention takes several tokens behind a past in one row only, and there each token sees all cells before its
own. With a bias that hides cells, and positions that are an input instead of counted, the tokens of that row may form a
tree:

cells     0 1 2 3 4 | 5 6 7 | 8 9        a prefix, then "x y z" and "u v", both behind the prefix
positions 0 1 2 3 4 | 5 6 7 | 5 6        "u" does not see cells 5 to 7
Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import onnx
from onnx import helper

from olive_ext.graph.edits import WHOLE_LENGTH
from olive_ext.graph.nodes import all_names, attribute, nodes_behind, reads, take_attribute

POSITIONS = "olive_ext/branch_positions"
BIAS = "olive_ext/branch_bias"
TABLE = "olive_ext/branch_table"

_POSITIONS_AT, _BIAS_AT = 9, 10
"""GroupQueryAttention's inputs `position_ids` and `attention_bias`."""

_ROTARY_AT = 7, 8
"""Its inputs `cos_cache` and `sin_cache`."""

_BIAS_TYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})


@dataclass(frozen=True)
class BiasInput:
    """An input [1 or B, 1, S, T] that is added to the attention's scores, in all layers that see the same cells."""

    name: str
    elem_type: int
    window: int | None
    """Positions that a token sees, its own included; None for all."""


@dataclass(frozen=True)
class TreeAttentionGraph:
    """The edited model and its new inputs. `positions` [B, S] is None where the graph has had such an input before."""

    model: onnx.ModelProto
    positions: str | None
    biases: tuple[BiasInput, ...]


class NoTreeAttentionError(Exception):
    """Why a bias cannot mask the cells of this graph's caches."""


def with_tree_attention(model: onnx.ModelProto, past_names: Iterable[str], has_positions: bool) -> TreeAttentionGraph:
    """A copy of `model` in which every attention over the caches `past_names` takes a bias, and positions.

    A layer's window moves into its bias, because the attention counts it in cells. Raises `NoTreeAttentionError` with
    the reason where that cannot be done.
    """
    edited = deepcopy(model)
    nodes = list(_attentions(edited.graph, set(past_names)))
    elem_types = {value.name: value.type.tensor_type.elem_type for value in edited.graph.input}
    if any(name.startswith((POSITIONS, BIAS, TABLE)) for name in all_names(edited.graph)):
        raise NoTreeAttentionError("the graph has values with the names of the new inputs")
    rotates = {bool(attribute(node, "do_rotary", 0)) for node in nodes}
    if rotates == {False} and not has_positions:
        raise NoTreeAttentionError("the graph counts positions by itself")
    biases: dict[tuple[int, int | None], BiasInput] = {}
    tables: dict[str, str] = {}
    for node in nodes:
        _check(node, elem_types[node.input[3]])
        window = take_attribute(node, "local_window_size", -1)
        key = (elem_types[node.input[3]], window if window > 0 else None)
        bias = biases.setdefault(key, BiasInput(f"{BIAS}_{len(biases)}", *key))
        node.input.extend([""] * (_BIAS_AT + 1 - len(node.input)))
        node.input[_BIAS_AT] = bias.name
        if attribute(node, "do_rotary", 0):
            node.input[_POSITIONS_AT] = node.input[_POSITIONS_AT] or POSITIONS
            for place in _ROTARY_AT:
                node.input[place] = _doubled(edited.graph, node.input[place], tables)
    reads_positions = any(POSITIONS in node.input for node in nodes)
    if reads_positions:
        edited.graph.input.append(helper.make_tensor_value_info(POSITIONS, onnx.TensorProto.INT64, ["B", "S"]))
    for bias in biases.values():
        shape = [f"{bias.name}_{axis}" for axis in "B1ST"]
        edited.graph.input.append(helper.make_tensor_value_info(bias.name, bias.elem_type, shape))
    return TreeAttentionGraph(edited, POSITIONS if reads_positions else None, tuple(biases.values()))


def _doubled(graph: onnx.GraphProto, table: str, made: dict[str, str]) -> str:
    """A rotary table twice, one behind the other, which is made once: GroupQueryAttention demands a row for each cell,
    though no position is that large."""
    if table not in made:
        known = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
        read = {table, *reads(nodes_behind(graph.node, [table]))}
        given = read.intersection(value.name for value in graph.input)
        if table not in known or not given <= {WHOLE_LENGTH}:
            raise NoTreeAttentionError(f"the rotary table '{table}' is computed from the number of cells")
        made[table] = f"{TABLE}_{len(made)}"
        place = next((number for number, node in enumerate(graph.node) if table in node.output), -1) + 1
        graph.node.insert(place, helper.make_node("Concat", [table, table], [made[table]], name=made[table], axis=0))
    return made[table]


def _attentions(graph: onnx.GraphProto, past_names: set[str]) -> Iterator[onnx.NodeProto]:
    """The nodes that read the caches, all of them GroupQueryAttention."""
    seen: set[str] = set()
    for node in graph.node:
        caches = past_names.intersection(node.input)
        if not caches:
            continue
        if node.op_type != "GroupQueryAttention":
            raise NoTreeAttentionError(f"a cache is read by {node.op_type}, which is not GroupQueryAttention")
        seen |= caches
        yield node
    if seen != past_names:
        raise NoTreeAttentionError(f"nothing reads the cache '{min(past_names - seen)}'")


def _check(node: onnx.NodeProto, elem_type: int) -> None:
    if elem_type not in _BIAS_TYPES:
        raise NoTreeAttentionError(f"the cache has the type {onnx.TensorProto.DataType.Name(elem_type)}")
    if len(node.input) > _BIAS_AT and node.input[_BIAS_AT]:
        raise NoTreeAttentionError("the attention has a bias already")
