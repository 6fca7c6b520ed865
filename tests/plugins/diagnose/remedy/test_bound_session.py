"""The part of a graph that some inputs decide: what it reads of the rest, and that it computes the same by itself.
States of steps at borders: found again by what was run, and no more of them than there is room for."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.plugins.diagnose.remedy.bound_session import KeptStates, MissingStatesError, UpperParts

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


LOW, MIDDLE, HIGH = ("low",), ("middle", "shared"), ("high", "shared")


def values(*names: str) -> dict[str, ort.OrtValue]:
    return {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(25, np.float32)) for name in names}


def recorded(kept: KeptStates, run: str, steps: int) -> None:
    kept.begin(run, [LOW, MIDDLE, HIGH])
    for step in range(steps):
        kept.put(run, bytes([step]), values(*kept.names(run)))


def test_states_are_those_of_their_run_and_step() -> None:
    kept = KeptStates(10_000)
    recorded(kept, "float", 2)
    assert set(kept.get("float", b"\1")) == {"low", "middle", "high", "shared"}
    assert kept.type_of("float", "low") == (1, [None])
    for run, step in (("other", b"\1"), ("float", b"\2")):
        with pytest.raises(MissingStatesError):
            kept.get(run, step)


def test_older_runs_go_first_then_every_second_border() -> None:
    kept = KeptStates(1_000)
    recorded(kept, "older", 1)
    recorded(kept, "newer", 4)
    assert (kept.borders("older"), kept.borders("newer")) == ((), [MIDDLE])
    assert all(set(kept.get("newer", bytes([step]))) == {"middle", "shared"} for step in range(4))
    recorded(kept, "newer", 2)
    assert kept.borders("newer") == [LOW, MIDDLE, HIGH]  # what was kept before is forgotten, bytes and all


def test_no_border_is_kept_where_none_has_room() -> None:
    kept = KeptStates(50)
    recorded(kept, "float", 3)
    assert kept.borders("float") == []
