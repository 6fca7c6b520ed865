"""A folder with a decoder that runs: embeddings, a KV cache that grows but is never read, and a vocabulary product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.session.tiny import byte_level

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
VOCABULARY, HEADS, HEAD_SIZE = 320, 2, 4
HIDDEN = HEADS * HEAD_SIZE
LAYERS = 3


def put_model(folder: Path) -> Path:
    """Writes decoder and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(decoder(), folder / "model.onnx")
    byte_level().hf.save_pretrained(folder)
    return folder


def decoder() -> onnx.ModelProto:
    """Weights are random, with a fixed seed."""
    random = np.random.default_rng(5)
    weights = {
        "embedding": random.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32),
        "head": random.standard_normal((HIDDEN, VOCABULARY)).astype(np.float32),
        "split": np.array([0, 0, HEADS, HEAD_SIZE]),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["hidden"]),
        helper.make_node("Reshape", ["hidden", "split"], ["by_head"]),
        helper.make_node("Transpose", ["by_head"], ["new"], perm=[0, 2, 1, 3]),
        helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
    ]
    inputs = [_value("input_ids", INT64, ["B", "S"]), _value("attention_mask", INT64, ["B", "T"])]
    outputs = [_value("logits", FLOAT, ["B", "S", VOCABULARY])]
    for layer in range(LAYERS):
        for part in ("key", "value"):
            past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            nodes.append(helper.make_node("Concat", [past, "new"], [present], axis=2))
            inputs.append(_value(past, FLOAT, ["B", HEADS, "P", HEAD_SIZE]))
            outputs.append(_value(present, FLOAT, ["B", HEADS, "T", HEAD_SIZE]))
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def _value(name: str, elem_type: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)
