from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.edits import clips_as_max
from olive_ext.graph.nodes import half_type, quantizing_operator, reads


@pytest.mark.parametrize("is_constant_node", [False, True])
@pytest.mark.parametrize(
    ("elem_type", "ends", "expected"),
    [
        (TensorProto.INT64, ["low"], "Max"),
        (TensorProto.INT64, ["low", ""], "Max"),
        (TensorProto.INT32, ["low", ""], "Max"),
        (TensorProto.INT64, ["low", "high"], "Clip"),
        (TensorProto.INT64, ["", "high"], "Clip"),
        (TensorProto.FLOAT, ["low", ""], "Clip"),  # where Max and Clip may differ in what is not a number
    ],
)
def test_open_clip_of_integers_is_a_max(elem_type: int, ends: list[str], expected: str, is_constant_node: bool) -> None:
    values = [helper.make_tensor("low", elem_type, [], [0]), helper.make_tensor("high", elem_type, [], [3])]
    constants = [helper.make_node("Constant", [], [value.name], value=value) for value in values]
    node = helper.make_node("Clip", ["x", *ends], ["y"])
    kind = helper.make_tensor_value_info("x", elem_type, ["N"]), helper.make_tensor_value_info("y", elem_type, ["N"])
    nodes, initializers = ([*constants, node], []) if is_constant_node else ([node], values)
    graph = helper.make_graph(nodes, "clip", [kind[0]], [kind[1]], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    feed = {"x": np.array([-2, 0, 5], helper.tensor_dtype_to_np_dtype(elem_type))}
    before = ort.InferenceSession(model.SerializeToString()).run(None, feed)[0]
    clips_as_max(model.graph)
    onnx.checker.check_model(model)
    assert model.graph.node[-1].op_type == expected
    np.testing.assert_array_equal(ort.InferenceSession(model.SerializeToString()).run(None, feed)[0], before)


def test_each_nested_graph_is_read_once() -> None:
    """A graph of 20 nested bodies had 2^20 reads, and opened for minutes. What bodies make themselves is not read."""
    node = helper.make_node("Identity", ["x20"], ["y"])
    for depth in range(19, -1, -1):
        body = helper.make_graph([node], "body", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
        node = helper.make_node("If", [f"x{depth}"], ["y"], then_branch=body)
    assert sorted(reads([node])) == sorted(f"x{depth}" for depth in range(21))


@pytest.mark.parametrize(
    ("weight", "value", "state", "expected"),
    [
        ("FLOAT", "FLOAT", "FLOAT", ("", "")),
        ("BFLOAT16", "FLOAT", "FLOAT", ("bfloat16", "")),
        ("FLOAT", "FLOAT16", "FLOAT", ("float16", "")),
        ("FLOAT", "FLOAT", "FLOAT16", ("float16", "")),
        ("FLOAT8E4M3FN", "FLOAT", "FLOAT", ("", "FLOAT8E4M3FN")),
        ("FLOAT", "INT8", "FLOAT", ("", "INT8")),
        ("INT64", "INT32", "FLOAT", ("", "")),
    ],
    ids=["none", "a matrix", "a Constant node", "a cache", "fp8", "int8 in a Constant node", "integers"],
)
def test_precision_is_that_of_matrices_wherever_they_lie_or_of_caches(
    weight: str, value: str, state: str, expected: tuple[str, str]
) -> None:
    types = [TensorProto.DataType.Value(name) for name in (weight, value, state)]
    matrices = [helper.make_tensor(name, kind, [2, 1], [1, 2]) for name, kind in zip("wv", types, strict=False)]
    nodes = [helper.make_node("Constant", [], ["v"], value=matrices[1])]
    cache = helper.make_tensor_value_info("past", types[2], [1, 2])
    graph = helper.make_graph(nodes, "g", [cache], [], [matrices[0]])
    assert (half_type(model := helper.make_model(graph)), quantizing_operator(model)) == expected
