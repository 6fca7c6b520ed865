"""Shapes of a graph's values in symbols, as far as its inputs and operators tell; exporters' own hints are not read.

A symbol is what an input's axis is called; axes with one symbol have one length. "B*S" is the product of two. What is
not known is None: an axis, a number in a list, or the whole shape. Knows no session and no provider.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import numpy_helper

from olive_ext.graph.dims import Dim, Shape, broadcast, known_length, rest, total
from olive_ext.graph.edit import attribute

_SMALL = 8
"""Numbers of a constant that is read; longer ones are no shapes."""

_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})

SAME_SHAPE = frozenset(
    {"Abs", "BiasGelu", "Cast", "CastLike", "Clip", "DequantizeLinear", "DynamicQuantizeLinear", "Erf", "Exp"}
    | {"FastGelu", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LayerNormalization", "LeakyRelu", "Log", "Neg"}
    | {"Not", "QuantizeLinear", "QuickGelu", "RMSNormalization", "Reciprocal", "Relu", "RotaryEmbedding", "Sigmoid"}
    | {"SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax"}
    | {"Softplus", "Sqrt", "Swish", "Tanh", "Cos", "Sin", "Round"}
)
"""Operators whose first output has the shape of their first input."""

BROADCAST = frozenset(
    {"Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul"}
    | {"Or", "Pow", "Sub", "Where"}
)
REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare"})
_PRODUCTS = {"MatMul": 1, "MatMulInteger": 1, "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1, "QLinearMatMul": 3}
"""Products without attributes, and which input the second factor is."""

_ATTENTIONS = frozenset({"GroupQueryAttention", "MultiHeadAttention", "PagedAttention", "Attention"})
SKIPS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})


class Shapes:
    """`of[value]` is its shape, `numbers[value]` what a list of lengths (or one length, a list of one) holds.

    Nodes must stand in order of execution; what is read before it is computed stays unknown.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.of: dict[str, Shape] = {}
        self.numbers: dict[str, tuple[Dim, ...]] = {}
        for value in graph.input:
            self.of[value.name] = tuple(_declared(value, axis) for axis in range(_rank(value)))
        for tensor in graph.initializer:
            self._put_tensor(tensor.name, tensor)
        for node in graph.node:
            rule = _RULES.get(node.op_type)
            if rule is not None and node.domain in ("", "ai.onnx", "com.microsoft"):
                rule(self, node)

    def axis(self, node: onnx.NodeProto, rank: int, default: int = 0) -> int:
        """The attribute `axis`, counted from the front."""
        axis = int(attribute(node, "axis", default))
        return axis + rank if axis < 0 else axis

    def listed(self, node: onnx.NodeProto, name: str, place: int) -> tuple[Dim, ...] | None:
        """Numbers that older operators have as the attribute `name` and newer ones as an input; None if unknown."""
        if (given := attribute(node, name, None)) is not None:
            return tuple(given)
        return self.numbers.get(node.input[place]) if len(node.input) > place else None

    def _put_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        self.of[name] = tuple(tensor.dims)
        is_small = len(tensor.dims) <= 1 and all(size <= _SMALL for size in tensor.dims)
        if is_small and tensor.data_type in _INTEGERS and not tensor.external_data:
            self.numbers[name] = tuple(numpy_helper.to_array(tensor).reshape(-1).tolist())

    def _constant(self, node: onnx.NodeProto) -> None:
        entry = node.attribute[0]
        if entry.name == "value":
            self._put_tensor(node.output[0], entry.t)
        elif entry.name in ("value_int", "value_float"):
            self.of[node.output[0]] = ()
            if entry.name == "value_int":
                self.numbers[node.output[0]] = (entry.i,)
        elif entry.name in ("value_ints", "value_floats"):
            self.of[node.output[0]] = (len(entry.ints) + len(entry.floats),)
            if entry.name == "value_ints":
                self.numbers[node.output[0]] = tuple(entry.ints)

    def _same(self, node: onnx.NodeProto) -> None:
        shape = self.of.get(node.input[0])
        if shape is None:
            return
        self.of[node.output[0]] = shape
        if node.op_type in SKIPS and len(node.output) > 3:
            self.of[node.output[3]] = shape
        if node.op_type == "DynamicQuantizeLinear":
            self.of |= dict.fromkeys(node.output[1:], ())
        if node.op_type in ("Cast", "Identity") and node.input[0] in self.numbers:
            self.numbers[node.output[0]] = self.numbers[node.input[0]]

    def _broadcast(self, node: onnx.NodeProto) -> None:
        shapes = [self.of.get(value) for value in node.input]
        if (shape := broadcast(shapes)) is not None:
            self.of[node.output[0]] = shape

    def _product(self, node: onnx.NodeProto) -> None:
        left = self.of.get(node.input[0])
        right = self.of.get(node.input[_PRODUCTS.get(node.op_type, 1)])
        if left is None or right is None or min(len(left), len(right)) < 2:
            return
        lead = left[:-2] if len(right) == 2 else broadcast([left[:-2], right[:-2]])
        if lead is not None:
            self.of[node.output[0]] = (*lead, left[-2], right[-1])

    def _turned_product(self, node: onnx.NodeProto) -> None:
        """Gemm, and FusedMatMul with a weight."""
        left, right = self.of.get(node.input[0]), self.of.get(node.input[1])
        if left is None or right is None or len(right) != 2 or attribute(node, "transA", 0):
            return
        if not attribute(node, "transBatchA", 0):
            self.of[node.output[0]] = (*left[:-1], right[0] if attribute(node, "transB", 0) else right[1])

    def _packed_product(self, node: onnx.NodeProto) -> None:
        if (left := self.of.get(node.input[0])) is not None:
            self.of[node.output[0]] = (*left[:-1], int(attribute(node, "N", 0)) or None)

    def _attention(self, node: onnx.NodeProto) -> None:
        """The first output has the query's tokens; ONNX's own may have the heads on an axis before them."""
        query = self.of.get(node.input[0])
        if query is None or (len(query) != 3 and not (node.op_type == "PagedAttention" and len(query) == 2)):
            return
        width: Dim = None
        if node.op_type == "GroupQueryAttention" and isinstance(query[-1], int):
            heads, kv_heads = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0)
            width = query[-1] if node.input[1] else query[-1] * heads // max(1, heads + 2 * kv_heads)
        elif node.op_type == "MultiHeadAttention" and len(node.input) > 2:
            value = self.of.get(node.input[2], ())
            width = value[-1] if len(value) == 3 else None
        self.of[node.output[0]] = (*query[:-1], width)

    def _gather(self, node: onnx.NodeProto) -> None:
        data, index = self.of.get(node.input[0]), self.of.get(node.input[1])
        if data is None or index is None or (node.op_type != "Gather" and attribute(node, "gather_axis", 0)):
            return
        axis = self.axis(node, len(data))
        after: Shape = data[axis + 1 :] if node.op_type == "Gather" else (None,) * (len(data) - 1)
        self.of[node.output[0]] = (*data[:axis], *index, *after)
        numbers, places = self.numbers.get(node.input[0]), self.numbers.get(node.input[1])
        if numbers is not None and places is not None:
            self.numbers[node.output[0]] = tuple(
                numbers[place] if isinstance(place, int) and -len(numbers) <= place < len(numbers) else None
                for place in places
            )

    def _shape(self, node: onnx.NodeProto) -> None:
        if (shape := self.of.get(node.input[0])) is not None:
            part = shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))]
            self.of[node.output[0]] = (len(part),)
            self.numbers[node.output[0]] = part

    def _reshape(self, node: onnx.NodeProto) -> None:
        data, wanted = self.of.get(node.input[0]), self.numbers.get(node.input[1])
        if wanted is None:
            return
        keeps = not attribute(node, "allowzero", 0)
        known: Shape = () if data is None else data
        dims = [
            (known[axis] if axis < len(known) else None) if size == 0 and keeps else size
            for axis, size in enumerate(wanted)
        ]
        if -1 in dims:
            place = dims.index(-1)
            dims[place] = None if data is None else rest(data, [*dims[:place], *dims[place + 1 :]])
        self.of[node.output[0]] = tuple(dims)

    def _transpose(self, node: onnx.NodeProto) -> None:
        if (shape := self.of.get(node.input[0])) is not None:
            order = attribute(node, "perm", None) or range(len(shape))[::-1]
            self.of[node.output[0]] = tuple(shape[axis] for axis in order)

    def _unsqueeze(self, node: onnx.NodeProto) -> None:
        shape, axes = self.of.get(node.input[0]), self.listed(node, "axes", 1)
        if shape is None or axes is None:
            return
        rank = len(shape) + len(axes)
        places = {axis + rank if axis < 0 else axis for axis in axes if isinstance(axis, int)}
        rest = iter(shape)
        self.of[node.output[0]] = tuple(1 if axis in places else next(rest) for axis in range(rank))
        self._keep_numbers(node)

    def _squeeze(self, node: onnx.NodeProto) -> None:
        shape, axes = self.of.get(node.input[0]), self.listed(node, "axes", 1)
        if shape is None or axes is None:
            return
        gone = {axis + len(shape) if axis < 0 else axis for axis in axes if isinstance(axis, int)}
        self.of[node.output[0]] = tuple(size for axis, size in enumerate(shape) if axis not in gone)
        self._keep_numbers(node)

    def _keep_numbers(self, node: onnx.NodeProto) -> None:
        if (numbers := self.numbers.get(node.input[0])) is not None:
            self.numbers[node.output[0]] = numbers

    def _concat(self, node: onnx.NodeProto) -> None:
        shapes = [self.of.get(value) for value in node.input]
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes) and known and len({len(shape) for shape in known}) == 1:
            axis = self.axis(node, len(known[0]))
            size = total([shape[axis] for shape in known])
            self.of[node.output[0]] = (*known[0][:axis], size, *known[0][axis + 1 :])
        lists = [self.numbers.get(value) for value in node.input]
        if any(numbers is not None for numbers in lists) and all(
            shape is not None and len(shape) == 1 for shape in known
        ):
            parts = [
                known_length(shape) if numbers is None else numbers
                for shape, numbers in zip(shapes, lists, strict=True)
            ]
            if all(part is not None for part in parts):
                self.numbers[node.output[0]] = tuple(number for part in parts for number in part or ())

    def _slice(self, node: onnx.NodeProto) -> None:
        shape = self.of.get(node.input[0])
        starts, ends, axes = (self.listed(node, name, at) for at, name in enumerate(("starts", "ends", "axes"), 1))
        if shape is None:
            return
        steps = self.numbers.get(node.input[4]) if len(node.input) > 4 and node.input[4] else (1,)
        if axes is None and (len(node.input) > 3 and node.input[3]):
            return
        axes = tuple(range(len(starts))) if axes is None and starts is not None else axes
        if axes is None:
            return
        cut = {axis + len(shape) if isinstance(axis, int) and axis < 0 else axis for axis in axes}
        self.of[node.output[0]] = tuple(None if axis in cut else size for axis, size in enumerate(shape))
        numbers = self.numbers.get(node.input[0])
        is_plain = steps == (1,) and starts is not None and ends is not None and len(starts) == len(ends) == 1
        if numbers is not None and is_plain and starts and ends:
            first, last = starts[0], ends[0]
            if isinstance(first, int) and isinstance(last, int):
                self.numbers[node.output[0]] = numbers[first:last]
                self.of[node.output[0]] = (len(numbers[first:last]),)

    def _split(self, node: onnx.NodeProto) -> None:
        shape = self.of.get(node.input[0])
        if shape is None:
            return
        axis = self.axis(node, len(shape))
        sizes = self.listed(node, "split", 1)
        for number, output in enumerate(node.output):
            size = sizes[number] if sizes is not None and number < len(sizes) else None
            self.of[output] = (*shape[:axis], size, *shape[axis + 1 :])

    def _expand(self, node: onnx.NodeProto) -> None:
        if (shape := broadcast([self.of.get(node.input[0]), self.numbers.get(node.input[1])])) is not None:
            self.of[node.output[0]] = shape

    def _reduce(self, node: onnx.NodeProto) -> None:
        shape, axes = self.of.get(node.input[0]), self.listed(node, "axes", 1)
        if shape is None or axes is None or not all(isinstance(axis, int) for axis in axes):
            return
        gone = {axis + len(shape) if axis < 0 else axis for axis in axes if isinstance(axis, int)}
        kept = attribute(node, "keepdims", 1)
        dims = [(1 if axis in gone else size) for axis, size in enumerate(shape) if kept or axis not in gone]
        self.of[node.output[0]] = tuple(dims)


_RULES: dict[str, Callable[[Shapes, onnx.NodeProto], None]] = {
    **dict.fromkeys(SAME_SHAPE, Shapes._same),
    **dict.fromkeys(BROADCAST, Shapes._broadcast),
    **dict.fromkeys(REDUCTIONS, Shapes._reduce),
    **dict.fromkeys(_PRODUCTS, Shapes._product),
    **dict.fromkeys(("Gemm", "FusedMatMul"), Shapes._turned_product),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), Shapes._packed_product),
    **dict.fromkeys(_ATTENTIONS, Shapes._attention),
    **dict.fromkeys(("Gather", "GatherBlockQuantized"), Shapes._gather),
    "Concat": Shapes._concat,
    "Constant": Shapes._constant,
    "Expand": Shapes._expand,
    "Reshape": Shapes._reshape,
    "Shape": Shapes._shape,
    "Slice": Shapes._slice,
    "Split": Shapes._split,
    "Squeeze": Shapes._squeeze,
    "Transpose": Shapes._transpose,
    "Unsqueeze": Shapes._unsqueeze,
}


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _declared(value: onnx.ValueInfoProto, axis: int) -> Dim:
    dim = value.type.tensor_type.shape.dim[axis]
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or f"{value.name}:{axis}"
