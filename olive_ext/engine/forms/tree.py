"""Tree batches: many texts that are scored in one row of the graph, after the prefix that they share. First when they
pay, then the graph's inputs for them, then the form on ONNX Runtime. It is for the CPU, because cells are moved in the
host's memory. `scheduling.prefix_tree` says which rows the next step holds.

GroupQueryAttention takes several tokens after a past in one row only, and there each token sees all cells before its
own. With a bias that hides cells, and positions that are not counted but an input, that row's tokens form a tree:

cells     0 1 2 3 4 | 5 6 7 | 8 9        a prefix, then "x y z" and "u v", both after the prefix
positions 0 1 2 3 4 | 5 6 7 | 5 6        "u" does not see cells 5 to 7

Axes: B rows, S tokens of a step, T cells or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper
from typing_extensions import override

from olive_ext.engine.forms.kv_store import ONE_BY_ONE, GraphForm, KvPlace, KvStore, OpenedDecoder
from olive_ext.engine.forms.rows import ViewKv
from olive_ext.engine.runners.runner import NotFittingError, Runner, ScoredSteps, ScoringRule
from olive_ext.engine.runners.trials import STEM, SUFFIX, Text, targets_of, two_ends_problem
from olive_ext.engine.scheduling.prefix_tree import TreeBatches
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import FIRST_CELL, SHARED_PREFIX, Capacity, FloatArray, LogitsRow, Move, Row, Step
from olive_ext.graph.edits import WHOLE_LENGTH
from olive_ext.graph.nodes import ModelProto, all_names, attribute, makers_of, reads, take_attribute
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import DEFAULT_CHUNK, Decision, against_buckets
from olive_ext.model.types import DecoderSpec, InputSpec, Role, TensorSpec

CELLS_PER_POSITION = 2
"""The most cells of the shared-prefix cache for each position of the context: rotary tables are made to cover them."""


SIZES = (64, 128, 256, 512)
"""The step sizes in tokens, from which the cheapest is chosen."""

DEFAULT_SIZE = 256
"""Tokens of a tree batch before there has been a text to choose by."""

MARGIN = 0.95
"""Tree batches are used if they cost less than this share of one text a step, which moves no cells."""


FIXED, PER_PAIR = 16.0, 1 / 1600
"""The cost of any step, and of each pair of token and cell, in units of one token's cost on a CPU. Measured for
SmolLM2-135M's shape in fp32 on two cores: 10 to 19, and 1/2100 to 1/1200. Numbers that were measured on the opened
model chose steps that were no faster."""


def step_cost(tokens: float, cells: float) -> float:
    """The cost of a step of `tokens` after and among `cells`."""
    return FIXED + tokens + PER_PAIR * tokens * cells


def cost_of_rows(parts: Iterable[tuple[int, int]], size: int) -> float:
    """The cost of the parts, each (tokens to feed, tokens resident before), one by one in steps of `size`."""
    cost = 0.0
    for tokens, past in parts:
        full, rest = divmod(tokens, size)
        cost += sum(step_cost(size, past + size * number) for number in range(1, full + 1))
        cost += step_cost(rest, past + tokens) if rest else 0.0
    return cost


def cost_of_trees(parts: Iterable[tuple[int, int]], size: int) -> float:
    """The cost of the same parts in steps of `size` tokens, as each part's share of them. What does not fit continues
    in the next step, after its own beginning."""
    return sum(step_cost(size, past + size + max(0, tokens - size) / 2) * tokens / size for tokens, past in parts)


class TreeSteps(ScoredSteps):
    """Tree batches of `num_tokens`, or one text a step (0), whichever is cheaper where the form may choose."""

    def __init__(self, chunk_size: int, rule: ScoringRule) -> None:
        super().__init__("tree", "by rule: nothing scored so far" if rule.is_open else rule.reason)
        self._is_open = rule.is_open
        self.num_tokens = DEFAULT_SIZE if rule.is_open else chunk_size

    @override
    def choose(self, sequences: Iterable[Sequence], capacity: Capacity) -> None:
        scored = [sequence for sequence in sequences if sequence.generation is None]
        parts = [(sequence.end - sequence.num_shared, sequence.num_shared) for sequence in scored]
        if self._is_open and parts:
            self.num_tokens, self.reason = choose_size(parts, DEFAULT_CHUNK)
            self.name = "tree" if self.num_tokens else "rows"

    @override
    def batches(self, capacity: Capacity) -> TreeBatches | None:
        return TreeBatches(capacity.cells, self.num_tokens) if self.num_tokens else None

    @override
    def memory(self, scored: int, generated: int, context_length: int, row_group: int) -> tuple[int, int]:
        if not self.num_tokens:
            return super().memory(scored, generated, context_length, row_group)
        cells = FIRST_CELL + scored + self.num_tokens if scored else 0
        return generated, min(cells, CELLS_PER_POSITION * context_length)


def choose_size(parts: list[tuple[int, int]], row_size: int) -> tuple[int, str]:
    """Tokens of a tree batch, or 0 for one text a step, and why: the cheapest for a plan whose parts are (tokens to
    feed, tokens resident before). A part alone is fed in steps of `row_size`."""
    rows = cost_of_rows(parts, row_size)
    batches = {size: cost_of_trees(parts, size) for size in SIZES}
    size = min(batches, key=lambda size: batches[size])
    trees = f"{batches[size]:.3g} tokens' cost expected in steps of {size} tokens"
    return size if batches[size] < MARGIN * rows else 0, f"by rule: {trees}, {rows:.3g} tokens' cost one by one"


BIASES: Mapping[int, tuple[type[np.floating[Any]], float]] = {1: (np.float32, -1e30), 10: (np.float16, -6e4)}
"""numpy's type by ONNX type (FLOAT 1, FLOAT16 10), and the number that is added to an attention score to hide a cell:
finite, because a block of cells that are all hidden must not make NaN."""


class TreeOnGraph(GraphForm):
    """Scored texts in tree batches."""

    name = "tree"

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__(model)
        self._biases: Items[BiasInput] | None = None

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        scoring, spec = model.settings.engine.scoring, model.spec
        if scoring not in ("auto", "tree"):
            return ""
        if model.buckets.steps != "none":
            return "tree batches have any shape, and steps have few"
        if reason := against_buckets(spec):
            return reason
        if model.device.kind != "cpu":
            reason = "the cells of tree batches are moved in the host's memory, and this model's cache is not there"
        elif scoring == "auto" and spec.rounds_rows:
            reason = "tree batches add in another order, which the rounding of activations would show (engine.scoring)"
        return f"{ONE_BY_ONE}: {reason}" if reason else None

    @classmethod
    @override
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        return Decision("scoring", "tree", f"{model.settings.engine.scoring}: where that is cheaper by rule", "tried")

    @override
    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        """The graph with inputs for tree batches. Where it cannot take them, the graph as it is, with a note."""
        has_positions = any(entry.role is Role.POSITION_IDS for entry in spec.inputs)
        try:
            graph, self._biases = with_tree_attention(proto, [tensor.past for tensor in spec.kv], has_positions)
        except NotFittingError as error:
            return proto, replace(spec, notes=(*spec.notes, f"{ONE_BY_ONE}: {error}"))
        if any(value.name == POSITIONS for value in graph.graph.input):
            positions = InputSpec(Role.POSITION_IDS, TensorSpec(POSITIONS, 7, ("B", "S")))
            spec = replace(spec, inputs=(*spec.inputs, positions))
        return graph, spec

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        return ViewKv(place) if self._biases is None else TreeKv(place, self._biases)

    @override
    def trial(self, decoder: OpenedDecoder) -> None:
        runner = decoder.runner
        if self._biases is not None and (problem := check_tree_batches(runner, decoder.spec.num_ids)):
            runner.traits = replace(runner.traits, tree_batches=False)
            decoder.notes.append(f"{ONE_BY_ONE}: {problem}")


class TreeKv(ViewKv):
    """Slots, and beside them the shared-prefix cache: one slot of cells."""

    has_cells = True

    def __init__(self, place: KvPlace, biases: Items[BiasInput]) -> None:
        super().__init__(place)
        self._cells = ViewKv(replace(place, num_slots=1))
        self._biases = biases

    @override
    def reserve_cells(self, num_cells: int) -> None:
        self._cells.reserve(num_cells)
        self.capacity = self.capacity._replace(cells=num_cells)

    @override
    def move(self, move: Move) -> None:
        self._cells.move(move)

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        return self._cells.bind([Row(0, 0, ())]) if rows[0].slot == SHARED_PREFIX else super().bind(rows)

    @override
    def bind_masks(self, bind: Callable[[str, npt.NDArray[Any]], None], step: Step) -> None:
        """Binds the graph's bias inputs. Attention itself hides what comes after a token."""
        for bias in self._biases:
            dtype, hidden = BIASES[bias.elem_type]
            visible = visible_positions if step.first_cell is None else visible_cells
            bind(bias.name, np.where(visible(step, bias.window), dtype(0), dtype(hidden)))

    @override
    def close(self) -> None:
        super().close()
        self._cells.close()


