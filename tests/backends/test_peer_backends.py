from __future__ import annotations

import onnxruntime
import onnxruntime_genai
import pytest

from olive_ext.backends.peer_backends import fixed_threads
from tests.exports import genai_export

pytestmark = pytest.mark.slow


def test_sessions_are_opened_with_the_given_threads_and_without_them_again() -> None:
    graph = genai_export("llama") / "model.onnx"
    kept = onnxruntime.InferenceSession, onnxruntime_genai.Config
    with fixed_threads(3):
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        assert onnxruntime_genai.Config(str(graph.parent)) is not None
    assert session.get_session_options().intra_op_num_threads == 3
    assert (onnxruntime.InferenceSession, onnxruntime_genai.Config) == kept


def test_threads_are_left_alone_where_none_are_given() -> None:
    kept = onnxruntime.InferenceSession
    with fixed_threads(None):
        assert onnxruntime.InferenceSession is kept
