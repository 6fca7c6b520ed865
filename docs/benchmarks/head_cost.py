"""What a row of the LM head costs on a CPU, and what blocks of the vocabulary would save.

    python docs/benchmarks/head_cost.py [--hidden 576] [--vocab 49152] [--threads 2]

Graphs over the same rows, by turns: the product alone; the product with the scoring head as it is; the product in B
blocks of columns, each with its own largest logit, sum and greedy token, which are put together (an online
log-softmax), so that a block's logits stay in the cache. Processor time of a row in microseconds, the least of all
rounds, and the product's rate: the rest of the head cannot be cheaper than the product alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from olive_ext.graph.scoring_head import scoring_graph

BLOCKS = (4, 12, 48)


def product(hidden: int, vocab: int) -> onnx.ModelProto:
    """logits [1, R, V] of x [1, R, H]."""
    weight = np.random.default_rng(0).standard_normal((hidden, vocab), np.float32) * hidden**-0.5
    node = helper.make_node("MatMul", ["x", "weight"], ["logits"])
    return _model([node], [numpy_helper.from_array(weight, "weight")], hidden, {"logits": ["B", "R", vocab]})


def with_head(hidden: int, vocab: int) -> onnx.ModelProto:
    """The product, and the scoring head behind it."""
    head = scoring_graph(TensorProto.FLOAT, vocab)
    joined = onnx.compose.merge_models(_as_ir(product(hidden, vocab), head), head, [("logits", "logits")])
    del joined.graph.value_info[:]
    return joined


def blocked(hidden: int, vocab: int, blocks: int) -> onnx.ModelProto:
    """Largest logit and its token, and the logarithm of the sum, [1, R] each, block by block."""
    size = vocab // blocks
    weight = np.random.default_rng(0).standard_normal((hidden, vocab), np.float32) * hidden**-0.5
    nodes, initializers, parts = [], [], []
    for number in range(blocks):
        own = np.ascontiguousarray(weight[:, number * size : (number + 1) * size])
        initializers.append(numpy_helper.from_array(own, f"weight{number}"))
        names = {name: f"{name}{number}" for name in ("logits", "largest", "greedy", "less", "terms", "sum")}
        nodes += [
            helper.make_node("MatMul", ["x", f"weight{number}"], [names["logits"]]),
            helper.make_node("ArgMax", [names["logits"]], [names["greedy"]], axis=-1, keepdims=1),
            helper.make_node("GatherElements", [names["logits"], names["greedy"]], [names["largest"]], axis=-1),
            helper.make_node("Sub", [names["logits"], names["largest"]], [names["less"]]),
            helper.make_node("Exp", [names["less"]], [names["terms"]]),
            helper.make_node("ReduceSum", [names["terms"], "last"], [names["sum"]], keepdims=1),
        ]
        parts.append(names)
    initializers.append(numpy_helper.from_array(np.array([-1]), "last"))
    for name in ("largest", "sum"):
        nodes.append(helper.make_node("Concat", [part[name] for part in parts], [name], axis=-1))
    outputs = {name: ["B", "R", blocks] for name in ("largest", "sum")}
    return _model(nodes, initializers, hidden, outputs)


def _model(
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    hidden: int,
    outputs: dict[str, list[object]],
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "R", hidden])]
    found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    graph = helper.make_graph(nodes, "head", inputs, found, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _as_ir(model: onnx.ModelProto, other: onnx.ModelProto) -> onnx.ModelProto:
    model.ir_version = other.ir_version
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    options = ort.SessionOptions()
    options.intra_op_num_threads = given.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    models = {"product": product(given.hidden, given.vocab), "head": with_head(given.hidden, given.vocab)}
    models |= {f"{number} blocks": blocked(given.hidden, given.vocab, number) for number in BLOCKS}
    sessions = {
        name: ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for name, model in models.items()
    }
    rows = np.random.default_rng(1).standard_normal((1, given.rows, given.hidden), np.float32)
    feed = {"score_rows": np.arange(given.rows), "target_rows": np.arange(given.rows)}
    feed |= {"target_ids": np.arange(given.rows), "sample_rows": np.zeros(0, np.int64), "x": rows}
    spent: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(given.rounds):
        for name, session in sessions.items():
            taken = {value.name: feed[value.name] for value in session.get_inputs()}
            outputs = [
                value.name for value in session.get_outputs() if value.name not in ("logits",) or name == "product"
            ]
            begin = time.process_time()
            session.run(outputs, taken)
            spent[name].append(time.process_time() - begin)
    rate = 2 * given.hidden * given.vocab * given.rows / min(spent["product"]) / 1e9
    print(f"product: {rate:.0f} GFLOP/s of a processor's time")
    for name, seconds in spent.items():
        print(f"| {name} | {1e6 * min(seconds) / given.rows:.0f} | {min(seconds) / min(spent['product']):.2f} |")


if __name__ == "__main__":
    main()
