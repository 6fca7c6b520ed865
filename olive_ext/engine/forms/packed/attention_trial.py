"""Two models around one attention of a graph, as GroupQueryAttention and as PagedAttention, and whether a device
computes the same in both, on random numbers. Everything goes in and comes out in fp32.

Axes: S tokens of a text, N of all texts, D = heads x head size, H heads of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from olive_ext.engine.forms import agreement
from olive_ext.engine.forms.kv_store import zeros
from olive_ext.engine.forms.packed.kv import Pool
from olive_ext.engine.forms.packed.rewrite import (
    AXIS,
    BOUNDS,
    PASTS,
    STARTS,
    TABLE,
    PackedInputs,
    PagedKernel,
    first_axis,
    paged_nodes,
)
from olive_ext.engine.runners.ort.ort_failures import named_ort_failures
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray
from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.graph.nodes import attribute, model_of
from olive_ext.model.types import KvTensor

WINDOW = 4
"""Positions that windows are cut to, so that few tokens show them."""

LENGTHS = ("last", "total")
PAST = ("past_key", "past_value")
PRESENT = ("present_key", "present_value")
OUTPUT = "attended"

TOLERANCE = 0.05
"""Largest accepted error of attended values around 1: rounding in bfloat16 is a fifth of it, a token that sees wrong
positions is off by far more."""

QUANTIZED_TOLERANCE = 0.3
"""The same where the cache has 8 bits: one kernel attends to what it is about to store, the other to what it has
stored."""

STEM, TEXT = 5, 9
"""Tokens of the first step, and of each of two texts. The second step ends the one and holds the whole other."""

_FLOATS = (1, 10, 16)


_ROTARY_AT, _POSITIONS_AT = 7, 9
_Shape = Sequence[int | str]


@dataclass(frozen=True)
class AttentionTrial:
    """`before` takes `inputs`, `PAST` [1, H, 0, size] and `LENGTHS` int32 [1] and []; `after` takes `inputs`, `PAST` in
    blocks, which it returns as `PRESENT`, and what a packed step has. Both return `OUTPUT` [1, S, D]."""

    before: bytes
    after: bytes
    inputs: Mapping[str, tuple[int, ...]]
    """Shapes in fp32. A 0 stands for the number of tokens."""

    elem_type: int
    """The cache's."""

    heads: int
    head_size: int


def attention_trials(model: onnx.ModelProto, inputs: PackedInputs, kernel: PagedKernel) -> list[AttentionTrial]:
    """One for each kind of attention that has a cache of its own: its attributes, and which inputs it has."""
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[object, AttentionTrial] = {}
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention" or node.input[3] not in inputs.caches:
            continue
        heads, stored = inputs.caches[node.input[3]]
        present = tuple(bool(name) for name in node.input)
        kind = (tuple(sorted(entry.SerializeToString() for entry in node.attribute)), present, heads, stored)
        if kind not in found:
            found[kind] = _TrialGraphs(node, weights, (types[node.input[3]], heads, stored), kernel).build()
    return list(found.values())


