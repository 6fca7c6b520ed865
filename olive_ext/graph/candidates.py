"""A graph that finds the most probable tokens of some rows of logits: what a beam search reads of a step. Knows no
session.

Axes: K rows, V vocabulary, N rows that are read, C candidates of each.
"""

from __future__ import annotations

from onnx import GraphProto, TensorProto

from olive_ext.graph.nodes import NodeWriter, model_of

OUTPUTS, KINDS = ("logprobs", "ids"), (TensorProto.FLOAT, TensorProto.INT64)


def candidates_graph(vocab_size: int | None) -> bytes:
    """Inputs `logits` float32[K, V], which are log-probabilities in nats, `rows` int64[N] of K, `count` int64[1], which
    is C and at most V. Outputs `logprobs` float32[N, C] and `ids` int64[N, C], best first."""
    graph = GraphProto(name="candidates")
    writer = NodeWriter(graph, 21, "olive_ext/candidates")
    writer.input("logits", TensorProto.FLOAT, ["K", "V" if vocab_size is None else vocab_size])
    writer.input("rows", TensorProto.INT64, ["N"])
    writer.input("count", TensorProto.INT64, [1])
    logits_NV = writer.add("Gather", ["logits", "rows"], axis=0)
    logprobs, ids = (writer.output(name, kind, ["N", "C"]) for name, kind in zip(OUTPUTS, KINDS, strict=True))
    writer.add_top(logits_NV, "count", logprobs, ids)
    return bytes(model_of(graph, 21).SerializeToString())
