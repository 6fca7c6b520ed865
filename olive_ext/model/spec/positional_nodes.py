"""The nodes of a decoder's graph that depend on positions, masks, lengths and token ids alone, run on small steps.

Knows no session, and no names of inputs. Axes: B rows, S tokens of a row, P positions before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_constant_of_shape import ConstantOfShape
from onnx.reference.ops.op_expand import Expand
from onnx.reference.ops.op_range import Range
from onnx.reference.ops.op_tile import Tile

from olive_ext.errors import one_line
from olive_ext.graph.nodes import attribute, subgraphs
from olive_ext.model.spec.role_inputs import StepArrays, input_array
from olive_ext.model.types import InputSpec, KvTensor, Role, StateTensor

Array = npt.NDArray[Any]
Rows = Sequence[tuple[int, ...]]
"""For each row of a step its positions before, and how many tokens; and the last of these, where it is not 0 as all."""

Run = Callable[[Rows, bool], dict[str, Array]]
"""What computes values of a step, where those that are given are one truth."""


class UnrunnableError(Exception):
    """A stranger's nodes cannot be run on the host; trials on the opened model remain."""


@contextmanager
def _runnable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # operators of ONNX's reference fail with whatever numpy and Python raise
        raise UnrunnableError(one_line(error)) from error


_DEFAULT = ("", "ai.onnx")

_REPEATING = frozenset({"Loop", "Scan"})
"""Operators that may never end: what they make is not read."""

MOST_VALUES = 2**24
"""Numbers of a tensor that an operator may make of sizes that it reads."""