class _TrialGraphs:
    def __init__(
        self, node: onnx.NodeProto, weights: Mapping[str, TensorProto], cache: tuple[int, int, int], kernel: PagedKernel
    ) -> None:
        self._source = node
        self._weights = weights
        self._elem_type, self._heads, self._stored = cache
        self._kernel = kernel
        self._node = onnx.NodeProto()
        self._inputs: dict[str, tuple[int, ...]] = {}
        self._casts: list[onnx.NodeProto] = []

    def build(self) -> AttentionTrial:
        node = self._node
        node.CopyFrom(self._source)
        node.output[:] = ["narrow", *PRESENT]
        for entry in node.attribute:
            if entry.name == "local_window_size" and entry.i > 0:
                entry.i = WINDOW
        for place, name in enumerate(self._source.input):
            node.input[place] = self._input(place, name) if name else ""
        return AttentionTrial(
            self._model([node], [("last", [1]), ("total", [])], ["B", self._heads, "P", self._stored], ()),
            self._model(
                paged_nodes(node, node, self._kernel),
                [(TABLE, ["B", "blocks"]), (STARTS, ["B + 1"]), (PASTS, ["B"]), (BOUNDS, [3])],
                ["blocks", "block_size", self._heads, self._stored],
                PRESENT,
            ),
            self._inputs,
            self._elem_type,
            self._heads,
            self._stored,
        )

    def _input(self, place: int, name: str) -> str:
        """The name of the node's input number `place`, which the trial's model takes in its place."""
        if place in (3, 4, 5, 6):
            return (*PAST, *LENGTHS)[place - 3]
        if place == _POSITIONS_AT:
            return ""  # they are counted
        weight = self._weights.get(name)
        dtype = int(weight.data_type) if weight is not None else self._narrow
        shape = (1, 0, self._width(place)) if place < 3 else self._shape(place, weight)
        wide = f"input_{place}"
        self._inputs[wide] = shape
        self._casts.append(helper.make_node("Cast", [wide], [f"{wide}_narrow"], name=wide, to=dtype))
        return f"{wide}_narrow"

    @property
    def _narrow(self) -> int:
        """The type of queries: the cache's, or fp16 where that is quantized."""
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        return self._elem_type if self._elem_type in floats else TensorProto.FLOAT16

    def _width(self, place: int) -> int:
        heads = int(attribute(self._source, "num_heads", 0))
        is_packed = not self._source.input[1]
        count = self._heads if place else heads + (2 * self._heads if is_packed else 0)
        return count * self._stored

    def _shape(self, place: int, weight: TensorProto | None) -> tuple[int, ...]:
        if weight is not None:
            return tuple(weight.dims)
        if place in (_ROTARY_AT, _ROTARY_AT + 1):  # computed from the length
            return (64, self._stored // 2)
        return (1,)

    def _model(
        self,
        nodes: Iterable[onnx.NodeProto],
        integers: Sequence[tuple[str, _Shape]],
        cache: _Shape,
        presents: Iterable[str],
    ) -> bytes:
        value = helper.make_tensor_value_info
        inputs = [
            value(name, TensorProto.FLOAT, [size or "S" for size in shape]) for name, shape in self._inputs.items()
        ]
        inputs += [value(name, self._elem_type, cache) for name in PAST]
        nodes = [
            *self._casts,
            *nodes,
            helper.make_node("Cast", ["narrow"], [OUTPUT], name=OUTPUT, to=TensorProto.FLOAT),
        ]
        read = {name for node in nodes for name in node.input}
        inputs += [value(name, TensorProto.INT32, shape) for name, shape in integers if name in read]
        outputs = [value(OUTPUT, TensorProto.FLOAT, [1, "S", "D"])]
        outputs += [value(name, self._elem_type, cache) for name in presents]
        constants = [first_axis()] if AXIS in read else []
        graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
        return bytes(model_of(graph, 21, "com.microsoft").SerializeToString())


def attends_otherwise(runner: Runner, trials: Sequence[AttentionTrial]) -> str | None:
    """How far the device's attention over a paged cache is from the graph's own; None where that is rounding."""
    for trial in trials:
        try:
            with named_ort_failures("on attention over a paged cache"):
                difference = _difference(trial, runner)
        except (RunError, MemoryShortageError) as error:
            return str(error)
        if not difference <= (TOLERANCE if trial.elem_type in _FLOATS else QUANTIZED_TOLERANCE):
            return f"attention over a paged cache is {difference:.2g} off on this device, of values around 1"
    return None


def _difference(trial: AttentionTrial, runner: Runner) -> float:
    assert runner.open_graph is not None
    rng = np.random.default_rng(0)
    first = _numbers(trial.inputs, rng)
    others = {name: shape for name, shape in trial.inputs.items() if 0 in shape}
    texts = [first, {**first, **_numbers(others, rng)}]
    before = runner.open_graph(trial.before)
    expected = [_prompt(before, trial, text) for text in texts]
    if agreement.NEEDS_SPREAD and (expected[0] == expected[1]).all():
        raise RunError("attention gives two texts the same values, as if this device computed nothing")
    after = runner.open_graph(trial.after)
    shape = KvTensor(PAST[0], PRESENT[0], trial.elem_type, trial.heads, trial.head_size, position_axis=1)
    pools = [Pool(after, shape, 2, runner.device) for _ in PAST]
    stem = _packed(after, pools, _tokens(trial, texts[:1], [(0, STEM)]), [STEM], [0])
    both = _packed(after, pools, _tokens(trial, texts, [(STEM, TEXT), (0, TEXT)]), [TEXT - STEM, TEXT], [STEM, 0])
    found = [np.concatenate([stem, both[:, : TEXT - STEM]], axis=1), both[:, TEXT - STEM :]]
    return float(np.abs(np.array(found) - np.array(expected)).max())


def _numbers(inputs: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, FloatArray]:
    """Values around 1 for the inputs of a text."""
    return {
        name: rng.standard_normal([size or TEXT for size in shape]).astype(np.float32) for name, shape in inputs.items()
    }


def _tokens(
    trial: AttentionTrial, texts: Sequence[Mapping[str, FloatArray]], spans: Sequence[tuple[int, int]]
) -> dict[str, FloatArray]:
    """The inputs of a packed step that holds a span of each text."""
    tokens = dict(texts[0])
    for name in (name for name, shape in trial.inputs.items() if 0 in shape):
        parts = [text[name][:, start:stop] for text, (start, stop) in zip(texts, spans, strict=True)]
        tokens[name] = np.concatenate(parts, axis=1)
    return tokens


def _prompt(session: ort.InferenceSession, trial: AttentionTrial, text: Mapping[str, FloatArray]) -> FloatArray:
    lengths = (np.array([TEXT - 1], np.int32), np.array(TEXT, np.int32))

    def bind_nothing(binding: ort.IOBinding) -> None:
        for name in PAST:
            binding.bind_ortvalue_input(name, zeros([1, trial.heads, 0, trial.head_size], trial.elem_type))

    return _run(session, bind_nothing, {**text, **dict(zip(LENGTHS, lengths, strict=True))})


def _packed(
    session: ort.InferenceSession,
    pools: Sequence[Pool],
    tokens: Mapping[str, FloatArray],
    lengths: Sequence[int],
    pasts: Sequence[int],
) -> FloatArray:
    """A packed step in which row number i has the block i."""
    longest = max(length + past for length, past in zip(lengths, pasts, strict=True))
    integers = {
        TABLE: np.arange(len(lengths))[:, None],
        STARTS: np.concatenate([[0], np.cumsum(lengths)]),
        PASTS: np.array(pasts),
        BOUNDS: np.array([max(lengths), longest, longest]),
    }
    taken = {value.name for value in session.get_inputs()}
    arrays = {name: array.astype(np.int32) for name, array in integers.items() if name in taken}

    def bind_pools(binding: ort.IOBinding) -> None:
        for pool, past, present in zip(pools, PAST, PRESENT, strict=True):
            pool.bind(binding, past, present)

    return _run(session, bind_pools, {**tokens, **arrays})


def _run(
    session: ort.InferenceSession, bind_caches: Callable[[ort.IOBinding], None], arrays: Mapping[str, Any]
) -> FloatArray:
    binding = session.io_binding()
    binding.bind_output(OUTPUT)
    bind_caches(binding)
    for name, array in arrays.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    session.run_with_iobinding(binding)
    attended: FloatArray = binding.get_outputs()[0].numpy()
    return attended
