"""Where the weights of a graph lie, and moving them."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.graph.nodes import external_locations
from tests.graph.heads import decoder


def external(name: str, location: str) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")
    return tensor


@pytest.fixture
def scattered() -> onnx.ModelProto:
    """Weights in an initializer, in an attribute, in a subgraph, in a function, and inline."""
    model = decoder("matmul")
    model.graph.initializer.append(external("a", "model.onnx.data"))
    model.graph.initializer.append(external("b", "other.data"))
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=external("", "constant.data")))
    inner = helper.make_node("Constant", [], ["g"], value=external("", "inner.data"))
    branch = helper.make_graph([inner], "branch", [], [], [external("d", "branch.data")])
    model.graph.node.append(helper.make_node("If", ["a"], ["e"], then_branch=branch, else_branch=branch))
    constant = helper.make_node("Constant", [], ["f"], value=external("", "function.data"))
    model.functions.append(helper.make_function("own", "F", [], ["f"], [constant], []))
    return model


def test_locations_are_found_wherever_tensors_are_stored(scattered):
    names = {"model.onnx.data", "other.data", "constant.data", "branch.data", "inner.data", "function.data"}
    assert external_locations(scattered) == names
    assert external_locations(decoder("matmul")) == set()
