"""Facts read from the nodes of a decoder's graph: which attention reads a KV input, the cache's shape by its
attributes, and where activations are rounded, because scores then depend on which tokens are fed together. Knows no
input's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import onnx

from olive_ext.errors import MismatchError, ModelError
from olive_ext.graph.nodes import attribute, nested_graphs
from olive_ext.model.types import TensorSpec

_ONE_SCALE = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operators that give all tokens of a step one scale; ONNX Runtime fuses the first into the second."""

_INT8 = 4
"""The accuracy_level of MatMulNBits that rounds each row's blocks to 8 bits."""

_FUSED_BLOCK = 16
"""The smallest blocks of a DequantizeLinear along axis 0 that ONNX Runtime (1.31) fuses with the MatMul or Gemm that
reads it, of 4 and 8 bits alike. The fused MatMulNBits has that accuracy_level, unless the session entry
"session.qdq_matmulnbits_accuracy_level" names another."""


def sole_readers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The nodes by the values that they alone read, as they are or cast: attentions by the KV inputs."""
    readers: dict[str, onnx.NodeProto | None] = {}
    for node in graph.node:
        readers |= {name: None if name in readers else node for name in node.input}
    for name, reader in readers.items():
        while reader is not None and reader.op_type in ("Cast", "Identity"):
            reader = readers.get(reader.output[0])
        readers[name] = reader
    return {name: node for name, node in readers.items() if node is not None}


def embedding_rows(graph: onnx.GraphProto, tokens: str) -> int | None:
    """Rows of the smallest table in which the token ids `tokens` are looked up; None where there is none."""
    dims = _dims(graph)
    tables = (
        (dims.get(node.input[0]), attribute(node, "axis", attribute(node, "gather_axis", 0)))
        for node in graph.node
        if node.op_type in ("Gather", "GatherBlockQuantized") and list(node.input[1:2]) == [tokens]
    )
    return min((table[axis] for table, axis in tables if table), default=None)


def tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Name, type and shape as a graph declares them; an axis without a name is "?"."""
    tensor = value.type.tensor_type
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return TensorSpec(value.name, tensor.elem_type, tuple(dims))


def graph_inputs(graph: onnx.GraphProto) -> dict[str, TensorSpec]:
    """The inputs by name, without weights, which older graphs list among them."""
    weights = {tensor.name for tensor in graph.initializer}
    return {value.name: tensor_spec(value) for value in graph.input if value.name not in weights}


def step_scale(nodes: Sequence[onnx.NodeProto]) -> str:
    """How nodes give all tokens of a step one scale, so that numbers depend on what is fed together; empty where none
    does."""
    bodies = (body.node for body in nested_graphs(nodes))
    number = sum(node.op_type in _ONE_SCALE for node in chain(nodes, *bodies))
    return f"the activations of all tokens of a step are quantized with one scale ({number} nodes)" if number else ""


def num_row_roundings(nodes: Sequence[onnx.NodeProto]) -> int:
    """Nodes that round activations to few bits, each row by itself, in the file or as ONNX Runtime fuses them."""
    blocked = (node for node in nodes if node.op_type == "DequantizeLinear" and attribute(node, "axis", 1) == 0)
    fused = {node.output[0] for node in blocked if attribute(node, "block_size", 0) >= _FUSED_BLOCK}
    return sum(
        node.op_type == "QuantizeLinear"
        or (node.op_type == "MatMulNBits" and attribute(node, "accuracy_level", 0) == _INT8)
        or (node.op_type in ("MatMul", "Gemm") and node.input[1] in fused)
        for node in nodes
    )


def rounding_notes(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """A sentence on how rows are rounded; none where no activations are."""
    if not (number := num_row_roundings(nodes)):
        return []
    return [
        f"activations are rounded to few bits, each row by itself ({number} nodes, MatMulNBits of accuracy_level 4, "
        "what ONNX Runtime fuses into one, or QuantizeLinear): a difference in the last bit, as between one token a "
        "step and several, or on another processor, can grow to hundredths or tenths of a nat"
    ]


_TABLES = {"GroupQueryAttention": (7, 8), ("com.microsoft", "RotaryEmbedding"): (2, 3), ("", "RotaryEmbedding"): (1, 2)}
"""The indices of an operator's inputs for cosines and sines."""

_VECTOR, _HEAD = 8, 16
"""GroupQueryAttention (ONNX Runtime 1.31, group_query_attention_helper.h) takes tables whose width is a multiple of the
first number, and heads whose size is a multiple of the second."""


def rotary_rows(graph: onnx.GraphProto) -> int | None:
    """Positions that rotary embeddings hold: those of the smallest table that a node reads. Where another node chooses
    between tables, those of the largest table whose name says what it is."""
    dims = _dims(graph)
    read = [dims[cosines][0] for _, cosines, _ in rotary_nodes(graph) if len(dims.get(cosines, ())) == 2]
    named = [size[0] for name, size in dims.items() if "cos_cache" in name and len(size) == 2]
    return min(read, default=max(named, default=None))


def refuse_rotary(graph: onnx.GraphProto, head_sizes: Mapping[str, int]) -> None:
    """Raises `ModelError` for a table whose shape its kernel does not take. `head_sizes` are by the caches' inputs."""
    dims = _dims(graph)
    for node, cosines, sines in rotary_nodes(graph):
        if cosines not in dims or sines not in dims:
            continue
        tables = (
            f"the rotary tables '{cosines}' {list(dims[cosines])} and '{sines}' {list(dims[sines])} of '{node.name}'"
        )
        if dims[cosines] != dims[sines]:
            raise MismatchError(f"{tables} differ in shape, which {node.op_type} refuses")
        width, rotated = dims[cosines][-1], attribute(node, "rotary_embedding_dim", 0)
        if node.op_type == "RotaryEmbedding":
            if rotated and not node.domain and width != rotated // 2:  # the other one takes half of a head as well
                raise ModelError(f"{tables} are {width} wide; 'rotary_embedding_dim' = {rotated} needs {rotated // 2}")
            continue
        head_size = head_sizes.get(node.input[3])
        if width % _VECTOR or (head_size is not None and width > head_size // 2):
            half = "half of the head" if head_size is None else head_size // 2
            raise ModelError(f"{tables} are {width} wide; {node.op_type} takes multiples of {_VECTOR} up to {half}")
        if head_size is not None and head_size % _HEAD:
            raise ModelError(f"'{node.name}' rotates heads of {head_size}; {node.op_type} takes multiples of {_HEAD}")


def _dims(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def rotary_nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, str]]:
    """The nodes that rotate positions by tables, and the names of their cosines and sines."""
    for node in graph.node:
        key = node.op_type if node.op_type == "GroupQueryAttention" else (node.domain, node.op_type)
        indices = _TABLES.get(key)
        is_on = node.op_type != "GroupQueryAttention" or attribute(node, "do_rotary", 0)
        if indices is not None and is_on and len(node.input) > indices[1] and node.input[indices[0]]:
            yield node, node.input[indices[0]], node.input[indices[1]]