def visible_cells(step: Step, window: int | None) -> npt.NDArray[np.bool_]:
    """[1, 1, S, T] for S tokens of a tree batch and T cells: a token sees the cells of its own row and of the row's
    past, within the window. Cells after the token itself count as seen, because attention hides those."""
    first_cell, num_tokens = step.first_cell, step.num_tokens
    assert first_cell is not None
    visible_ST = np.zeros((num_tokens, first_cell + num_tokens), np.bool_)
    positions_T = np.arange(first_cell + num_tokens) - FIRST_CELL
    for row, start in zip(step.rows, step.columns.starts_B.tolist(), strict=True):
        stop = start + len(row.tokens)
        assert row.cells_P is not None
        visible_ST[start:stop, row.cells_P] = True
        visible_ST[start:stop, first_cell + start : first_cell + stop] = True
        positions_T[first_cell + start : first_cell + stop] = row.past + np.arange(stop - start)
    if window is not None:
        visible_ST &= positions_T[first_cell:, None] - positions_T < window
    return visible_ST[None, None]


def visible_positions(step: Step, window: int | None) -> npt.NDArray[np.bool_]:
    """[1 or B, 1, S, T]: what all positions are masked by, or only those within the window."""
    num_tokens, past_B = len(step.rows[0].tokens), step.columns.past_B
    num_positions = int(past_B.max()) + num_tokens
    if window is None:
        return np.ones((1, 1, num_tokens, num_positions), np.bool_)
    distance_BST = past_B[:, None, None] + np.arange(num_tokens)[:, None] - np.arange(num_positions)
    visible: npt.NDArray[np.bool_] = (distance_BST < window)[:, None]
    return visible


