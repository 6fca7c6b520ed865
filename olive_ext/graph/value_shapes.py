"""Shapes of a graph's values in symbols, inferred from its inputs and operators; exporters' own shapes are not read.

A symbol is the name of an input's axis; axes with one symbol have one length. "B*S" is the product of two. An axis, a
number in a list, or a whole shape that is not known is None. Knows no session and no provider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import onnx
from onnx import numpy_helper

from olive_ext.graph.nodes import attribute, constants_of

Dim = int | str | None
Shape = tuple[Dim, ...]


def broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of an element-wise operator's result; None where one of `shapes` is not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or not known:
        return None
    rank = max(len(shape) for shape in known)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in known]
    lengths = [set(sizes) - {1} or {1} for sizes in zip(*aligned, strict=True)]
    return tuple(sizes.pop() if len(sizes) == 1 else None for sizes in lengths)  # of others, one may be 1


def factors(dims: Sequence[Dim]) -> tuple[int | str, ...] | None:
    """The lengths that are multiplied, in their order and without ones; None where one is not known."""
    parts: list[int | str] = []
    for dim in dims:
        if dim is None:
            return None
        parts += [int(part) if part.isdigit() else part for part in str(dim).split("*")]
    return tuple(part for part in parts if part != 1)


def rest(data: Sequence[Dim], dims: Sequence[Dim]) -> Dim:
    """The number of elements of shape `data` divided by that of `dims`; None where it is not known."""
    have, taken = factors(data), factors(dims)
    if have is None or taken is None:
        return None
    symbols = [part for part in have if isinstance(part, str)]
    for part in taken:
        if isinstance(part, str):
            if part not in symbols:
                return None
            symbols.remove(part)
    dividend, divisor = (math.prod(part for part in parts if isinstance(part, int)) for parts in (have, taken))
    if not divisor or dividend % divisor:
        return None
    number = dividend // divisor
    return "*".join([*symbols, *([str(number)] if number != 1 else [])]) if symbols else number


_SMALL = 8
"""The longest constant that is read; longer ones are no shapes."""

_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})

ELEMENT_WISE = frozenset(
    {"Abs", "BiasGelu", "Cast", "Clip", "DequantizeLinear", "Elu", "Erf", "Exp", "FastGelu", "Gelu", "HardSigmoid"}
    | {"HardSwish", "Identity", "LeakyRelu", "Log", "Mish", "Neg", "QuantizeLinear", "QuickGelu", "Reciprocal"}
    | {"Relu", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh"}
)
NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
SKIP_NORMS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
_SAME_SHAPE = frozenset(
    {"CastLike", "Cos", "CumSum", "DynamicQuantizeLinear", "Not", "RotaryEmbedding", "Round", "Sin", "Softmax"}
    | {*ELEMENT_WISE, *NORMS, *SKIP_NORMS}
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


class Shapes:
    """`of[value]` is the shape of a value; `numbers[value]` are the elements of one that holds lengths (a scalar as a
    list of one).

    Nodes must stand in order of execution; a value that is read before it is computed stays unknown.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.of: dict[str, Shape] = {}
        self.numbers: dict[str, tuple[Dim, ...]] = {}
        for value in graph.input:
            self.of[value.name] = _declared(value)
        for name, tensor in constants_of(graph).items():
            self.of[name] = tuple(tensor.dims)
            is_small = len(tensor.dims) <= 1 and all(size <= _SMALL for size in tensor.dims)
            if is_small and tensor.data_type in _INTEGERS and not tensor.external_data:
                self.numbers[name] = tuple(numpy_helper.to_array(tensor).reshape(-1).tolist())
        for node in graph.node:
            rule, num_known = _RULES.get(node.op_type, (None, 0))
            if rule is None or node.domain not in ("", "ai.onnx", "com.microsoft"):
                continue
            known = [shape for value in node.input[:num_known] if (shape := self.of.get(value)) is not None]
            if len(known) == num_known and (shape := rule(self, node, *known)) is not None:
                self.of[node.output[0]] = shape

    def _axis(self, node: onnx.NodeProto, rank: int) -> int:
        axis = int(attribute(node, "axis", 0))
        return axis + rank if axis < 0 else axis

    def listed(self, node: onnx.NodeProto, name: str, place: int) -> tuple[Dim, ...] | None:
        """Numbers that older operators have as the attribute `name` and newer ones as an input; None if unknown."""
        if (given := attribute(node, name, None)) is not None:
            return tuple(given)
        return self.numbers.get(node.input[place]) if len(node.input) > place else None

    def _same_shape(self, node: onnx.NodeProto, shape: Shape) -> Shape:
        if node.op_type in SKIP_NORMS and len(node.output) > 3:
            self.of[node.output[3]] = shape
        if node.op_type == "DynamicQuantizeLinear":
            self.of |= dict.fromkeys(node.output[1:], ())
        return self._with_numbers(node, shape) if node.op_type in ("Cast", "Identity") else shape

    def _with_numbers(self, node: onnx.NodeProto, shape: Shape) -> Shape:
        """`shape`, of an output that holds the same numbers as the first input."""
        if (numbers := self.numbers.get(node.input[0])) is not None:
            self.numbers[node.output[0]] = numbers
        return shape

    def _broadcast(self, node: onnx.NodeProto) -> Shape | None:
        return broadcast([self.of.get(value) for value in node.input])

    def _product(self, node: onnx.NodeProto, left: Shape) -> Shape | None:
        right = self.of.get(node.input[_PRODUCTS[node.op_type]])
        if right is None or min(len(left), len(right)) < 2:
            return None
        lead = left[:-2] if len(right) == 2 else broadcast([left[:-2], right[:-2]])
        return None if lead is None else (*lead, left[-2], right[-1])

    def _gemm(self, node: onnx.NodeProto, left: Shape, right: Shape) -> Shape | None:
        if len(right) != 2 or attribute(node, "transA", 0) or attribute(node, "transBatchA", 0):
            return None
        return (*left[:-1], right[0] if attribute(node, "transB", 0) else right[1])

    def _packed_product(self, node: onnx.NodeProto, left: Shape) -> Shape:
        return (*left[:-1], int(attribute(node, "N", 0)) or None)

    def _attention(self, node: onnx.NodeProto, query: Shape) -> Shape | None:
        """The first output has the query's tokens; that of ONNX's own Attention may have the heads on an axis before
        them, so that its width is not known."""
        if len(query) != 3 and not (node.op_type == "PagedAttention" and len(query) == 2):
            return None
        width: Dim = None
        is_grouped = node.op_type in ("GroupQueryAttention", "PagedAttention")
        if is_grouped and isinstance(query[-1], int) and not attribute(node, "v_head_size", 0):
            heads, kv_heads = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0)
            width = query[-1] if node.input[1] else query[-1] * heads // max(1, heads + 2 * kv_heads)
        elif node.op_type == "MultiHeadAttention" and len(node.input) > 2:
            value = self.of.get(node.input[2], ())
            width = value[-1] if len(value) == 3 else None
        return (*query[:-1], width)

    def _gather(self, node: onnx.NodeProto, data: Shape, index: Shape) -> Shape | None:
        if node.op_type != "Gather" and attribute(node, "gather_axis", 0):
            return None
        numbers, places = self.numbers.get(node.input[0]), self.numbers.get(node.input[1])
        if numbers is not None and places is not None:
            self.numbers[node.output[0]] = tuple(
                numbers[place] if isinstance(place, int) and -len(numbers) <= place < len(numbers) else None
                for place in places
            )
        axis = self._axis(node, len(data))
        after: Shape = data[axis + 1 :] if node.op_type == "Gather" else (None,) * (len(data) - 1)
        return (*data[:axis], *index, *after)

    def _shape(self, node: onnx.NodeProto, shape: Shape) -> Shape:
        part = shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))]
        self.numbers[node.output[0]] = part
        return (len(part),)

    def _reshape(self, node: onnx.NodeProto) -> Shape | None:
        data, wanted = self.of.get(node.input[0]), self.numbers.get(node.input[1])
        if wanted is None:
            return None
        keeps = not attribute(node, "allowzero", 0)
        known: Shape = () if data is None else data
        dims = [
            (known[axis] if axis < len(known) else None) if size == 0 and keeps else size
            for axis, size in enumerate(wanted)
        ]
        if -1 in dims:
            place = dims.index(-1)
            dims[place] = None if data is None else rest(data, [*dims[:place], *dims[place + 1 :]])
        return tuple(dims)

    def _transpose(self, node: onnx.NodeProto, shape: Shape) -> Shape:
        return tuple(shape[axis] for axis in attribute(node, "perm", None) or range(len(shape))[::-1])

    def _unsqueeze(self, node: onnx.NodeProto, shape: Shape) -> Shape | None:
        if (axes := self.listed(node, "axes", 1)) is None:
            return None
        rank, sizes = len(shape) + len(axes), iter(shape)
        new = _from_front(axes, rank)
        return self._with_numbers(node, tuple(1 if axis in new else next(sizes) for axis in range(rank)))

    def _squeeze(self, node: onnx.NodeProto, shape: Shape) -> Shape | None:
        if (axes := self.listed(node, "axes", 1)) is None:
            return None
        gone = _from_front(axes, len(shape))
        return self._with_numbers(node, tuple(size for axis, size in enumerate(shape) if axis not in gone))

    def _concat(self, node: onnx.NodeProto) -> Shape | None:
        shapes = [self.of.get(value) for value in node.input]
        known = [shape for shape in shapes if shape is not None]
        lists = [self.numbers.get(value) for value in node.input]
        if any(numbers is not None for numbers in lists) and all(len(shape) == 1 for shape in known):
            for at, shape in enumerate(shapes):  # of others the length may be known
                if lists[at] is None and shape is not None and isinstance(shape[0], int):
                    lists[at] = (None,) * shape[0]
            if all(part is not None for part in lists):
                self.numbers[node.output[0]] = tuple(number for part in lists for number in part or ())
        if len(known) != len(shapes) or len({len(shape) for shape in known}) != 1:
            return None
        axis = self._axis(node, len(known[0]))
        sizes = [size for shape in known if isinstance(size := shape[axis], int)]
        total = sum(sizes) if len(sizes) == len(known) else None
        return (*known[0][:axis], total, *known[0][axis + 1 :])

    def _slice(self, node: onnx.NodeProto, shape: Shape) -> Shape | None:
        numbers = self.numbers.get(node.input[0])
        starts, ends, axes = (self.listed(node, name, at) for at, name in enumerate(("starts", "ends", "axes"), 1))
        if axes is None and starts is not None and not any(node.input[3:4]):
            axes = tuple(range(len(starts)))
        if axes is None:
            return None
        has_steps = len(node.input) > 4 and node.input[4]
        if numbers is not None and (not has_steps or self.numbers.get(node.input[4]) == (1,)):
            match starts, ends:
                case (int(first),), (int(last),):
                    self.numbers[node.output[0]] = part = numbers[first:last]
                    return (len(part),)
        cut = _from_front(axes, len(shape))
        return tuple(None if axis in cut else size for axis, size in enumerate(shape))

    def _split(self, node: onnx.NodeProto, shape: Shape) -> Shape:
        axis = self._axis(node, len(shape))
        sizes = self.listed(node, "split", 1)
        for number, output in enumerate(node.output):
            size = sizes[number] if sizes is not None and number < len(sizes) else None
            self.of[output] = (*shape[:axis], size, *shape[axis + 1 :])
        return self.of[node.output[0]]

    def _expand(self, node: onnx.NodeProto) -> Shape | None:
        return broadcast([self.of.get(node.input[0]), self.numbers.get(node.input[1])])

    def _reduce(self, node: onnx.NodeProto, shape: Shape) -> Shape | None:
        axes = self.listed(node, "axes", 1)
        if axes is None or not all(isinstance(axis, int) for axis in axes):
            return None
        gone = _from_front(axes, len(shape))
        kept = attribute(node, "keepdims", 1)
        return tuple((1 if axis in gone else size) for axis, size in enumerate(shape) if kept or axis not in gone)


