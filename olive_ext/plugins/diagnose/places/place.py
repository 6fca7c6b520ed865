"""A decoder in one place: any part of its graph, run there over one document in one step without a past; and how far
two kernels' results may be apart, by what rounding of the inputs does to them.

A kernel sums in its own order and rounds in between, as if the last bits of its inputs were different. So the same
node, run on inputs that are changed by that much, shows how far results may be apart. Axes: R rows, C numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from olive_ext.config import ModelSettings
from olive_ext.engine.runners.ort.ort_runner import plain_inputs, refuse_more_than_tokens, run_plainly
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.edits import part_of, with_full_length_kv
from olive_ext.graph.nodes import attribute, makers_of, nested_graphs, reads
from olive_ext.graph.value_shapes import Shapes, factors
from olive_ext.model import resolve
from olive_ext.model.files.content import relocated
from olive_ext.model.providers.ort_session import open_session
from olive_ext.model.types import ITEM_BYTES

Array = npt.NDArray[Any]

FACTOR = 8
"""The tolerance, in multiples of the effect of changed inputs, and of the type's unit. WebGPU against the CPU, ten
exports (fp32, fp16 against fp32, int4): of 661 outputs the largest difference is 0.36 of the tolerance."""

FACTOR_ALIKE = 2
"""The same where one kernel computes both. In float16 a product that is 1 % too large exceeds it 1.3 to 1.7 times; with
two numbers of threads or levels of optimization, single nodes gave equal results."""

LEAST_ROW = 16
"""A row of at least so many numbers is judged by itself; shorter rows are judged together."""

INT8 = 2.0**-10
"""The unit of activations that a kernel rounds to 8 bits, relative to the largest of their row: a quarter of a step,
because `FACTOR` is large for a rounding that is not a sum. WebGPU and the CPU differ by 0.05 of a whole step's
tolerance."""


@dataclass(frozen=True)
class Deviation:
    """One value in two places."""

    error: float
    """The largest difference, in the row that exceeds its tolerance most."""

    tolerance: float

    @property
    def ratio(self) -> float:
        """The distance in multiples of the tolerance: above 1, rounding does not explain it."""
        return self.error / self.tolerance if self.tolerance else float("inf") if self.error else 0.0


def moved(values: Mapping[str, Array], units: Mapping[str, float]) -> dict[str, Array]:
    """Each array of floats with its numbers increased or decreased, at random, by `units` times their size, or where
    that is `INT8`, times the largest of their row."""
    rng, moved_values = np.random.default_rng(0), dict(values)
    for name, array in values.items():
        if array.dtype.kind == "f" and array.size:
            unit = units[name]
            sizes = np.abs(array)
            if unit == INT8 and array.ndim:
                sizes = sizes.max(axis=-1, keepdims=True)
            signs = rng.integers(0, 2, array.shape) * 2 - 1
            with np.errstate(all="ignore"):
                other = (array + sizes * unit * signs).astype(array.dtype)
            moved_values[name] = np.where(np.isfinite(other), other, array)
    return moved_values


def unit_of(*arrays: Array) -> float:
    """The distance of numbers near 1 in the coarsest floating type of `arrays`; 0 of integers."""
    return max(float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0 for array in arrays)


def judge(
    found: Array, expected: Array, response: Array, unit: float, *, steps: int = 0, factor: int = FACTOR
) -> Deviation:
    """Compares `found` with `expected`. `response` was computed from changed inputs where `expected` was from the given
    ones; `unit` is the rounding of the type. Integers must be equal, or differ by no more than changed inputs cause and
    `steps`."""
    if found.shape != expected.shape:
        return Deviation(float("inf"), 0.0)
    if not expected.size:
        return Deviation(0.0, 0.0)
    wide = np.float64 if expected.dtype.kind == "f" else np.int64
    if expected.dtype.kind == "f":
        ends = [np.finfo(array.dtype).max for array in (found, expected)]
        found, expected, response = (np.clip(array, -min(ends), min(ends)) for array in (found, expected, response))
    by_row = (-1, expected.shape[-1]) if expected.ndim and expected.shape[-1] >= LEAST_ROW else (1, -1)
    found_RC, expected_RC, response_RC = (array.astype(wide).reshape(by_row) for array in (found, expected, response))
    error_R = _distances(found_RC, expected_RC).max(axis=1)
    response_R = _distances(response_RC, expected_RC).max(axis=1)
    sizes_RC = np.abs(expected_RC)
    size_R = np.where(np.isfinite(sizes_RC), sizes_RC, 0).max(axis=1)
    if wide is np.int64:
        worst = int(error_R.argmax())
        return Deviation(float(error_R[worst]), float(response_R.max() + steps))
    tolerance_R = factor * (response_R + unit * size_R)
    with np.errstate(all="ignore"):
        ratio_R = np.where(error_R > 0, error_R / tolerance_R, 0)
    worst = int(np.nan_to_num(ratio_R, nan=np.inf, posinf=np.inf).argmax())
    return Deviation(float(error_R[worst]), float(tolerance_R[worst]))


def _distances(one: Array, other: Array) -> Array:
    """The distance of two numbers: 0 of equal infinities and of two NaN, infinite of a single NaN."""
    with np.errstate(all="ignore"):
        apart: Array = np.abs(one - other).astype(np.float64)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    np.nan_to_num(apart, copy=False, nan=np.inf, posinf=np.inf)
    return apart


MOST_RUNS = 12
"""The most runs of the document over the whole graph; runs over parts of it count by their share of the nodes."""

_COARSE = {
    **dict.fromkeys(("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"), 2.0**-10),
    "QNNExecutionProvider": 2.0**-10,
}
"""Providers that multiply float32 numbers with fewer bits (TF32, float16), and the unit of these."""

_TYPES = {"float": "float32", "double": "float64"}
"""Types of ONNX Runtime for which numpy has other names."""


class NotLocatedError(RunError):
    """No node is known that causes the difference; the message says why."""


class HeldError(NotLocatedError):
    """No node causes it: on equal inputs each gives the same but for rounding."""


class Runs:
    """The runs of `MOST_RUNS` that were used."""

    def __init__(self) -> None:
        self.spent = 0.0

    def take(self, share: float) -> None:
        """Counts a run over this share of the nodes. Raises `NotLocatedError` where it exceeds the limit."""
        if self.spent + share > MOST_RUNS:
            raise NotLocatedError(f"no node was found within {MOST_RUNS} runs of the document")
        self.spent += share


class PlacedDecoder:
    """The decoder that the settings name, in the place that they name."""

    def __init__(self, settings: ModelSettings, tokens: Sequence[int], runs: Runs) -> None:
        """Raises `ModelError` for a model that is not one ONNX graph which takes tokens alone."""
        self.model, self.runs = resolve(settings), runs
        finding = f"where '{settings.model}' goes wrong cannot be found"
        if self.model.kind != "onnx" or not self.model.runtime.runs_graph:
            raise ModelError(f"{finding}: it is run by {self.model.runtime.name}, which shows no nodes")
        refuse_more_than_tokens(self.model, finding)
        spec, file = self.model.spec, self.model.files.decoder
        if settings.engine.adapters:
            raise ModelError(f"{finding}: its adapters (engine.adapters) are no part of the graph")
        if not {spec.logits.elem_type, *(cache.elem_type for cache in spec.caches)} <= {1, 2, 3, 10, 11}:
            raise ModelError(f"{finding}: it computes in bfloat16 or float8, which cannot be read here")
        self.folder, graph = relocated(file, with_full_length_kv(self.model.decoder_graph()))
        self.graph = ProbedGraph(graph)
        self.inputs = plain_inputs(spec, tokens)
        exact = (provider for provider in self.model.providers if provider.options.get("use_tf32") != "0")
        self.coarse = max((_COARSE.get(one.name, 0.0) for one in exact), default=0.0)
        self.logits = spec.logits.name
        self._types: dict[str, npt.DTypeLike] = {}

    def plain(self) -> tuple[Array, float]:
        """The last token's logits [V] of the graph as it is, and the unit of their type times the largest."""
        logits = self.run({}, self.graph.outputs)[self.logits]
        row = last_row(logits)
        return row, unit_of(logits) * float(np.abs(row).max())

    def run(self, given: Mapping[str, Array], wanted: Collection[str], level: str | None = None) -> dict[str, Array]:
        """`wanted` values, computed from `given` ones, at a level of optimizations. Raises `ModelError` where ONNX
        Runtime does not open or run that part, and `NotLocatedError` where it is one run too many."""
        part, arrays = self.part(given, wanted)
        self.runs.take(len(part.nodes) / len(self.graph.nodes))
        taken = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        return dict(run_plainly(self._open(part, arrays, level), self.inputs | taken))

    def part(self, given: Mapping[str, Array], wanted: Collection[str]) -> tuple[Part, dict[str, Array]]:
        """The part that computes `wanted`, and by its inputs what it takes of `given`, in the graph's types."""
        part = self.graph.part(given, wanted)
        types = {value: self._types.get(value, given[value].dtype) for value in part.taken.values()}
        return part, {name: np.asarray(given[value], types[value], order="C") for name, value in part.taken.items()}

    def learn_types(self, values: Collection[str]) -> None:
        """Opens the graph to learn the types of `values`: those of a graph that is another one may be others, too."""
        session = self._open(self.graph.part((), values), {}, "disable")
        for output in session.get_outputs():
            name = output.type.removeprefix("tensor(").removesuffix(")")
            self._types[output.name] = np.dtype(_TYPES.get(name, name))

    def _open(self, part: Part, arrays: Mapping[str, Array], level: str | None) -> Any:
        return open_session(
            self.graph.model_of(part, arrays).SerializeToString(),
            self.model.providers,
            self.model.settings,
            external_data_folder=self.folder,
            custom_operators=self.model.custom_operators,
            label=str(self.model.files.decoder),
            level=level,
        )

    def rounding(self, nodes: Iterable[int]) -> dict[str, float]:
        """The unit to which kernels of `nodes` round the values that they read, where it is coarser than the type's."""
        read = [self.graph.nodes[index] for index in nodes]
        return {node.input[0]: INT8 for node in read if attribute(node, "accuracy_level", 0) == 4}

    def bytes_of(self, sizes: Mapping[str, int], values: Iterable[str]) -> int:
        """Bytes of the values, in the type of the logits."""
        return sum(sizes[name] for name in values) * ITEM_BYTES[self.model.spec.logits.elem_type]