def check_tree_batches(runner: Runner, vocab_size: int) -> str | None:
    """Why tree batches must not be used on this model and device; None where they score as single rows do."""

    def together(stem: Text, left: Text, right: Text) -> FloatArray:
        """One step holds the stem and two tokens of the left end; the next, a tree batch, holds the right end after
        the stem together with the rest of the left one."""
        stem_P = np.arange(FIRST_CELL, FIRST_CELL + STEM, dtype=np.int32)
        begun_P = np.arange(FIRST_CELL, FIRST_CELL + STEM + 2, dtype=np.int32)
        first = Row(SHARED_PREFIX, 0, stem + left[:2], cells_P=stem_P[:0])
        runner.run(Step((first,), first_cell=FIRST_CELL))
        rows = Row(SHARED_PREFIX, STEM, right, cells_P=stem_P), Row(SHARED_PREFIX, STEM + 2, left[2:], cells_P=begun_P)
        read = LogitsRow(1, SUFFIX - 3), LogitsRow(0, SUFFIX - 1)
        return runner.run(Step(rows, read, targets_of(2), first_cell=FIRST_CELL + len(begun_P))).target_logprobs

    cells = FIRST_CELL + STEM + 2 * SUFFIX
    return two_ends_problem(runner, vocab_size, "a tree batch", "tree batches", together, cells)


POSITIONS = "olive_ext/tree_positions"
BIAS = "olive_ext/tree_bias"
TABLE = "olive_ext/tree_table"

_POSITIONS_AT, _BIAS_AT = 9, 10
"""GroupQueryAttention's inputs `position_ids` and `attention_bias`."""

_ROTARY_AT = 7, 8
"""Its inputs `cos_cache` and `sin_cache`."""