def _read(node: onnx.NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for body in subgraphs(node):
        made = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
        made |= {name for inner in body.node for name in inner.output}
        yield from (name for inner in body.node for name in _read(inner) if name not in made)
        yield from (value.name for value in body.output if value.name not in made)


def _repeats(node: onnx.NodeProto) -> bool:
    return node.op_type in _REPEATING or any(_repeats(inner) for body in subgraphs(node) for inner in body.node)


class PositionalNodes:
    """The nodes that depend on positions, masks, lengths, shapes and token ids alone, and not on what a token means."""

    def __init__(
        self, model: onnx.ModelProto, inputs: Sequence[InputSpec], caches: Sequence[KvTensor | StateTensor]
    ) -> None:
        self._model = model
        self._inputs = {entry.tensor.name: entry for entry in inputs if entry.role is not Role.BLOCK_TABLE}
        self._caches = {cache.past: cache for cache in caches}
        graph = model.graph
        self._known = {tensor.name for tensor in graph.initializer}
        self._tokens = {name for name, entry in self._inputs.items() if entry.role is Role.INPUT_IDS}
        is_endless = any(_repeats(node) for function in model.functions for node in function.node)
        self._domains = {*_DEFAULT, *(function.domain for function in model.functions if not is_endless)}
        self._hints = {value.name: value for value in graph.value_info}
        self._values = set(self._inputs)
        self.nodes: list[onnx.NodeProto] = []
        self._shapes: dict[str, str] = {}
        """The outputs of nodes that ask for the shape of something else, by its name."""

        self.frontier: dict[str, onnx.NodeProto] = {}
        """The values that other nodes read, each with the first of these."""

        for node in graph.node:
            self._place(node)

    def _place(self, node: onnx.NodeProto) -> None:
        read = list(_read(node))
        if node.op_type == "Shape" and read[0] not in self._values | self._known:
            if read[0] in self._caches or self._is_hinted(read[0]):
                self._shapes[node.output[0]] = read[0]
                self._values.add(node.output[0])
                self.nodes.append(node)
            return
        if all(name in self._known for name in read):
            if node.domain in self._domains and not _repeats(node):
                self._known.update(node.output)
                self.nodes.append(node)
            return
        if self._is_positional(node, read):
            self._values.update(node.output)
            if self._tokens.intersection(read):
                self._tokens.update(node.output)
            self.nodes.append(node)
            return
        for name in read:
            if name in self._values:
                self.frontier.setdefault(name, node)

    def _is_positional(self, node: onnx.NodeProto, read: list[str]) -> bool:
        if node.domain not in self._domains or _repeats(node):
            return False
        if not all(name in self._values or name in self._known for name in read):
            return False
        # A table that is looked up by token ids holds what tokens mean.
        return not (node.op_type == "Gather" and node.input[0] in self._known and node.input[1] in self._tokens)

    def _is_hinted(self, name: str) -> bool:
        hint = self._hints.get(name)
        symbols = {dim for entry in self._inputs.values() for dim in entry.tensor.shape if isinstance(dim, str)}
        dims = hint.type.tensor_type.shape.dim if hint is not None else ()
        return bool(dims) and all(dim.HasField("dim_value") or dim.dim_param in symbols for dim in dims)

    def constants(self) -> list[int]:
        """Whole numbers in the nodes, ascending."""
        values = (attribute(node, "value", None) for node in self.nodes)
        tensors = [value for value in values if isinstance(value, TensorProto)]
        read = {name for node in self.nodes for name in node.input}
        tensors += [tensor for tensor in self._model.graph.initializer if tensor.name in read]
        numbers = set()
        for tensor in tensors:
            if int(np.prod(tensor.dims)) == 1 and tensor.data_location != TensorProto.EXTERNAL:
                number = float(numpy_helper.to_array(tensor).reshape(-1)[0])
                numbers |= {int(number)} if np.isfinite(number) and number == int(number) else set()
        for node in self.nodes:
            numbers |= {entry.i for entry in node.attribute if node.op_type == "Constant" and entry.name == "value_int"}
        return sorted(numbers)

    def count(self, wanted: Iterable[str]) -> int:
        """How many nodes compute the values `wanted`."""
        return len(self._behind(set(wanted), set())[0])

    def reads_tokens(self, wanted: Iterable[str]) -> bool:
        """Whether the values `wanted` follow from token ids."""
        return not self._tokens.isdisjoint(self._behind(set(wanted), set())[1] - set(wanted))

    def values(self, wanted: Iterable[str]) -> list[str]:
        """What the nodes behind the values `wanted` make."""
        return [name for node in reversed(self._behind(set(wanted), set())[0]) for name in node.output if name]

    def _behind(self, wanted: set[str], given: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes that compute the values `wanted`, the last first, and all values that these read or make."""
        needed, kept = wanted - given, []
        for node in reversed(self.nodes):
            if needed.intersection(node.output) and not given.issuperset(node.output):
                kept.append(node)
                if node.output[0] not in self._shapes:
                    needed.update(_read(node))
        return kept, needed

    @_runnable()
    def cut(self, wanted: Iterable[str], given: Iterable[str] = ()) -> Run:
        """What computes values of a step, where those `given` are one truth. Both may raise `UnrunnableError`."""
        wanted, given = list(wanted), set(given)
        kept, needed = self._behind(set(wanted), given)
        shapes = [node for node in kept if node.output[0] in self._shapes]
        nodes, made_up = _without_weights([node for node in reversed(kept) if node not in shapes])
        weights = [tensor for tensor in self._model.graph.initializer if tensor.name in needed]
        made_up |= {tensor.name: _made_up(tensor) for tensor in weights if tensor.data_location == TensorProto.EXTERNAL}
        fed = {name for name in needed if name in self._inputs} | {*made_up, *given}
        fed |= {node.output[0] for node in shapes}
        names = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in sorted(fed)]
        outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in wanted]
        weights = [tensor for tensor in weights if tensor.name not in made_up]
        graph = helper.make_graph(nodes, "positions", names, outputs, weights)
        opsets, functions = self._model.opset_import, self._model.functions
        cut = helper.make_model(graph, opset_imports=opsets, functions=functions)
        run = ReferenceEvaluator(cut, new_ops=list(_BOUNDED)).run

        @_runnable()
        def computed(rows: Rows, is_beyond: bool = False) -> dict[str, Array]:
            arrays = _arrays_of(rows)
            step = {name: input_array(self._inputs[name], arrays) for name in fed if name in self._inputs}
            step |= made_up | {name: np.array(is_beyond) for name in given}
            step |= {node.output[0]: self._shape(node, rows, step) for node in shapes}
            return dict(zip(wanted, map(np.asarray, run(None, step)), strict=True))

        return computed

    def _shape(self, node: onnx.NodeProto, rows: Rows, step: Mapping[str, Array]) -> Array:
        name = self._shapes[node.output[0]]
        num_rows, past = len(rows), max(row[0] for row in rows)
        cache = self._caches.get(name)
        if isinstance(cache, KvTensor):
            shape = cache.shape(num_rows, cache.capacity or past)
        elif cache is not None:
            shape = [num_rows, *cache.shape]
        else:
            sizes = self._sizes(rows)
            dims = self._hints[name].type.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in dims]
        return np.array(shape, np.int64)[attribute(node, "start", 0) : attribute(node, "end", len(shape))]

    def _sizes(self, rows: Rows) -> dict[str, int]:
        arrays = _arrays_of(rows)
        sizes: dict[str, int] = {}
        for entry in self._inputs.values():
            shape = input_array(entry, arrays).shape
            sizes |= {dim: size for dim, size in zip(entry.tensor.shape, shape, strict=True) if isinstance(dim, str)}
        return sizes


def _bounded(operator: type[OpRun], size: Callable[..., float]) -> type[OpRun]:
    """`operator`, which fails where it would make more than `MOST_VALUES` numbers, by `size` of its inputs."""

    plain: Any = operator._run

    def run(self: OpRun, *inputs: Array, **attributes: Any) -> Any:
        if size(*inputs) > MOST_VALUES:
            raise ValueError(f"{operator.__name__} of {size(*inputs):g} numbers")
        return plain(self, *inputs, **attributes)

    return type(operator.__name__, (operator,), {"op_domain": "", "_run": run})


def _product(sizes: Array) -> float:
    return float(np.prod(sizes, dtype=np.float64))


_BOUNDED = (
    _bounded(Range, lambda start, limit, step: float(np.max(np.divide(limit - start, step)))),
    _bounded(ConstantOfShape, _product),
    _bounded(Expand, lambda value, shape: _product(shape)),
    _bounded(Tile, lambda value, repeats: value.size * _product(repeats)),
)


def _arrays_of(rows: Rows) -> StepArrays:
    past_B, lengths_B = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    positions_N = np.concatenate([np.arange(past, past + length) for past, length, *_ in rows])
    tokens_N, total_B = np.zeros_like(positions_N), past_B + lengths_B
    tokens_N[np.cumsum(lengths_B) - 1] = [[*row, 0][2] for row in rows]
    return StepArrays(tokens_N, lengths_B, past_B, total_B, positions_N, int(total_B.max()))


def _made_up(tensor: onnx.TensorProto) -> Array:
    """Numbers in the tensor's shape and type that differ by row and name, in the memory of one column."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    rows = [*tensor.dims, 1][0]
    column = np.arange(rows, dtype=np.float64) + sum(map(ord, tensor.name)) % 97 / 97
    return np.broadcast_to(column.astype(dtype).reshape(-1, *[1] * (len(tensor.dims) - 1)), tuple(tensor.dims))


def _without_weights(nodes: Iterable[onnx.NodeProto]) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """Copies of the nodes in which constants that lie in another file are values from outside, and these values."""
    made_up: dict[str, Array] = {}

    def edited(node: onnx.NodeProto, prefix: str) -> onnx.NodeProto:
        tensor = attribute(node, "value", None) if node.op_type == "Constant" else None
        if tensor is not None and tensor.data_location == TensorProto.EXTERNAL:
            name = f"{prefix}{node.output[0]}/made_up"
            made_up[name] = _made_up(tensor) + len(made_up)
            return helper.make_node("Identity", [name], list(node.output), name=node.name)
        for entry in node.attribute:
            if entry.type == onnx.AttributeProto.GRAPH:
                inner = [edited(one, f"{prefix}{entry.name}/") for one in entry.g.node]
                del entry.g.node[:]
                entry.g.node.extend(inner)
        return node

    return [edited(deepcopy(node), f"{node.name}/") for node in nodes], made_up
