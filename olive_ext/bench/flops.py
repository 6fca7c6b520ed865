"""Floating-point operations of a model, read from its graph, and how far a run is from the machine's best.

For T tokens fed, of which the distinct ones attend to C positions in all, and R rows read by the head:

    T x 2 x (weights of all matrix products but the head's, and but those that run on the rows read only)
  + T / distinct x C x 4 x (layers x heads x head size)          the attention, its windows not regarded
  + R x 2 x (weights of the head, and of those that run on the rows read only)

Which these are is what the engine says of the graph that it runs (`scored_row_products`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.errors import ModelError
from olive_ext.graph.onnx_file import load_graph

_PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
_PACKED = {"MatMulNBits", "MatMulBnb4"}
_THROUGH = {"DequantizeLinear", "Transpose", "Cast", "Identity"}
_ROWS_AT_ONCE = (128, 256, 512, 1024)
_TRIES, _IN_A_ROW = 10, 4


@dataclass(frozen=True)
class Work:
    """Operations of one token: `layers` in products with weights, `attention` for each position attended to, `head` for
    each row read; and the products' (inner size, columns) with how many there are."""

    layers: float
    attention: float
    head: float
    matrices: tuple[tuple[int, int, int], ...]

    def of(self, fed: float, tokens: Mapping[str, float], late: Iterable[Sequence[int]] = ()) -> float:
        """Operations of a run that fed `fed` tokens for requests with these `count_tokens`. `late`: (inner size,
        columns) of the products among `layers` that ran on the rows read only."""
        attended = tokens["attended"] * fed / max(1.0, tokens["distinct"])
        moved = sum(2.0 * inner * columns for inner, columns in late)
        return fed * (self.layers - moved) + attended * self.attention + tokens["rows"] * (self.head + moved)


def read_work(graph: Path, config: Mapping[str, Any]) -> Work | None:
    """`config` is genai_config.json or config.json. None where graph or configuration do not tell."""
    sizes = _sizes(config)
    try:
        products = list(_products(load_graph(graph).graph))
    except ModelError:
        return None
    if sizes is None or not products:
        return None
    width, vocabulary = sizes
    inside = [size for size in products if size[1] != vocabulary]
    head = [size for size in products if size[1] == vocabulary]
    matrices = tuple((inner, columns, number) for (inner, columns), number in sorted(Counter(inside).items()))
    return Work(
        layers=sum(2.0 * inner * columns for inner, columns in inside),
        attention=4.0 * width,
        head=sum(2.0 * inner * columns for inner, columns in head),
        matrices=matrices,
    )


def _sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Layers x heads x head size, and the vocabulary's size."""
    model = config.get("model", config.get("text_config", config))
    own = model.get("decoder", model)
    try:
        heads = own["num_attention_heads"]
        size = own.get("head_size") or own.get("head_dim") or own["hidden_size"] // heads
        return own["num_hidden_layers"] * heads * size, model["vocab_size"]
    except (KeyError, TypeError):
        return None


def _products(graph: Any) -> Iterator[tuple[int, int]]:
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _THROUGH and node.input[0] in dims:
            dims[node.output[0]] = dims[node.input[0]]
            if node.op_type == "Transpose":
                dims[node.output[0]] = dims[node.input[0]][::-1]
        elif node.op_type in _PACKED:
            number = {item.name: item.i for item in node.attribute}
            yield number["K"], number["N"]
        elif node.op_type in _PRODUCTS and len(dims.get(node.input[1], ())) == 2:
            inner, columns = dims[node.input[1]]
            is_turned = any(item.name == "transB" and item.i for item in node.attribute)
            yield (columns, inner) if is_turned else (inner, columns)


def measure_ceiling(matrices: tuple[tuple[int, int, int], ...], device: str, dtype: str) -> float:
    """Operations per second of these products one after the other, at the best of several numbers of rows.

    In float32, on a CUDA device in `dtype` (float16 for "auto").
    """
    import torch

    kind = torch.float32 if device == "cpu" else getattr(torch, "float16" if dtype == "auto" else dtype)
    weights = [(torch.randn(inner, columns, device=device, dtype=kind), number) for inner, columns, number in matrices]
    operations = sum(2.0 * inner * columns * number for inner, columns, number in matrices)
    return max(rows * operations / _seconds(weights, rows, device) for rows in _ROWS_AT_ONCE)


def _seconds(weights: list[tuple[Any, int]], rows: int, device: str) -> float:
    """Of one pass over the weights with `rows` rows, each product at its fastest of several."""
    spent = 0.0
    for weight, number in weights:
        inputs = weight.new_empty(rows, weight.shape[0]).normal_()
        spent += number * min(_product_seconds(inputs, weight, device) for _ in range(_TRIES))
    return spent


def _product_seconds(inputs: Any, weight: Any, device: str) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(_IN_A_ROW):
        inputs @ weight
    _wait(device)
    return (time.perf_counter() - begin) / _IN_A_ROW


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)
