"""A decoder of many small nodes, as exporters write it that fuse nothing: norms and activations spelt out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, SIZE, VOCAB = 32, 2, 16, 96


class _Writer:
    def __init__(self, dtype: type) -> None:
        self.dtype, self.rng = dtype, np.random.default_rng(1)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op: str, *inputs: str, name: str, count: int = 1, **attributes: object) -> str:
        outputs = [f"{name}/{index}" for index in range(count)]
        self.nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs[0]

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = self.rng.normal(0, shape[0] ** -0.5, shape).astype(self.dtype)
        return name

    def number(self, value: float) -> str:
        self.weights[f"number_{value}"] = np.array(value, self.dtype)
        return f"number_{value}"

    def norm(self, x: str, name: str) -> str:
        centred = self.add("Sub", x, self.mean(x, f"{name}/mean"), name=f"{name}/Sub")
        squares = self.mean(self.add("Pow", centred, self.number(2.0), name=f"{name}/Pow"), f"{name}/variance")
        root = self.add("Sqrt", self.add("Add", squares, self.number(1e-5), name=f"{name}/Add"), name=f"{name}/Sqrt")
        scaled = self.add("Div", centred, root, name=f"{name}/Div")
        scaled = self.add("Mul", scaled, self.weight(f"{name}.weight", HIDDEN), name=f"{name}/Mul")
        return self.add("Add", scaled, self.weight(f"{name}.bias", HIDDEN), name=f"{name}/Add_1")

    def mean(self, x: str, name: str) -> str:
        return self.add("ReduceMean", x, name=name, axes=[-1], keepdims=1)

    def gelu(self, x: str, name: str) -> str:
        inner = self.add("Erf", self.add("Div", x, self.number(2.0**0.5), name=f"{name}/Div"), name=f"{name}/Erf")
        product = self.add("Mul", x, self.add("Add", inner, self.number(1.0), name=f"{name}/Add"), name=f"{name}/Mul")
        return self.add("Mul", product, self.number(0.5), name=f"{name}/Mul_1")

    def dense(self, x: str, name: str, rows: int = HIDDEN, columns: int = HIDDEN) -> str:
        return self.add("MatMul", x, self.weight(f"{name}.weight", rows, columns), name=f"{name}/MatMul")


def deep_decoder(folder: Path, layers: int = 6, dtype: type = np.float32, *, external: bool = False) -> Path:
    """The package in `folder`: 31 nodes a layer."""
    w = _Writer(dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    w.weights["one"], w.weights["axis"] = np.array([1], np.int64), np.array([1], np.int64)
    w.weights["index"] = np.array(1, np.int64)
    length = w.add("ReduceSum", "attention_mask", "axis", name="/lengths/ReduceSum", keepdims=0)
    last = w.add("Sub", length, "one", name="/lengths/Sub")
    last = w.add("Cast", last, name="/lengths/Cast", to=TensorProto.INT32)
    total = w.add("Shape", "attention_mask", name="/total/Shape")
    total = w.add("Gather", total, "index", name="/total/Gather", axis=0)
    total = w.add("Cast", total, name="/total/Cast", to=TensorProto.INT32)
    w.weights["least"] = np.array(0, np.int64)
    ids = w.add("Clip", "input_ids", "least", name="/embed/Clip")
    x = w.add("Gather", w.weight("embedding", VOCAB, HIDDEN), ids, name="/embed/Gather")
    caches, presents = [], []
    for number in range(layers):
        at = f"/model/layers.{number}"
        normed = w.norm(x, f"{at}/norm")
        q, k, v = (w.dense(normed, f"{at}/{one}_proj") for one in "qkv")
        past = [f"past_key_values.{number}.{one}" for one in ("key", "value")]
        outputs = [f"{at}/attn/0", f"present.{number}.key", f"present.{number}.value"]
        heads = {"num_heads": HEADS, "kv_num_heads": HEADS, "domain": "com.microsoft"}
        name = f"{at}/attn/GroupQueryAttention"
        w.nodes.append(helper.make_node("GroupQueryAttention", [q, k, v, *past, last, total], outputs, name, **heads))
        caches, presents = [*caches, *past], [*presents, *outputs[1:]]
        x = w.add("Add", x, w.dense(outputs[0], f"{at}/o_proj"), name=f"{at}/Add")
        up = w.gelu(w.dense(w.norm(x, f"{at}/norm_2"), f"{at}/up", HIDDEN, 2 * HIDDEN), f"{at}/gelu")
        x = w.add("Add", x, w.dense(up, f"{at}/down", 2 * HIDDEN), name=f"{at}/Add_1")
    w.nodes.append(
        helper.make_node("MatMul", [w.norm(x, "/norm"), w.weight("head", HIDDEN, VOCAB)], ["logits"], "/head")
    )
    value = helper.make_tensor_value_info
    inputs = [
        value(name, TensorProto.INT64, ["B", size]) for name, size in (("input_ids", "S"), ("attention_mask", "T"))
    ]
    inputs += [value(name, kind, ["B", HEADS, "P", SIZE]) for name in caches]
    outputs_ = [
        value("logits", kind, ["B", "S", VOCAB]),
        *(value(name, kind, ["B", HEADS, "T", SIZE]) for name in presents),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in w.weights.items()]
    graph = helper.make_graph(w.nodes, "deep", inputs, outputs_, tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.save(model, folder / "model.onnx", save_as_external_data=external, location="weights.bin", size_threshold=256)
    config = {
        "model": {"type": "llama", "context_length": 256, "vocab_size": VOCAB, "decoder": {"filename": "model.onnx"}}
    }
    (folder / "tokenizer.json").write_text("{}")
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder
