from __future__ import annotations

import onnxruntime
import onnxruntime_genai
import pytest

from docs.benchmarks.speed.peers import Opening, feed_our_tokens, fixed_threads
from olive_ext.backends.lm_eval import OrtLM
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


class Peer:
    """Encodes without BOS, as lm-eval's ONNX backends do, and tells what it would feed."""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        raise AssertionError("a peer that is given our tokens encodes nothing itself")

    def loglikelihood(self, texts: list[str]) -> list[list[int]]:
        return [self.tok_encode(text) for text in texts]

    def loglikelihood_rolling(self, texts: list[str]) -> list[list[int]]:
        return [self.tok_encode(text) for text in texts]


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_peer_is_given_the_tokens_that_ours_feeds(add_bos: bool | None) -> None:
    package = str(genai_export("llama"))
    with OrtLM(package, add_bos_token=add_bos) as lm:
        expected = lm.tok_encode("the cat sat")
        bare = lm.tok_encode("the cat sat", add_special_tokens=False)
    peer = Peer()
    feed_our_tokens(peer, Opening(package, add_bos_token=add_bos))
    assert peer.loglikelihood(["the cat sat"]) == [expected]
    assert peer.loglikelihood_rolling(["the cat sat"]) == [bare]
    assert peer.loglikelihood(["the cat sat"]) == [expected]
    assert (expected == bare) == (add_bos is False)
