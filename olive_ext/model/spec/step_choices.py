"""Finds where a decoder's graph computes a token differently because of its step: the longest row, the chunk, or the
rows beside it. It runs the nodes between positions, masks or lengths and the layers on small steps, and compares their
values for the same positions. Knows no session, and no names of inputs.

Axes: B rows, S tokens of a row, P positions before them, T positions after the step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from olive_ext.graph.nodes import attribute, constants_of, makers_of, reads, subgraphs, tensors_of
from olive_ext.model.spec.checkpoint import entries
from olive_ext.model.spec.role_inputs import arrays_of, input_array
from olive_ext.model.types import DecoderSpec, InputSpec, KvTensor, LengthChoice, Role, StateTensor, StepChoices

Array = npt.NDArray[Any]
Rows = Sequence[tuple[int, ...]]
"""For each row of a step, the number of positions before it and of its tokens, and its last tokens that are not 0."""

Run = Callable[[Rows, bool], dict[str, Array]]
"""Computes values of a step from its rows. The truth values that are given are all true, or all false."""


class UnrunnableError(ValueError):
    """Nodes cannot be run on the host; trials on the opened model remain."""


@contextmanager
def _runnable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # operators of ONNX's reference fail with whatever numpy and Python raise
        raise UnrunnableError(one_line(error)) from error


_DEFAULT = ("", "ai.onnx")

_REPEATING = frozenset({"Loop", "Scan"})
"""Operators that may never end: nothing after them is run."""

MOST_VALUES = 2**25
"""The most numbers of a tensor that an operator may make by sizes that it reads. Masks have fewer."""


def _repeats(node: onnx.NodeProto) -> bool:
    """Whether the node may never end."""
    return node.op_type in _REPEATING or any(_repeats(inner) for body in subgraphs(node) for inner in body.node)


class PositionalNodes:
    """The nodes that depend only on positions, masks, lengths, shapes and token ids, not on embeddings of tokens."""

    def __init__(
        self, model: onnx.ModelProto, inputs: Sequence[InputSpec], caches: Sequence[KvTensor | StateTensor]
    ) -> None:
        self._model = model
        self._inputs = {entry.tensor.name: entry for entry in inputs if entry.role is not Role.BLOCK_TABLE}
        self._caches = {cache.past: cache for cache in caches}
        self.graph = graph = model.graph
        self._known = {tensor.name for tensor in graph.initializer}
        self.tokens = {name for name, entry in self._inputs.items() if entry.role is Role.INPUT_IDS}
        is_endless = any(_repeats(node) for function in model.functions for node in function.node)
        self._domains = {*_DEFAULT, *(function.domain for function in model.functions if not is_endless)}
        self._hints = {value.name: value for value in graph.value_info}
        self._values = set(self._inputs)
        self.nodes: list[onnx.NodeProto] = []
        self._outside: set[str] = set()
        """Caches and values of layers, of which nodes read the shape alone."""

        self.frontier: dict[str, onnx.NodeProto] = {}
        """The values that other nodes read, each with the first of these nodes."""

        for node in graph.node:
            self._place(node)

    def _place(self, node: onnx.NodeProto) -> None:
        read = list(reads([node]))
        if node.op_type == "Shape" and read[0] not in self._values | self._known:
            if read[0] in self._caches or self._is_hinted(read[0]):
                self._outside.add(read[0])
                self._values.update(node.output)
                self.nodes.append(node)
            return
        is_run = node.domain in self._domains and not _repeats(node)
        is_run = is_run and all(name in self._values or name in self._known for name in read)
        # A table that is looked up by token ids holds what tokens mean.
        if is_run and not (node.op_type == "Gather" and read[0] in self._known and read[1] in self.tokens):
            (self._known if self._values.isdisjoint(read) else self._values).update(node.output)
            self.tokens.update(() if self.tokens.isdisjoint(read) else node.output)
            self.nodes.append(node)
            return
        for name in filter(self._values.__contains__, read):
            self.frontier.setdefault(name, node)

    def _is_hinted(self, name: str) -> bool:
        hint = self._hints.get(name)
        symbols = {dim for entry in self._inputs.values() for dim in entry.tensor.shape if isinstance(dim, str)}
        dims = hint.type.tensor_type.shape.dim if hint is not None else ()
        return bool(dims) and all(dim.HasField("dim_value") or dim.dim_param in symbols for dim in dims)

    def constants(self) -> list[int]:
        """The integers in the nodes, ascending."""
        values = (attribute(node, "value", None) for node in self.nodes)
        tensors = [value for value in values if isinstance(value, TensorProto)]
        read = {name for node in self.nodes for name in node.input}
        tensors += [tensor for tensor in self.graph.initializer if tensor.name in read]
        numbers = {attribute(node, "value_int", 0) for node in self.nodes if node.op_type == "Constant"}
        for tensor in tensors:
            if int(np.prod(tensor.dims)) == 1 and tensor.data_location != TensorProto.EXTERNAL:
                number = float(numpy_helper.to_array(tensor).reshape(-1)[0])
                numbers |= {int(number)} if number.is_integer() else set()
        return sorted(numbers)

    def count(self, wanted: Iterable[str]) -> int:
        """The number of nodes that compute the values `wanted`."""
        return len(makers_of(self.nodes, wanted))

    @_runnable()
    def cut(self, wanted: Iterable[str], fixed: Iterable[str] = ()) -> Run:
        """Computes values of a step by ONNX's reference implementation, where the values `fixed` are one truth. Making
        and running it may raise `UnrunnableError`."""
        wanted, fixed = list(wanted), set(fixed)
        nodes = makers_of(self.nodes, {*wanted} - fixed, fixed)
        needed = {*wanted, *reads(nodes)}
        inputs, outside = needed & self._inputs.keys(), needed & self._outside
        weights = [tensor for tensor in self.graph.initializer if tensor.name in needed - fixed]
        made_up = {tensor.name: _made_up(tensor) for tensor in weights if tensor.data_location == TensorProto.EXTERNAL}
        weights = [tensor for tensor in weights if tensor.name not in made_up]
        fed = sorted({*inputs, *outside, *made_up, *fixed})
        taken, given = ([onnx.ValueInfoProto(name=name) for name in names] for names in (fed, wanted))
        graph = helper.make_graph(nodes, "part", taken, given, weights)
        part = helper.make_model(graph, opset_imports=self._model.opset_import, functions=self._model.functions)
        for number, tensor in enumerate(tensors_of(part)):
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(_made_up(tensor) + number, tensor.name))
        run = ReferenceEvaluator(part, new_ops=list(_BOUNDED)).run

        @_runnable()
        def computed(rows: Rows, is_beyond: bool = False) -> dict[str, Array]:
            arrays = arrays_of(rows)
            step = {name: input_array(self._inputs[name], arrays) for name in inputs}
            step |= {name: np.broadcast_to(0, self._shape(name, rows)) for name in outside}
            step |= made_up | {name: np.array(is_beyond) for name in fixed}
            return dict(zip(wanted, map(np.asarray, run(None, step)), strict=True))

        return computed

    def _shape(self, name: str, rows: Rows) -> Sequence[int]:
        if (cache := self._caches.get(name)) is not None:
            return cache.shape(len(rows), max(row[0] for row in rows))
        arrays = arrays_of(rows)
        sizes: dict[str, int] = {}
        for entry in self._inputs.values():
            taken = zip(entry.tensor.shape, input_array(entry, arrays).shape, strict=True)
            sizes |= {dim: size for dim, size in taken if isinstance(dim, str)}
        dims = self._hints[name].type.tensor_type.shape.dim
        return [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in dims]


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


def _made_up(tensor: onnx.TensorProto) -> Array:
    """Numbers in the tensor's shape and type that differ by row and name, in the memory of one column."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    rows = [*tensor.dims, 1][0]
    column = np.arange(rows, dtype=np.float64) + sum(map(ord, tensor.name)) % 97 / 97
    return np.broadcast_to(column.astype(dtype).reshape(-1, *[1] * (len(tensor.dims) - 1)), tuple(tensor.dims))


