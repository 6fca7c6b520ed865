"""Models of ONNX files: their tensors, the files in which external weights lie, and copies with other outputs.

Knows files and protobufs, but no session and no provider.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx import ModelProto as ModelProto

from olive_ext.graph.nodes import nested_graphs


def external_locations(model: onnx.ModelProto) -> set[str]:
    """The files that hold the model's external weights, as written in it: relative to the model's own folder."""
    return {entry.value for tensor in tensors_of(model) for entry in tensor.external_data if entry.key == "location"}


def with_outputs(model: onnx.ModelProto, values: Collection[str] | None = None) -> onnx.ModelProto:
    """A copy of `model` that also returns `values` of its nodes, in the order of the nodes; all where it is None."""
    edited = deepcopy(model)
    known = {value.name for value in edited.graph.output}
    names = [name for node in edited.graph.node for name in node.output if name and name not in known]
    wanted = names if values is None else [name for name in names if name in values]
    edited.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return edited


def weights_of(
    model: onnx.ModelProto, node: onnx.NodeProto, folder: Path
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Name and numbers of each weight that `node` reads; those outside of the file lie in `folder`."""
    wanted = set(node.input)
    for tensor in (tensor for tensor in model.graph.initializer if tensor.name in wanted):
        yield tensor.name, onnx.numpy_helper.to_array(tensor, base_dir=str(folder))


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the model: initializers, and attributes of nodes in graphs, subgraphs and functions."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    bodies = list(nested_graphs(nodes))
    nodes += (node for body in bodies for node in body.node)
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for graph in (model.graph, *bodies):
        yield from graph.initializer
        yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
