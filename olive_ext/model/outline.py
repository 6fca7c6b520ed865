"""What a graph's file holds, read without its weights: inputs, outputs, and where the weights are.

Knows no folder's layout and opens no session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from olive_ext.errors import ModelError, first_line, understood
from olive_ext.model.content import refuse_pointer
from olive_ext.model.types import TensorSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Outline:
    """What locating needs to know of a graph: its interface, and its external-data locations with the bytes that each
    must have at least."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    locations: Mapping[str, int]

    @property
    def has_logits(self) -> bool:
        """Whether it returns logits."""
        return any(name.startswith("logits") for name in self.outputs)


def read_graph(path: Path) -> onnx.ModelProto:
    """The graph of an .onnx file without its external data; raises `ModelError` where it is broken."""
    import onnx

    refuse_pointer(path)
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, which only protobuf itself could name here
        raise ModelError(f"'{path}' is a broken graph: {first_line(error)} ({path.stat().st_size} bytes)") from error
    if not model.graph.output:
        raise ModelError(f"'{path}' is a broken graph: it has no outputs ({path.stat().st_size} bytes)")
    return model


def read_outline(path: Path) -> Outline:
    """What `read_graph` finds, in outline; raises `ModelError` as that does."""
    import onnx

    from olive_ext.model.attention import graph_inputs, tensor_spec  # imported here: it brings onnx along

    model = read_graph(path)
    functions = (_node_tensors(function.node) for function in model.functions)
    locations: dict[str, int] = {}
    for tensor in chain(_graph_tensors(model.graph), *functions):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location, end = _external_place(path, tensor)
            locations[location] = max(end, locations.get(location, 0))
    with understood(path):
        outputs = {value.name: tensor_spec(value) for value in model.graph.output}
        return Outline(graph_inputs(model.graph), outputs, locations)


def _external_place(path: Path, tensor: onnx.TensorProto) -> tuple[str, int]:
    """The file of a tensor's numbers, and where they end in it, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        place = entries["location"], int(entries.get("offset") or 0) + int(entries.get("length") or 0)
    except (KeyError, ValueError) as error:
        raise ModelError(f"'{path}' is a broken graph: the external data of '{tensor.name}' are {entries}") from error
    if min(int(entries.get(key) or 0) for key in ("offset", "length")) < 0:
        raise ModelError(f"'{path}' is a broken graph: the external data of '{tensor.name}' are {entries}")
    return place


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Tensors in the attributes of `nodes`, and in their graphs. For an attribute that is neither, protobuf gives an
    empty tensor, which has no location."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (*attribute.tensors, attribute.t)
        for graph in (*attribute.graphs, attribute.g):
            yield from _graph_tensors(graph)