def last_row(logits: Array) -> Array:
    """The logits of the last token [V], in a type that is wide enough for differences."""
    row: Array = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float64)
    return row


GIVEN = "/given"
"""The suffix of a given value's name, where the same part also computes the value."""

_NO_TENSORS = ("Sequence", "SplitToSequence", "Optional")
"""Prefixes of the names of operators that return no tensors."""


class Part(NamedTuple):
    """Some nodes of a graph, which run by themselves."""

    nodes: tuple[int, ...]
    """Their numbers in order of execution."""

    taken: Mapping[str, str]
    """The given values that they read, by the inputs that these are."""

    wanted: tuple[str, ...]


class ProbedGraph:
    """Nodes are numbered in an order in which they can run, those that logits need first. Nodes that no output needs
    are left out."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, graph = model, model.graph
        self.outputs = [output.name for output in graph.output]
        self.nodes = _ordered(graph)
        self._reads = [frozenset(reads([node])) for node in self.nodes]
        self.makers = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        self._last = {name: index for index, names in enumerate(self._reads) for name in names}
        changing = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        for node, names in zip(self.nodes, self._reads, strict=True):
            if names & changing:
                changing.update(node.output)
        self.values = [
            name
            for node in self.nodes
            if not node.op_type.startswith(_NO_TENSORS)
            for name in node.output
            if name in changing and (name in self._last or name in self.outputs)
        ]
        """All values that depend on the graph's inputs and that something reads, in order."""

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Elements of `values`, by these shapes of the graph's inputs; the most of all known where it is not known."""
        axes = {
            dim.dim_param: size
            for value in self.model.graph.input
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False)
        }
        shape_of = Shapes(self.model.graph).of
        known: dict[str, int] = {}
        for name in self.values:
            parts = factors(shape_of[name] or ()) if shape_of.get(name) is not None else None
            if parts is not None and all(isinstance(part, int) or part in axes for part in parts):
                known[name] = math.prod(part if isinstance(part, int) else axes[part] for part in parts)
        return {name: known.get(name, max(known.values(), default=1)) for name in self.values}

    def live(self, values: Iterable[str], place: int) -> list[str]:
        """Those of `values` that nodes before `place` compute and nodes from there on read."""
        return [name for name in values if self.makers[name] < place <= self._last.get(name, -1)]

    def places(self, begin: int, end: int, count: int, sizes: Mapping[str, int]) -> list[int]:
        """Up to `count` places between the two that cut the nodes into about equal parts, where the fewest values
        cross."""
        change = [0] * (len(self.nodes) + 2)
        for name, size in sizes.items():
            change[self.makers[name] + 1] += size
            change[max(self._last.get(name, -1), self.makers[name]) + 1] -= size
        across = list(accumulate(change))
        width = (end - begin) / (count + 1)
        cuts = []
        for number in range(1, count + 1):
            middle = begin + number * width
            near = range(max(begin + 1, math.ceil(middle - width / 2)), min(end, math.ceil(middle + width / 2)))
            if near:
                cuts.append(min(near, key=lambda place: (across[place], abs(place - middle))))
        return cuts

    def part(self, given: Collection[str], wanted: Collection[str]) -> Part:
        """The nodes that compute `wanted` from `given` values and the graph's inputs. A given value that is also wanted
        is computed, while its readers take the given one."""
        nodes = makers_of(self.nodes, wanted, given)
        made, taken = {name for node in nodes for name in node.output if name}, {*reads(nodes)}
        inputs = {name + GIVEN if name in made else name: name for name in given if name in taken}
        return Part(tuple(sorted({self.makers[name] for name in made})), inputs, tuple(wanted))

    def model_of(self, part: Part, arrays: Mapping[str, Array]) -> onnx.ModelProto:
        """The part as a model that takes the given values `arrays`, by its inputs. Its external weights stay where the
        whole graph's are."""
        whole, renames = self.model.graph, {name: taken for taken, name in part.taken.items()}
        read = {name for index in part.nodes for name in self._reads[index]}
        made = {name for index in part.nodes for name in self.nodes[index].output}
        declared = {value.name: value for value in whole.output if value.name in made}
        outputs = [declared.pop(name, onnx.ValueInfoProto(name=name)) for name in part.wanted]
        outputs += declared.values()  # else ONNX Runtime puts caches where shorter ones were
        model = part_of(self.model, (_renamed(self.nodes[index], renames) for index in part.nodes), outputs)
        graph = model.graph
        kept = {tensor.name for tensor in graph.initializer}
        graph.input.extend(value for value in whole.input if value.name in read and value.name not in kept)
        make, type_of = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype
        graph.input.extend(make(name, type_of(array.dtype), array.shape) for name, array in arrays.items())
        return model


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    bodies = list(nested_graphs([copy]))
    for one in [copy, *(inner for body in bodies for inner in body.node)]:
        one.input[:] = [names.get(name, name) for name in one.input]
    for output in (output for body in bodies for output in body.output):
        output.name = names.get(output.name, output.name)
    return copy


def _ordered(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that outputs need, each after what it reads: from the first output down."""
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    done: dict[int, None] = {}
    pending: list[Any] = [makers[output.name] for output in reversed(graph.output) if output.name in makers]
    while pending:
        index = pending[-1]
        before = {makers[name] for name in reads([graph.node[index]]) if name in makers} - done.keys()
        if index in done or not before:
            done[pending.pop()] = None
        else:
            pending += sorted(before, reverse=True)
    return [graph.node[index] for index in done]
