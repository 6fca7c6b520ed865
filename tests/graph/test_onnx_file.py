"""Reading a graph without its weights, and moving where they lie."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from olive_ext.errors import ModelError
from olive_ext.graph.onnx_file import external_locations, load_graph, relocate
from tests.graph.heads import decoder, matmul


def external(name: str, location: str) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")
    return tensor


@pytest.fixture
def scattered() -> onnx.ModelProto:
    """Weights in an initializer, in an attribute, in a subgraph, in a function, and inline."""
    model = decoder(matmul)
    model.graph.initializer.append(external("a", "model.onnx.data"))
    model.graph.initializer.append(external("b", "other.data"))
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=external("", "constant.data")))
    branch = helper.make_graph([], "branch", [], [], [external("d", "branch.data")])
    model.graph.node.append(helper.make_node("If", ["a"], ["e"], then_branch=branch, else_branch=branch))
    constant = helper.make_node("Constant", [], ["f"], value=external("", "function.data"))
    model.functions.append(helper.make_function("own", "F", [], ["f"], [constant], []))
    return model


def test_external_data_is_not_read_when_loading(tmp_path):
    model = decoder(matmul)
    model.graph.initializer.append(external("a", "nowhere.data"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert load_graph(tmp_path / "model.onnx") == model


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x08\x0a" * 3, b"\xff" * 64]
)
def test_error_names_the_file_when_it_is_not_onnx(tmp_path, content):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx: is not an ONNX model") as error:
        load_graph(path)
    assert "\n" not in str(error.value)


def test_error_names_the_file_when_it_is_cut_short(tmp_path):
    path = tmp_path / "cut.onnx"
    path.write_bytes(decoder(matmul).SerializeToString()[:-200])
    with pytest.raises(ModelError, match=r"cut\.onnx: is not an ONNX model, or is damaged"):
        load_graph(path)


def test_error_names_the_file_when_it_is_missing(tmp_path):
    with pytest.raises(ModelError, match=r"none\.onnx: cannot be read: No such file"):
        load_graph(tmp_path / "none.onnx")


def test_locations_are_found_wherever_tensors_are_stored(scattered):
    names = {"model.onnx.data", "other.data", "constant.data", "branch.data", "function.data"}
    assert external_locations(scattered) == names


def test_locations_are_none_when_weights_are_inline():
    assert external_locations(decoder(matmul)) == set()


def test_relocate_renames_what_is_named_and_leaves_the_input(scattered):
    before = scattered.SerializeToString(deterministic=True)
    moved = relocate(scattered, {"model.onnx.data": "blob", "branch.data": "twig", "unknown": "x"})
    assert external_locations(moved) == {"blob", "other.data", "constant.data", "twig", "function.data"}
    assert scattered.SerializeToString(deterministic=True) == before
    np.testing.assert_array_equal(
        numpy_helper.to_array(moved.graph.initializer[0]), numpy_helper.to_array(scattered.graph.initializer[0])
    )


def test_relocate_copies_nothing_when_nothing_is_renamed(scattered):
    assert relocate(scattered, {"unknown": "x"}) is scattered
