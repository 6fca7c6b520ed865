"""Where the weights of a graph lie, and moving them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from olive_ext.graph.nodes import external_locations
from olive_ext.model.files.content import relocated
from tests.graph.heads import decoder
from tests.model.tiny import put_weight


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


def test_relocated_model_names_the_links_ends_and_leaves_the_input(scattered, tmp_path):
    names = external_locations(scattered)
    for name in names:
        put_weight(tmp_path / "blobs" / f"real-{name}")
        (tmp_path / name).symlink_to(tmp_path / "blobs" / f"real-{name}")
    before = scattered.SerializeToString(deterministic=True)
    folder, moved = relocated(tmp_path / "model.onnx", scattered)
    assert (folder, external_locations(moved)) == (tmp_path / "blobs", {f"real-{name}" for name in names})
    assert scattered.SerializeToString(deterministic=True) == before
    np.testing.assert_array_equal(
        numpy_helper.to_array(moved.graph.initializer[0]), numpy_helper.to_array(scattered.graph.initializer[0])
    )
