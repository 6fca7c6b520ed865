"""Where ONNX Runtime runs the nodes of a session and keeps its values, compared with the chosen device. Only nodes with
large values count: values that grow with the text, or are as wide as the vocabulary.

A node for which a provider has no kernel falls to the CPU silently. Its inputs and outputs are then copied between host
and device in every step. A cache that such a node owns lies in the host's memory: device memory that is bound to it is
copied once, at binding, so later steps would read a stale past. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
import onnxruntime as ort

from olive_ext.engine.forms.paged_attention import KERNELS
from olive_ext.errors import ProviderError, listed
from olive_ext.graph.nodes import ModelProto, attribute
from olive_ext.graph.value_shapes import Shapes
from olive_ext.model.providers.table import CPU

SMALL = 64
"""The most elements of a value that is small for any text: lengths, shapes, one position."""

_FLOAT = onnx.TensorProto.FLOAT
_FLOATS: dict[int, str] = {
    _FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}
_LENGTHS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
"""Operators that return int64, whatever they take."""

_TRUTHS = frozenset({"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"})


def large_nodes(model: onnx.ModelProto, *, floats_only: bool = False) -> dict[str, str]:
    """Node name -> a description ("GroupQueryAttention '/layers.0/attn' of float32"), for every node with a large
    output. Nodes without a name are left out.

    An output is small where it is known to have at most `SMALL` elements. So is one of integers or truth values with at
    most two axes, besides axes of few elements: token ids, masks and positions come from the host in each step. With
    `floats_only`, integers and truth values are always small: an encoder's, which runs once for a picture.
    """
    shapes, types = Shapes(model.graph), _types(model.graph)
    described = {}
    for node in model.graph.node:
        values = [value for value in node.output if value]
        if floats_only:
            values = [value for value in values if types.get(value, _FLOAT) in _FLOATS]
        if node.name and any(_is_large(shapes.of.get(value), types.get(value)) for value in values):
            dtype = next((_FLOATS[types[value]] for value in node.input if types.get(value) in _FLOATS), None)
            described[node.name] = f"{node.op_type} '{node.name}'" + (f" of {dtype}" if dtype else "")
    return described


def _is_large(shape: tuple[int | str | None, ...] | None, elem_type: int | None) -> bool:
    if shape is None:
        return True
    sizes = [axis for axis in shape if isinstance(axis, int)]
    if elem_type is not None and elem_type not in _FLOATS and len(shape) - len(sizes) <= 2:
        return len(shape) > 2 and math.prod(sizes) > SMALL
    return len(sizes) < len(shape) or math.prod(sizes) > SMALL


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """ONNX element types of values, as far as inputs, weights, annotations and operators determine them."""
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    for node in graph.node:
        elem_type = _type_of(node, types)
        if elem_type is not None:
            types |= {value: elem_type for value in node.output if value not in types}
    return types


def _type_of(node: onnx.NodeProto, types: dict[str, int]) -> int | None:
    """The type of the first output; None where it is not known."""
    if node.op_type == "Cast":
        return int(attribute(node, "to", _FLOAT))
    if node.op_type in _LENGTHS:
        return int(onnx.TensorProto.INT64)
    if node.op_type in _TRUTHS:
        return int(onnx.TensorProto.BOOL)
    if node.op_type in ("Constant", "ConstantOfShape"):
        value = attribute(node, "value", None)
        return int(value.data_type) if value is not None else None
    first = 1 if node.op_type == "Where" else 0
    return next((types[value] for value in node.input[first:] if value in types), None)


_CUDA_FLOATS = frozenset({"float16", "bfloat16"})
_KERNELS: Mapping[tuple[str, str], tuple[frozenset[str], str]] = {
    ("cuda", "GroupQueryAttention"): (_CUDA_FLOATS, "CUDA's GroupQueryAttention takes float16 and bfloat16"),
    ("webgpu", "Attention"): (
        frozenset(),
        "WebGPU has no Attention of opset 23 and later: export with GroupQueryAttention",
    ),
    **{
        (device, "PagedAttention"): (
            frozenset(kernel.floats),
            f"{kernel.provider}'s PagedAttention takes {' and '.join(kernel.floats)}",
        )
        for device, kernel in KERNELS.items()
    },
}
"""By device and operator, the types that the provider has kernels for, as numbers and as words (ONNX Runtime 1.31.1,
docs/OperatorKernels.md)."""

_HEAVY = frozenset({"Conv", "EPContext", "FusedMatMul", "Gemm", "MatMul", "MatMulBnb4", "MatMulInteger", "MatMulNBits"})
"""Where a model's arithmetic runs, and what a provider has compiled."""


