"""The part of a graph that some inputs decide: what it reads of the rest, and that it computes the same by itself."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.plugins.diagnose.remedy.bound_session import UpperParts

SHAPE = [2, 4]
TEXT = """
agraph (float[2,4] tokens, float[4,4] low, float[4,4] high, float[2,4] past, float[2,4] mask)
    => (float[2,4] present, float[2,4] scores)
{
    hidden = MatMul(tokens, low)
    scale = Neg(mask)
    mixed = MatMul(hidden, high)
    present = Add(past, mixed)
    masked = Mul(present, scale)
    scores = Add(masked, hidden)
}
"""


def model_of(text: str) -> onnx.ModelProto:
    return helper.make_model(onnx.parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def parts_of(model: onnx.ModelProto) -> UpperParts:
    return UpperParts(model.graph, {"present": "past"}, {"tokens", "low", "high"})


def test_part_computes_what_the_whole_computes() -> None:
    model = model_of(TEXT)
    parts = parts_of(model)
    part = parts.part(["high"])
    assert part is not None
    assert part.border == ("hidden",)
    assert [model.graph.node[index].output[0] for index in part.beside] == ["scale"]
    border = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [None, None])
    upper = parts.cut(model, part, [border])
    rng = np.random.default_rng(0)
    taken = {
        value.name: rng.normal(size=[4, 4] if value.name in ("low", "high") else SHAPE) for value in model.graph.input
    }
    taken = {name: array.astype(np.float32) for name, array in taken.items()}
    whole = ort.InferenceSession(model.SerializeToString()).run(["present", "scores"], taken)
    taken["hidden"] = taken["tokens"] @ taken["low"]
    alone = ort.InferenceSession(upper.SerializeToString()).run(["present", "scores"], taken)
    assert np.allclose(whole, alone, atol=1e-6)


@pytest.mark.parametrize("read", ["past", "present"])
def test_part_that_reads_a_cache_of_the_rest_is_none(read: str) -> None:
    model = model_of(TEXT.replace("MatMul(hidden, high)", "MatMul(hidden, low)"))
    model.graph.node[-1].input[1] = read
    model.graph.node.append(helper.make_node("Mul", ["scores", "high"], ["more"]))
    model.graph.node[-2].input[0] = "high"
    assert parts_of(model).part(["high"]) is None


def test_what_decides_a_cache_decides_what_reads_it_in_later_steps() -> None:
    model = model_of(TEXT)
    model.graph.node[-1].input[1] = "past"
    made = {name for index in parts_of(model).decided_by(["high"]) for name in model.graph.node[index].output}
    assert made == {"mixed", "present", "masked", "scores"}
