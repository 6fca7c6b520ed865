"""Where a decoder's graph computes a token otherwise by the step that it is fed in: by the step's longest row, by the
chunk, or by the rows beside it. The nodes from positions, masks and lengths to what the layers read are run on small
steps, and what they make of the same positions is compared. Knows no session, and no names of inputs.

Axes: B rows, S tokens of a row, P positions before them, T positions after the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from onnx import TensorProto, numpy_helper

from olive_ext.graph.nodes import attribute
from olive_ext.model.spec.positional_nodes import PositionalNodes, UnrunnableError
from olive_ext.model.spec.step_comparison import CHUNK, StepComparison
from olive_ext.model.types import DecoderSpec, InputSpec, KvTensor, Role, StateTensor, StepChoices

logger = logging.getLogger(__name__)

MOST_CONSTANTS = 64
"""Numbers in the nodes that lengths are compared with, the smallest of them; two or three are usual."""

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
"""Inputs that tell rows behind different numbers of positions apart. A graph that has none takes positions from the
cache's shape (T5 and Whisper of two exporters), and rows share its steps only behind equally many."""

_TABLE_OFFSET = "multirotarycacheconcatoffset"

_REDUCTIONS = frozenset(
    {"ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd"}
)


def as_opened(spec: DecoderSpec, failure: str, used: int | None, written: int | None) -> DecoderSpec:
    """`spec` as its decoder is opened: each request is fed whole and alone for the `failure` of a trial, and where a
    provider takes rotary tables by the step. `used` is the `table_offset` of the providers, `written` the one in
    genai_config.json, whose first table alone counts where no provider that is used takes the second."""
    choices, why = spec.choices or StepChoices(), failure
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
    notes = (*spec.notes, f"each request is fed whole and alone: {why}")
    return replace(spec, choices=choices, is_splittable=False, notes=notes)


def table_offset(options: Any) -> int | None:
    """Rows of the first of two rotary tables, one behind the other, between which a provider chooses by a step's length
    (WebGPU, TensorRT RTX); None where `options`, of one provider or of several, have no such."""
    inner = list(options.values()) if isinstance(options, Mapping) else options if isinstance(options, list) else []
    named = options.items() if isinstance(options, Mapping) else ()
    own = [str(value) for name, value in named if name.lower().replace("_", "").removeprefix("nv") == _TABLE_OFFSET]
    offsets = [int(value) for value in own if value.isdecimal()] + [table_offset(value) for value in inner]
    return next((offset for offset in offsets if offset is not None), None)


def read_step_choices(
    model: onnx.ModelProto, inputs: Sequence[InputSpec], caches: Sequence[KvTensor | StateTensor], context_length: int
) -> StepChoices:
    """The choices of the graph `model`; `inputs` and `caches` are those of the decoder's spec. Nothing is seen behind
    operators that `onnx.reference` does not run, and by numbers that the graph computes of the tokens' content, but for
    one number of a whole step: trials on the opened model are what sees these."""
    if reduced := _whole_reduction(model.graph):
        return StepChoices(leak=f"'{reduced.name}' ({reduced.op_type}) makes one number of all tokens of a step")
    part = PositionalNodes(model, inputs, caches)
    numbers = [number for number in part.constants() if CHUNK < number <= 2 * context_length][:MOST_CONSTANTS]
    has_own_pasts = any(entry.role in _OF_EACH_ROW for entry in inputs)
    try:
        by_length, leak = StepComparison(part, numbers, context_length, has_own_pasts).compare()
    except UnrunnableError as error:  # the trials remain
        logger.debug("the nodes behind positions and lengths cannot be run: %s", error)
        by_length, leak = [], ""
    windows = {entry.i for node in model.graph.node for entry in node.attribute if entry.name == "local_window_size"}
    numbers = sorted(number for number in {*numbers, *windows} if number > CHUNK)
    return StepChoices(tuple(by_length), leak, tuple(numbers))


def choice_notes(choices: StepChoices) -> Iterator[str]:
    """A sentence on each choice, for `olive-ext check`."""
    for choice in choices.by_length:
        yield (
            f"texts of more than {choice.length} tokens are computed otherwise than shorter ones ('{choice.value}'): a "
            "text counts as a whole, with what is generated so far, and shares nothing with texts on the other side"
        )
    if choices.leak:
        yield f"each request is fed whole and alone, because its step would change its numbers: {choices.leak}"


def _whole_reduction(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The first reduction of floats that leaves neither rows nor tokens of a step."""
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
    known = {node.output[0]: attribute(node, "value", None) for node in graph.node if node.op_type == "Constant"}
    known |= {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in _REDUCTIONS or types.get(node.input[0]) not in floats:
            continue
        axes = attribute(node, "axes", None)
        if axes is None and len(node.input) > 1 and node.input[1]:
            given = known.get(node.input[1])
            axes = [-1] if given is None else numpy_helper.to_array(given).reshape(-1).tolist()
        is_noop = attribute(node, "noop_with_empty_axes", 0)
        if (not axes and not is_noop) or (axes and {0, 1} <= set(axes)):
            return node
    return None