@dataclass(frozen=True)
class BiasInput:
    """An input [1 or B, 1, S, T] that is added to the attention's scores, in all layers that see the same cells."""

    name: str
    elem_type: int
    window: int | None
    """The number of positions that a token sees, with its own; None for all."""


def with_tree_attention(
    model: onnx.ModelProto, past_names: Iterable[str], has_positions: bool
) -> tuple[onnx.ModelProto, tuple[BiasInput, ...]]:
    """A copy of `model` in which every attention over the caches `past_names` takes a bias, and `POSITIONS` [B, S]
    where the graph has no such input yet. Also returns the bias inputs.

    A layer's window moves into its bias, because the attention counts it in cells. Raises `NotFittingError` with
    the reason where that cannot be done.
    """
    edited = deepcopy(model)
    elem_types = {value.name: value.type.tensor_type.elem_type for value in edited.graph.input}
    nodes = list(_attentions(edited.graph, set(past_names), elem_types))
    if any(name.startswith((POSITIONS, BIAS, TABLE)) for name in all_names(edited.graph)):
        raise NotFittingError("the graph has values with the names of the new inputs")
    rotates = {bool(attribute(node, "do_rotary", 0)) for node in nodes}
    if rotates == {False} and not has_positions:
        raise NotFittingError("the graph counts positions by itself")
    biases: dict[tuple[int, int | None], BiasInput] = {}
    tables: dict[str, str] = {}
    for node in nodes:
        window = take_attribute(node, "local_window_size", -1)
        key = (elem_types[node.input[3]], window if window > 0 else None)
        bias = biases.setdefault(key, BiasInput(f"{BIAS}_{len(biases)}", *key))
        node.input.extend([""] * (_BIAS_AT + 1 - len(node.input)))
        node.input[_BIAS_AT] = bias.name
        if attribute(node, "do_rotary", 0):
            node.input[_POSITIONS_AT] = node.input[_POSITIONS_AT] or POSITIONS
            for place in _ROTARY_AT:
                node.input[place] = _doubled(edited.graph, node.input[place], tables)
    if any(POSITIONS in node.input for node in nodes):
        edited.graph.input.append(helper.make_tensor_value_info(POSITIONS, onnx.TensorProto.INT64, ["B", "S"]))
    for bias in biases.values():
        shape = [f"{bias.name}_{axis}" for axis in "B1ST"]
        edited.graph.input.append(helper.make_tensor_value_info(bias.name, bias.elem_type, shape))
    return edited, tuple(biases.values())


def _doubled(graph: onnx.GraphProto, table: str, made: dict[str, str]) -> str:
    """A rotary table twice, one after the other; it is made once. GroupQueryAttention demands a row for each cell,
    though no position is that large."""
    if table not in made:
        known = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
        read = {table, *reads(makers_of(graph.node, [table]))}
        inputs = read.intersection(value.name for value in graph.input)
        if table not in known or not inputs <= {WHOLE_LENGTH}:
            raise NotFittingError(f"the rotary table '{table}' is computed from the number of cells")
        made[table] = f"{TABLE}_{len(made)}"
        place = next((number for number, node in enumerate(graph.node) if table in node.output), -1) + 1
        graph.node.insert(place, helper.make_node("Concat", [table, table], [made[table]], name=made[table], axis=0))
    return made[table]


def _attentions(graph: onnx.GraphProto, past_names: set[str], types: Mapping[str, int]) -> Iterator[onnx.NodeProto]:
    """The nodes that read the caches, all of which are GroupQueryAttention without a bias."""
    seen: set[str] = set()
    for node in graph.node:
        caches = past_names.intersection(node.input)
        if not caches:
            continue
        if node.op_type != "GroupQueryAttention":
            raise NotFittingError(f"a cache is read by {node.op_type}, which is not GroupQueryAttention")
        if (elem_type := types[node.input[3]]) not in BIASES:
            raise NotFittingError(f"the cache has the type {onnx.TensorProto.DataType.Name(elem_type)}")
        if any(node.input[_BIAS_AT : _BIAS_AT + 1]):
            raise NotFittingError("the attention has a bias already")
        seen |= caches
        yield node
    if seen != past_names:
        raise NotFittingError(f"nothing reads the cache '{min(past_names - seen)}'")