class MisplacedError(ProviderError):
    """A session would partly run on another device than the chosen one."""


def misplaced(
    session: ort.InferenceSession,
    model: ModelProto,
    device: str,
    caches: Iterable[str] = (),
    *,
    floats_only: bool = False,
) -> str | None:
    """What `session`, opened on `model`, runs or keeps on another device than `device` (ONNX Runtime's name); None
    where all is well. `caches` are names of inputs and outputs that must lie on the device.

    A graph may leave arithmetic on lengths to the CPU, and with `floats_only` all arithmetic on integers; nodes with
    large values must not run there.
    """
    if device == "cpu":
        return None
    large = large_nodes(model, floats_only=floats_only)
    on_cpu = [large[node.name] for name, node in _assigned(session) if name == CPU and node.name in large]
    on_host = _on_host(session, caches)
    parts = []
    if on_cpu:
        parts.append(f"ONNX Runtime would run {listed(on_cpu, 3)} on the CPU")
    if on_host:
        parts.append(f"{listed(on_host, 3)} would lie in the host's memory")
    return "; ".join([*parts, *_hints(device, on_cpu)]) if parts else None


def untaken(session: ort.InferenceSession, provider: str) -> str | None:
    """The sentence that `provider` runs none of the session's products. None where it runs some, or a part that it has
    compiled, where there are no products, or where that is not recorded."""
    names = {name for name, node in _assigned(session) if node.op_type in _HEAVY}
    if not names or provider in names:
        return None
    return f"{provider} takes none of its products, which {' and '.join(sorted(names))} would run"


def predict_misplaced(model: ModelProto, device: str) -> str | None:
    """The same without a session, as far as the types of attention nodes predict it; None where they do not."""
    words = [
        node
        for node in large_nodes(model).values()
        if (kernel := _KERNELS.get((device, _operator(node)))) and node.rpartition(" of ")[2] not in kernel[0]
    ]
    if not words:
        return None
    return "; ".join([f"{listed(words, 3)} would run on the CPU", *_hints(device, words)])


def _operator(words: str) -> str:
    return words.partition(" ")[0]


def _hints(device: str, words: Iterable[str]) -> list[str]:
    operators = dict.fromkeys(map(_operator, words))
    return [_KERNELS[device, operator][1] for operator in operators if (device, operator) in _KERNELS]


def _assigned(session: ort.InferenceSession) -> Iterator[tuple[str, Any]]:
    """Every node that runs, with its provider's name; releases before 1.24 keep no record."""
    for part in getattr(session, "get_provider_graph_assignment_info", list)():
        yield from ((part.ep_name, node) for node in part.get_nodes())


def _on_host(session: ort.InferenceSession, names: Iterable[str]) -> list[str]:
    if not hasattr(session, "get_input_memory_infos"):  # releases before 1.24
        return []
    infos = [*session.get_input_memory_infos(), *session.get_output_memory_infos()]
    values, wanted = zip([*session.get_inputs(), *session.get_outputs()], infos, strict=True), set(names)
    return [value.name for value, info in values if value.name in wanted and info.name == "Cpu"]
