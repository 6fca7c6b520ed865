"""Weights that a graph takes as inputs: other numbers hold from the next run on, or from the opening of a session."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from olive_ext.engine.runners.ort.bound_weights import BoundWeights
from olive_ext.model.providers.devices import Device


def opened(weights: BoundWeights) -> ort.InferenceSession:
    """x + w, with w of ones in the graph."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "sum", [x], [y], [numpy_helper.from_array(np.ones(2, np.float32), "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    weights.edit(model)
    session = ort.InferenceSession(model.SerializeToString())
    weights.attach(Device("cpu"))
    return session


def run(session: ort.InferenceSession, weights: BoundWeights) -> list[float]:
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.zeros(2, np.float32))
    weights.bind(binding)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy().tolist()


def test_other_numbers_hold_until_they_are_put_back_or_from_the_opening_on() -> None:
    """An encoder's session is opened when the first item comes."""
    other = {"w": np.array([2, 3], np.float32)}
    weights, early = (BoundWeights({"w": np.ones(2, np.float32)}, lambda model: None) for _ in range(2))
    session = opened(weights)
    assert run(session, weights) == [1, 1]
    weights.put(other)
    assert run(session, weights) == [2, 3]
    weights.put_back(["w"])
    assert run(session, weights) == [1, 1]
    early.put(other)
    assert run(opened(early), early) == [2, 3]
