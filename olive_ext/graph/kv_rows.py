"""Small graphs that move KV rows on the device, for memory that the host cannot address.

Every graph has an input `x<i>` and an output `y<i>` for each KV tensor.
Axes: N slots, H heads, L positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto, NodeProto, TensorProto, helper

OPSET = 18
IR_VERSION = 10


def slice_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = the first `length`[1] positions of `x` [N,H,L,D]."""
    nodes = [helper.make_node("Slice", [f"x{i}", "start", "length", "axis"], [f"y{i}"]) for i in range(len(elem_types))]
    constants = [
        helper.make_tensor("start", TensorProto.INT64, [1], [0]),
        helper.make_tensor("axis", TensorProto.INT64, [1], [2]),
    ]
    return _graph(nodes, elem_types, ["x"], ("length", [1]), constants=constants)


def take_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [1,H,L,D] = row `row`[1] of `x` [N,H,L,D]."""
    nodes = [helper.make_node("Gather", [f"x{i}", "row"], [f"y{i}"], axis=0) for i in range(len(elem_types))]
    return _graph(nodes, elem_types, ["x"], ("row", [1]))


def put_row_graph(elem_types: Sequence[int]) -> bytes:
    """`y` [N,H,L,D] = `x` with row `row`[1,1] replaced by `r` [1,H,L,D]; x and y may be one buffer."""
    nodes = [helper.make_node("ScatterND", [f"x{i}", "row", f"r{i}"], [f"y{i}"]) for i in range(len(elem_types))]
    return _graph(nodes, elem_types, ["x", "r"], ("row", [1, 1]))


def fork_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x` [N,...] with rows `target`[K,1] replaced by rows `source`[K]; x and y may be one buffer."""
    nodes = []
    for i in range(len(elem_types)):
        nodes.append(helper.make_node("Gather", [f"x{i}", "source"], [f"r{i}"], axis=0))
        nodes.append(helper.make_node("ScatterND", [f"x{i}", "target", f"r{i}"], [f"y{i}"]))
    return _graph(nodes, elem_types, ["x"], ("source", ["K"]), ("target", ["K", 1]))


def copy_graph(elem_types: Sequence[int]) -> bytes:
    """`y` = `x`."""
    return _graph(
        [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(elem_types))], elem_types, ["x"]
    )


def _graph(
    nodes: list[NodeProto],
    elem_types: Sequence[int],
    tensors: Sequence[str],
    *indices: tuple[str, list[int | str]],
    constants: Sequence[TensorProto] = (),
) -> bytes:
    axes = ["N", "H", "L", "D"]
    value = helper.make_tensor_value_info
    inputs = [
        value(f"{name}{i}", kind, [f"{name}{i}_{axis}" for axis in axes])
        for name in tensors
        for i, kind in enumerate(elem_types)
    ]
    inputs += [value(name, TensorProto.INT64, shape) for name, shape in indices]
    outputs = [value(f"y{i}", kind, [f"y{i}_{axis}" for axis in axes]) for i, kind in enumerate(elem_types)]
    graph = helper.make_graph(nodes, "rows", inputs, outputs, list(constants))
    opset = helper.make_opsetid("", OPSET)
    model: ModelProto = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
    return bytes(model.SerializeToString())
