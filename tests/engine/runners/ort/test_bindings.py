"""What stays bound between steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from olive_ext.engine.runners.ort.plain_graph import run_plainly
from olive_ext.model.providers.bindings import InputFeed, KeptBinding
from olive_ext.model.providers.devices import Device


def identity() -> ort.InferenceSession:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["N"])

    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [value("x")], [value("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_kept_binding_reads_what_was_bound_last() -> None:
    session = identity()
    binding = KeptBinding(session)
    kept = ort.OrtValue.ortvalue_from_numpy(np.array([1, 2]))
    other = ort.OrtValue.ortvalue_from_numpy(np.array([3]))

    def run() -> list[int]:
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        return [int(number) for number in binding.get_outputs()[0].numpy()]

    found = []
    for bound in (kept, kept, np.array([7, 8, 9]), kept, other, kept):
        if isinstance(bound, ort.OrtValue):
            binding.bind_ortvalue_input("x", bound)
        else:
            binding.bind_cpu_input("x", bound)
        found.append(run())
    assert found == [[1, 2], [1, 2], [7, 8, 9], [1, 2], [3], [1, 2]]
    kept.update_inplace(np.array([5, 6]))
    binding.bind_ortvalue_input("x", kept)
    assert run() == [5, 6]


def test_what_is_no_tensor_is_left_out_of_a_plain_run() -> None:
    """As an output that ONNX Runtime 1.27 has optimized away: `numpy` of a sequence ended in its words."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["N"])
    held = helper.make_tensor_sequence_value_info("held", onnx.TensorProto.INT64, None)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.INT64, ["N"])
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["held"]), helper.make_node("Identity", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "sequence", [x], [held, y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = run_plainly(session, {"x": ort.OrtValue.ortvalue_from_numpy(np.array([1, 2]))})
    assert {name: value.tolist() for name, value in values.items()} == {"y": [1, 2]}


def test_inputs_are_bound_on_releases_that_do_not_say_where_they_lie() -> None:
    """ONNX Runtime 1.23, at which Python 3.10 ends, has no `get_input_memory_infos`."""
    session: ort.InferenceSession = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="x")])  # type: ignore[assignment]
    bound: list[tuple[str, list[int]]] = []
    binding: ort.IOBinding = SimpleNamespace(bind_cpu_input=lambda name, array: bound.append((name, array.tolist())))  # type: ignore[assignment]
    for kind in ("cpu", "cuda"):
        InputFeed(session, Device(kind)).bind(binding, "x", np.array([1]))
    assert bound == [("x", [1])] * 2