logger = logging.getLogger(__name__)

CHUNK, PART = 8, 4
"""Tokens of a chunk, and of a shorter chunk that begins at the same position."""

BASE_LENGTH = 40
"""Positions of the steps that tell values of tokens from values of the cache."""

MOST_FED = 2048
"""Tokens of a whole text that is compared with its beginning."""

MOST_RUNS, RUNS, LEAST_LENGTHS = 300_000, 10, 6
"""Limits of the search: nodes run in all, 3 to 10 µs each; runs for each length; and lengths that are compared however
many nodes there are, up to `MOST_RUNS`."""


MOST_TOKENS = 32
"""The most token ids with which nodes compare; the smallest are tried."""

MOST_CHOICES = 16
"""The most truth values that change once with the length. With more, the model was not made with such a choice."""


Pairs = Iterator[tuple[dict[str, Array], dict[str, Array]]]
"""Values of one step, and the values of another step that should begin with them."""


class StepComparison:
    """Compares what the layers read for the same positions in different steps."""

    def __init__(self, part: PositionalNodes, numbers: Sequence[int], context_length: int, has_own_pasts: bool) -> None:
        self._part = part
        self._has_own_pasts = has_own_pasts
        self._num_nodes = part.count(part.frontier)
        is_bounded = self._num_nodes <= MOST_RUNS // (RUNS * LEAST_LENGTHS)
        self._frontier = self._by_position(list(part.frontier)) if is_bounded else []
        most = MOST_RUNS // (RUNS * max(1, part.count(self._frontier)))
        grown = [length for power in range(context_length.bit_length()) for length in (2**power, 3 * 2**power - 1)]
        around = [number + step for number in numbers for step in (-1, 0, 1, 2)]
        first = [2, BASE_LENGTH, context_length, 4 * BASE_LENGTH]
        lengths = list(dict.fromkeys([*first, *grown, *around]))
        self._lengths = sorted([length for length in lengths if length <= context_length][: max(most, LEAST_LENGTHS)])

    def compare(self) -> tuple[list[LengthChoice], str]:
        """The choices between short and long texts, and what else depends on the step; empty where nothing does."""
        if self._num_nodes > MOST_RUNS // (RUNS * LEAST_LENGTHS):
            return [], f"{self._num_nodes} nodes stand between positions and layers, too many to be compared"
        if not self._frontier:
            return [], ""
        if (name := self._first_difference_by_tokens()) is not None:
            return [], self._leak(name)
        if self._first_difference(()) is None:
            return [], ""
        try:
            choices = self._length_choices()
        except ValueError as error:  # a truth may have another size in a longer step
            logger.debug("truths of lengths cannot be run: %s", error)
            choices = []
        name = self._first_difference([choice.value for choice in choices])
        if name is None:
            for choice in list(choices):  # whether there is a past, say, decides nothing of a token
                others = [other for other in choices if other is not choice]
                choices = others if self._first_difference([other.value for other in others]) is None else choices
            return choices, ""
        return choices, self._leak(name)

    def _leak(self, name: str) -> str:
        node = self._part.frontier[name]
        return f"'{name}', which '{node.name}' ({node.op_type}) reads, depends on the step"

    def _first_difference_by_tokens(self) -> str | None:
        """The first value, of those that nodes compare with, that changes with a later token or another row's."""
        if self._part.tokens.isdisjoint({*reads(makers_of(self._part.nodes, self._frontier))} - {*self._frontier}):
            return None
        run, row = self._part.cut(self._frontier), (CHUNK, PART)

        def pairs(token: int) -> Pairs:
            yield run([row, (*row, token)], False), run([row], False)
            yield run([(CHUNK, CHUNK, token)], False), run([row], False)

        tokens = [number for number in self._part.constants() if 0 < number < 2**31][:MOST_TOKENS]
        return next((name for token in tokens if (name := self._first_wrong(pairs(token)))), None)

    def _by_position(self, names: list[str]) -> list[str]:
        """The floats, truth values and integers of tokens among `names` that do not have a number for each position of
        the cache. Masks and biases have one: they hold what a row sees."""
        begin, widths, per_token = BASE_LENGTH - CHUNK, (BASE_LENGTH, BASE_LENGTH - CHUNK + PART), []
        try:
            run = self._part.cut(names)
            chunk, part = run([(begin, CHUNK)], False), run([(begin, PART)], False)
        except UnrunnableError as error:
            logger.debug("the nodes that make %s cannot be run: %s", names, error)
            most = MOST_RUNS // (RUNS * max(1, self._part.count(names)))
            return [name for unrun in names[:most] for name in self._by_position([unrun])] if len(names) > 1 else []
        for name in names:
            axes = list(zip(chunk[name].shape, part[name].shape, strict=False))
            is_number = chunk[name].dtype.kind in "fb" or (CHUNK, PART) in axes  # others are lengths
            if is_number and widths not in axes:
                per_token.append(name)
        return per_token

    def _first_difference(self, fixed: Sequence[str]) -> str | None:
        """The first value that differs for the same positions: in a chunk and a shorter one; in a whole text, its
        beginning and its end; alone and beside another row, which is longer where rows may be. Searched with all values
        `fixed` false, then true."""
        run, sides = self._part.cut(self._frontier, fixed), (False, True) if fixed else (False,)
        steps = (self._pairs(run, length, is_beyond) for is_beyond in sides for length in self._lengths)
        return next((name for pairs in steps if (name := self._first_wrong(pairs))), None)

    def _first_wrong(self, pairs: Pairs) -> str | None:
        try:
            values = list(pairs)
        except UnrunnableError as error:
            logger.debug("steps cannot be run: %s", error)
            return None
        wrong = (name for name in self._frontier for whole, part in values if _differs(whole[name], part[name]))
        return next(wrong, None)

    def _pairs(self, run: Run, length: int, is_beyond: bool) -> Pairs:
        """Values of a step, and values that should begin with them, in and after texts of `length` tokens."""
        begin = max(0, length - CHUNK)
        chunk = run([(begin, CHUNK)], is_beyond)
        for size in (PART, 1):
            yield chunk, run([(begin, size)], is_beyond)
        for past, size in ((CHUNK, PART), (0, 1)) if self._has_own_pasts else ((begin, PART),):
            rows = [(past, size), (begin, size)]
            yield run(rows, is_beyond), run(rows[:1], is_beyond)
        if length <= MOST_FED:
            whole = run([(0, length)], is_beyond)
            for size in {1, min(PART, length)}:
                yield whole, run([(0, size)], is_beyond)
            if length >= CHUNK:
                yield _ends(whole, chunk), chunk

    def _length_choices(self) -> list[LengthChoice]:
        """The truth values of a step that change once with the length of a text, fed in one pass or token by token."""
        makers = makers_of(self._part.nodes, self._frontier)
        truths = [name for node in makers for name in node.output if name]
        first = self._part.cut(truths)([(0, BASE_LENGTH)], False)
        truths = [name for name in truths if first[name].dtype.kind == "b" and first[name].size == 1]
        if not truths:
            return []
        run = self._part.cut(truths)
        by_length = {length: run(_text(length), False) for length in self._lengths}
        by_token = {length: run([(length - 1, 1)], False) for length in self._lengths}
        truths = [
            name for name in truths if all((by_length[n][name] == by_token[n][name]).all() for n in self._lengths)
        ]
        choices = []
        for name in truths:
            sides = [bool(by_length[length][name].reshape(-1)[0]) for length in self._lengths]
            changes = [index for index in range(1, len(sides)) if sides[index] != sides[index - 1]]
            if len(changes) == 1:
                last = self._last_before(name, *self._lengths[changes[0] - 1 : changes[0] + 1])
                choices.append(LengthChoice(name, first[name].ndim, last, sides[-1]))
        return choices if len(choices) <= MOST_CHOICES else []

    def _last_before(self, name: str, last: int, other: int) -> int:
        """The most tokens of a text for which the truth value `name` is as for `last`, fewer than `other`."""
        run = self._part.cut([name])
        side = run(_text(last), False)[name]
        longer = range(last + 1, other)
        return last + bisect_left(longer, True, key=lambda n: bool((run(_text(n), False)[name] != side).any()))


