"""What requests need at least: distinct tokens, and floating-point operations read from the model's graph.

Measures the machine's best rate of such operations, too; knows no backend.

For T tokens fed, of which the distinct ones attend to C positions in all, and R rows read by the head:

    T x 2 x (weights of all matrix products but the head's, and but those that run on the rows read only)
  + T / distinct x C x 4 x (layers x heads x head size)          the attention, its windows not regarded
  + R x 2 x (weights of the head, and of those that run on the rows read only)

The engine names the latter products in its description of the graph that it runs (`scored_row_products`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.engine.requests import TokenArray, common_prefix
from olive_ext.errors import ModelError
from olive_ext.model.files.content import load_graph

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


def count_tokens(inputs: Iterable[tuple[Sequence[int], int]]) -> dict[str, int]:
    """Counts over `inputs`, pairs of (fed tokens, how many of the last positions are read): `naive` and `distinct`
    tokens; `attended`: positions that the distinct ones attend to, themselves included; `rows`: distinct positions
    that are read."""
    naive = distinct = attended = rows = 0
    before: TokenArray = np.empty(0, np.int32)
    read: list[bool] = []
    for key, num_read in sorted((_key(tokens), number) for tokens, number in inputs):
        fed = np.frombuffer(key, np.int32)
        shared = common_prefix(before, fed)
        naive += len(fed)
        distinct += len(fed) - shared
        attended += sum(range(shared + 1, len(fed) + 1))
        read = read[:shared] + [False] * (len(fed) - shared)
        for position in range(len(fed) - num_read, len(fed)):
            rows += not read[position]
            read[position] = True
        before = fed
    return {"naive": naive, "distinct": distinct, "attended": attended, "rows": rows}


def _key(tokens: Sequence[int]) -> bytes:
    """Texts with a common prefix have neighbouring keys. A hundred thousand texts take memory, as Python's integers
    eight times as much."""
    return np.array(tokens, np.int64).astype(np.int32).tobytes()


def read_work(graph: Path, config: Mapping[str, Any]) -> Work | None:
    """`config` is genai_config.json or config.json. None where graph or configuration lack the sizes."""
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
    """Layers x heads x head size, and the vocabulary's size; None where the configuration lacks them."""
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


def measure_ceiling(matrices: Sequence[Sequence[int]], device: str, dtype: str) -> float:
    """Operations per second of these products one after the other, at the best of several numbers of rows.

    In float32, on a CUDA device in `dtype` (float16 for "auto").
    """
    import torch

    is_cpu = device == "cpu"
    kind = torch.float32 if is_cpu else getattr(torch, "float16" if dtype == "auto" else dtype)
    wait = (lambda: None) if is_cpu else (lambda: torch.cuda.synchronize(device))
    weights = [(torch.randn(inner, columns, device=device, dtype=kind), number) for inner, columns, number in matrices]
    operations = sum(2.0 * inner * columns * number for inner, columns, number in matrices)
    return max(
        rows * operations / sum(number * _fastest_seconds(weight, rows, wait) for weight, number in weights)
        for rows in _ROWS_AT_ONCE
    )


def _fastest_seconds(weight: Any, rows: int, wait: Callable[[], None]) -> float:
    """Seconds of one product with `rows` rows, the least of several tries; `wait` returns when the device is done."""
    inputs = weight.new_empty(rows, weight.shape[0]).normal_()
    tries = []
    for _ in range(_TRIES):
        wait()
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            inputs @ weight
        wait()
        tries.append((time.perf_counter() - begin) / _IN_A_ROW)
    return min(tries)
