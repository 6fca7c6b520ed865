"""What stays bound between steps."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from olive_ext.engine.forms.kv_store import KeptBinding


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