_RULES: dict[str, tuple[Callable[..., Shape | None], int]] = {
    **dict.fromkeys(_SAME_SHAPE, (Shapes._same_shape, 1)),
    **dict.fromkeys(BROADCAST, (Shapes._broadcast, 0)),
    **dict.fromkeys(REDUCTIONS, (Shapes._reduce, 1)),
    **dict.fromkeys(_PRODUCTS, (Shapes._product, 1)),
    **dict.fromkeys(("Gemm", "FusedMatMul"), (Shapes._gemm, 2)),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), (Shapes._packed_product, 1)),
    **dict.fromkeys(_ATTENTIONS, (Shapes._attention, 1)),
    **dict.fromkeys(("Gather", "GatherBlockQuantized"), (Shapes._gather, 2)),
    "Concat": (Shapes._concat, 0),
    "Expand": (Shapes._expand, 0),
    "Reshape": (Shapes._reshape, 0),
    "Shape": (Shapes._shape, 1),
    "Slice": (Shapes._slice, 1),
    "Split": (Shapes._split, 1),
    "Squeeze": (Shapes._squeeze, 1),
    "Transpose": (Shapes._transpose, 1),
    "Unsqueeze": (Shapes._unsqueeze, 1),
}
"""The rule of each operator, and of how many of its first inputs the shapes must be known, which it is given."""


def _from_front(axes: Iterable[Dim], rank: int) -> set[int]:
    return {axis + rank if axis < 0 else axis for axis in axes if isinstance(axis, int)}


def _declared(value: onnx.ValueInfoProto) -> Shape:
    dims = enumerate(value.type.tensor_type.shape.dim)
    return tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or f"{value.name}:{axis}"
        for axis, dim in dims
    )
