"""The tables of cosines and sines of a decoder's rotary embeddings: the positions that they hold, and what kernels of
ONNX Runtime refuse of them only when a step runs. Knows no configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from olive_ext.errors import ModelError
from olive_ext.model.attention import attribute

_TABLES = {"GroupQueryAttention": (7, 8), ("com.microsoft", "RotaryEmbedding"): (2, 3), ("", "RotaryEmbedding"): (1, 2)}
"""Which inputs of an operator are its cosines and sines."""

_VECTOR, _HEAD = 8, 16
"""GroupQueryAttention (ONNX Runtime 1.31, group_query_attention_helper.h) takes tables of a width that the first
divides, and heads that the second divides."""


def rotary_rows(graph: onnx.GraphProto) -> int | None:
    """Positions that rotary embeddings hold: those of the smallest table that a node reads, or where another node
    chooses between tables, those of the largest whose name says what it is."""
    dims = _dims(graph)
    read = [dims[cosines][0] for _, cosines, _ in _nodes(graph) if len(dims.get(cosines, ())) == 2]
    named = [size[0] for name, size in dims.items() if "cos_cache" in name and len(size) == 2]
    return min(read, default=max(named, default=None))


def refuse_rotary(graph: onnx.GraphProto, head_sizes: Mapping[str, int]) -> None:
    """Raises `ModelError` for a table whose shape the kernel of a node that reads it does not take; `head_sizes` are
    those of the caches by the name of the input."""
    dims = _dims(graph)
    for node, cosines, sines in _nodes(graph):
        if cosines not in dims or sines not in dims:
            continue
        place = (
            f"the rotary tables '{cosines}' {list(dims[cosines])} and '{sines}' {list(dims[sines])} of '{node.name}'"
        )
        if dims[cosines] != dims[sines]:
            raise ModelError(f"{place} differ in shape, which {node.op_type} refuses")
        width, rotated = dims[cosines][-1], attribute(node, "rotary_embedding_dim")
        if node.op_type == "RotaryEmbedding":
            if rotated and not node.domain and width != rotated // 2:  # the other one takes half of a head as well
                raise ModelError(f"{place} are {width} wide; 'rotary_embedding_dim' = {rotated} needs {rotated // 2}")
            continue
        head_size = head_sizes.get(node.input[3])
        if width % _VECTOR or (head_size is not None and width > head_size // 2):
            half = "half of the head" if head_size is None else head_size // 2
            raise ModelError(f"{place} are {width} wide; {node.op_type} takes multiples of {_VECTOR} up to {half}")
        if head_size is not None and head_size % _HEAD:
            raise ModelError(f"'{node.name}' rotates heads of {head_size}; {node.op_type} takes multiples of {_HEAD}")


def _dims(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, str]]:
    """The nodes that rotate, with the names of their cosines and sines."""
    for node in graph.node:
        key = node.op_type if node.op_type == "GroupQueryAttention" else (node.domain, node.op_type)
        places = _TABLES.get(key)
        is_on = node.op_type != "GroupQueryAttention" or attribute(node, "do_rotary")
        if places is not None and is_on and len(node.input) > places[1] and node.input[places[0]]:
            yield node, node.input[places[0]], node.input[places[1]]