def _text(length: int) -> list[tuple[int, int]]:
    """A whole text, or only its end where it is so long that an axis for each pair of tokens would not fit."""
    return [(0, length)] if length <= MOST_FED else [(length - CHUNK, CHUNK)]


def _ends(values: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """The last numbers of floats, as many as `like` has. Other values may count a step's own tokens, or say that it is
    the first: for those it is `like`."""
    ends = dict(like)
    for name, other in like.items():
        if other.dtype.kind == "f" and other.ndim == values[name].ndim:
            sizes = zip(values[name].shape, other.shape, strict=True)
            ends[name] = values[name][tuple(slice(max(0, most - size), None) for most, size in sizes)]
    return ends


def _differs(whole: Array, other: Array) -> bool:
    if whole.ndim != other.ndim or any(size > most for size, most in zip(other.shape, whole.shape, strict=True)):
        return True
    same = whole[tuple(slice(size) for size in other.shape)]
    return not np.array_equal(same, other, equal_nan=same.dtype.kind == "f")


MOST_CONSTANTS = 64
"""How many of the numbers in the nodes lengths are compared with, the smallest first; two or three are usual."""

_OF_EACH_ROW = frozenset(
    {
        Role.ATTENTION_MASK,
        Role.POSITION_IDS,
        Role.LAST_POSITIONS,
        Role.WRITE_INDICES,
        Role.VALID_LENGTHS,
        Role.CUMULATIVE_LENGTHS,
        Role.PAST_LENGTHS,
    }
)
"""Inputs that tell rows with pasts of different lengths apart. A graph without any takes positions from the cache's
shape (T5 and Whisper of two exporters), and its rows share a step only after pasts of one length."""

ALONE = "each request is fed whole and alone: {}"

_TABLE_OFFSET = "multirotarycacheconcatoffset"

_REDUCTIONS = frozenset(
    {"ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd"}
)


def as_opened(spec: DecoderSpec, failure: str, used: int | None, written: int | None) -> DecoderSpec:
    """`spec` as its decoder is opened: each request is fed whole and alone for the `failure` of a trial, and where a
    provider takes rotary tables by the step. `used` is the `table_offset` of the providers, `written` the one in
    genai_config.json, whose first table alone counts where no provider that is used takes the second."""
    choices, why = spec.choices, failure
    if used is not None:
        choices = replace(choices, of_provider=(used,))
        why = f"the provider takes other rotary tables for steps of more than {used} positions"
    elif written is not None and written < spec.context_length:
        note = (
            f"the context length {written} is that of the first rotary table: genai_config.json leaves the choice of "
            "the second, for longer texts, to a provider that is not used"
        )
        return replace(spec, context_length=written, notes=(*spec.notes, note))
    if not why:
        return spec
    return replace(spec, choices=choices, alone=why, notes=(*spec.notes, ALONE.format(why)))


def table_offset(options: Any) -> int | None:
    """Rows of the first of two rotary tables that lie one after the other, of which a provider takes one by a step's
    length (WebGPU, TensorRT RTX); None where `options`, of one provider or of several, have no such key."""
    for name, value in (option for entry in entries(options) for option in entry.items()):
        is_offset = name.lower().replace("_", "").removeprefix("nv") == _TABLE_OFFSET
        if is_offset and str(value).isdecimal():
            return int(value)
    return None


def read_step_choices(
    model: onnx.ModelProto, inputs: Sequence[InputSpec], caches: Sequence[KvTensor | StateTensor], context_length: int
) -> StepChoices:
    """The choices of the graph `model`; `inputs` and `caches` are those of the decoder's spec.

    Trials on the opened model find the rest: what comes after operators that `onnx.reference` does not run, and what
    depends on the tokens' content, except a reduction of a whole step to one number.
    """
    if reduced := _whole_reduction(model.graph):
        return StepChoices(leak=f"'{reduced.name}' ({reduced.op_type}) makes one number of all tokens of a step")
    part = PositionalNodes(model, inputs, caches)
    numbers = [number for number in part.constants() if CHUNK < number <= 2 * context_length][:MOST_CONSTANTS]
    has_own_pasts = any(entry.role in _OF_EACH_ROW for entry in inputs)
    try:
        by_length, leak = StepComparison(part, numbers, context_length, has_own_pasts).compare()
    except UnrunnableError as error:  # the trials remain
        logger.debug("the nodes that make positions and lengths cannot be run: %s", error)
        by_length, leak = [], ""
    windows = {entry.i for node in model.graph.node for entry in node.attribute if entry.name == "local_window_size"}
    numbers = sorted(number for number in {*numbers, *windows} if number > CHUNK)
    return StepChoices(tuple(by_length), leak, tuple(numbers))


def choice_notes(choices: StepChoices, alone: str) -> Iterator[str]:
    """A sentence on each choice, and on why texts are fed `alone`, for `olive-ext check`."""
    for choice in choices.by_length:
        yield (
            f"texts of more than {choice.length} tokens are computed otherwise than shorter ones ('{choice.value}'): a "
            "text counts as a whole, with what is generated so far, and shares nothing with texts on the other side"
        )
    if alone:
        yield ALONE.format(alone)


def _whole_reduction(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The first reduction of floats that keeps neither the rows nor the tokens of a step."""
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    known = constants_of(graph)
    for node in graph.node:
        if node.op_type not in _REDUCTIONS or types.get(node.input[0]) not in floats:
            continue
        axes = attribute(node, "axes", None)
        if axes is None and len(node.input) > 1 and node.input[1]:
            tensor = known.get(node.input[1])
            axes = [-1] if tensor is None else numpy_helper.to_array(tensor).reshape(-1).tolist()
        is_noop = attribute(node, "noop_with_empty_axes", 0)
        if (not axes and not is_noop) or (axes and {0, 1} <= set(axes)):
            return node
    return None
