"""Which provider runs the nodes of a session."""

from __future__ import annotations

from types import SimpleNamespace

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from olive_ext.engine.runners.ort.placement import untaken


@pytest.mark.parametrize(("provider", "is_told"), [("CPUExecutionProvider", False), ("QNNExecutionProvider", True)])
def test_provider_without_a_product_is_told_by_the_session_s_own_record(provider: str, *, is_told: bool) -> None:
    """ONNX Runtime's record of a session on the CPU names no other provider."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"], "product")], "graph", value[:1], value[1:])
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), options)
    told = f"{provider} takes none of its products, which CPUExecutionProvider would run"
    assert untaken(session, provider) == (told if is_told else None)


def test_versions_without_a_record_are_not_judged() -> None:
    """ONNX Runtime before 1.24 keeps none."""
    session: ort.InferenceSession = SimpleNamespace()  # type: ignore[assignment]
    assert untaken(session, "QNNExecutionProvider") is None
