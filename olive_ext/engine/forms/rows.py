"""Rows of slots: a step has several tokens of one slot, or one token of each of many; short answers share steps as
decoding rows do. First the planner's forms, then the KV that the graph writes in place, then the form on ONNX Runtime.

GroupQueryAttention refuses several tokens after a past in a batch, so an input is a step of its own. Alone, n short
answers take n steps. Together, each `num_slots` of them take as many steps as the longest has tokens, and one copy of
the prefix each.

In memory with addresses (CPU, CUDA) rows are bound by pointer, past and present in one:

    buffer [slots, heads, capacity, head_size]      rows 2 and 3 of a step = one view that starts at slot 2

On a device whose values have no address (WebGPU, DirectML) rows cannot be bound out of a buffer:

    pool [slots, ...]       decoding reads and writes all rows in place
    staging [1, ...]        a row with several tokens runs here; it stands for one slot until another one is needed

Between the two rows move on the device, in place, and only the positions that are resident. All copies between slots of
a step are one such run within the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.buckets import with_buckets
from olive_ext.engine.forms.kv_store import GraphForm, KvPlace, KvStore, OpenedDecoder
from olive_ext.engine.runners.runner import OneRow, ReadySequences, Runner, ScoredSteps, ScoringRule, StepForm
from olive_ext.engine.runners.trials import STEM, Text, score, targets_of, two_ends_problem
from olive_ext.engine.scheduling.sequences import ChosenRow, Sequence
from olive_ext.engine.step import Capacity, Copy, FloatArray, LogitsRow, Move, Row, Step
from olive_ext.errors import ConfigError
from olive_ext.graph.standalone_graphs import RowTensor, copy_graph, move_graph
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision, against_buckets
from olive_ext.model.providers.bindings import UINT8, KeptBinding, allocate, device_zeros
from olive_ext.model.types import ITEM_BYTES, KvTensor

LIMITS = (1, 2, 4, 8, 16, 32)
"""The numbers of tokens from which the best limit is chosen."""

TOKENS_PER_STEP, STEP_OF_SLOTS, COPY = 256, 1.1, 0.1
"""The costs that the rule compares, in units of a step's cost: one more is due for so many tokens of a row; a step with
a token in every slot; a copy of a slot. On a device, a step of a few tokens costs what it takes to read the weights,
and a copy what it takes to read one slot."""

MARGIN = 0.95
"""Answers share steps where that costs less than this part of one step for each."""


@dataclass(frozen=True)
class SlotRows(StepForm):
    """The base of forms over slots: inputs come first, each alone."""

    answers: bool = False
    """Whether scored texts may be fed one token a step, many of them in one step, as rows that decode are."""

    @override
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        inputs, decoding = ready.split()
        if inputs:
            return [(inputs[0], ready.row(inputs[0], ready.most_tokens))]
        return [(sequence, ready.row(sequence, 1)) for sequence in self.decoding(decoding, ready.limit)]

    def decoding(self, sequences: list[Sequence], limit: int) -> list[Sequence]:
        """The sequences, at most `limit`, of which one step computes one token each."""
        return sequences[:limit]

    @override
    def scored_steps(self, rule: ScoringRule) -> ScoredSteps:
        return AnswerSteps() if self.answers else super().scored_steps(rule)

    @property
    @override
    def padded(self) -> StepForm:
        return AllSlots()

    @override
    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        return replace(self, answers=self.answers and isinstance(other, SlotRows) and other.answers)


@dataclass(frozen=True)
class NeighbouringSlots(SlotRows):
    """A step decodes neighbouring slots; gaps between rows are filled with idle rows."""

    name: ClassVar[str] = "range"
    spans_slots: ClassVar[bool] = True

    @override
    def decoding(self, sequences: list[Sequence], limit: int) -> list[Sequence]:
        first = max(0, sequences[0].slot - limit + 1)  # the slots of a step are no more, idle ones included
        return [sequence for sequence in sequences if first <= sequence.slot < first + limit]

    @override
    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        return list(range(slots[0], slots[-1] + 1))

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, SlotRows | OneRow)


@dataclass(frozen=True)
class AllSlots(SlotRows):
    """A step has one row, or a row for every slot; slots that are not decoding have idle rows."""

    name: ClassVar[str] = "pool"

    @override
    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        return slots if len(slots) == 1 else list(range(num_slots))  # a sequence that runs alone has no company

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, AllSlots | OneRow)

    @override
    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        return super().with_other(other, counts) if len(set(counts)) == 1 else OneRow()


class AnswerSteps(ScoredSteps):
    """Short answers share steps where that is cheaper. `answer_tokens` is the most tokens of such an answer."""

    def __init__(self) -> None:
        super().__init__("rows", "by rule: none so far")

    @override
    def choose(self, sequences: Iterable[Sequence], capacity: Capacity) -> None:
        scored = [sequence for sequence in sequences if sequence.generation is None]
        tokens = [sequence.end - sequence.num_shared for sequence in scored]
        num_slots = capacity.for_sequences(max((sequence.end for sequence in scored), default=1)).num_slots
        if tokens and num_slots > 1:
            self.answer_tokens, self.reason = choose_limit(tokens, num_slots)
            self.name = "answers" if self.answer_tokens else "rows"


def choose_limit(tokens: list[int], num_slots: int) -> tuple[int, str]:
    """The cheapest limit for texts of so many tokens after their prefix (0: one step for each), and why."""
    alone = _cost(tokens, 0, num_slots)
    costs = {limit: _cost(tokens, limit, num_slots) for limit in LIMITS}
    limit = min(costs, key=lambda limit: costs[limit])
    words = f"{costs[limit]:.3g} steps' cost expected where answers of up to {limit} tokens share steps"
    return limit if costs[limit] < MARGIN * alone else 0, f"by rule: {words}, {alone:.3g} steps' cost one by one"


def _cost(tokens: Iterable[int], limit: int, num_slots: int) -> float:
    """The cost of texts with so many tokens after their prefix, where texts of up to `limit` tokens share steps."""
    shared = [count for count in tokens if count <= limit]
    rows = max(1, min(num_slots, len(shared)))
    alone = sum(1 + 1 / TOKENS_PER_STEP * count for count in tokens if count > limit)
    return alone + sum(shared) * STEP_OF_SLOTS / rows + len(shared) * COPY


class ViewKv(KvStore):
    """KV that the graph reads and writes in place."""

    form: StepForm = NeighbouringSlots()
    kv_binding = "rows by pointer, past and present share one buffer"

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._buffers: list[_Buffer] = []
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._copier: ort.InferenceSession | None = None

    @override
    def reserve(self, positions: int) -> None:
        self._bindings.clear()  # not `close`: what a store keeps beside the slots stays
        self._buffers.clear()
        self.capacity = self.capacity._replace(positions=positions)
        for tensor in self._spec.kv:
            self._buffers.append(_Buffer(tensor, self.capacity.num_slots, positions, self._place))

    @override
    def copy(self, copies: Items[Copy]) -> None:
        if self._copier is None and self._device.kind != "cpu":
            self._copier = self._open_graph(copy_graph([UINT8] * len(self._buffers)))  # CUDA copies no fp8 by its type
        for copy in copies:
            if self._copier is None:
                positions = slice(copy.num_equal, copy.length)
                for buffer in self._buffers:
                    buffer.by_position[copy.target, positions] = buffer.by_position[copy.source, positions]
                continue
            binding = self._copier.io_binding()
            for i, buffer in enumerate(self._buffers):
                binding.bind_input(f"x{i}", *buffer.bytes_of(copy.source))
                binding.bind_output(f"y{i}", *buffer.bytes_of(copy.target))
            self._copier.run_with_iobinding(binding)

    @override
    def move(self, move: Move) -> None:
        for buffer in self._buffers:  # in the host's memory; the positions of slot 0 may overlap
            memory = buffer.by_position[0]
            memory[move.target : move.target + len(move.source_N)] = memory[move.source_N]

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        key = rows[0].slot, len(rows)
        if key not in self._bindings:
            self._bindings[key] = self.bind_anew(rows)
        return self._bindings[key]

    @override
    def bind_anew(self, rows: Items[Row]) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, buffer in zip(self._spec.kv, self._buffers, strict=True):
            view = buffer.view(rows[0].slot, len(rows))
            binding.bind_input(tensor.past, *view)
            binding.bind_output(tensor.present, *view)
        return binding

    @override
    def close(self) -> None:
        self._bindings.clear()
        self._buffers.clear()


class _Buffer:
    """Zeroed memory of one KV tensor. It is held as bytes, so that types which numpy lacks do not matter."""

    def __init__(self, tensor: KvTensor, num_slots: int, capacity: int, place: KvPlace) -> None:
        self._tensor = tensor
        self._device = place.device
        self._shape = tensor.shape(1, capacity)[1:]
        *outer, inner = self._shape
        shape = [num_slots, *outer, inner * ITEM_BYTES[tensor.elem_type]]
        self._slot_bytes = math.prod(shape[1:])
        if place.device.kind == "cpu":
            memory = np.zeros(shape, np.uint8)
            self.by_position = memory.swapaxes(1, tensor.position_axis)
            self._address = memory.ctypes.data
        else:
            self._value = device_zeros(place.open_graph, shape, place.device)
            self._address = self._value.data_ptr()

    def bytes_of(self, slot: int) -> tuple[str, int, int, list[int], int]:
        """Arguments of IOBinding for one slot as bytes [1, 1, 1, bytes]."""
        address = self._address + slot * self._slot_bytes
        return self._device.kind, self._device.index, UINT8, [1, 1, 1, self._slot_bytes], address

    def view(self, first: int, count: int) -> tuple[str, int, int, list[int], int]:
        """Arguments of IOBinding for slots `first` to `first + count`: device, type, shape, address."""
        address = self._address + first * self._slot_bytes
        return self._device.kind, self._device.index, self._tensor.elem_type, [count, *self._shape], address


Values = list[ort.OrtValue]


class StagedKv(KvStore):
    """KV that the graph reads and writes in place, in a pool or in the staging row."""

    form = AllSlots()
    kv_binding = "device values without address: a pool and a staging row"

    def __init__(self, place: KvPlace) -> None:
        super().__init__(place)
        self._mover: ort.InferenceSession | None = None
        self._staging: Values = []
        self._pool: Values = []
        self._bindings: dict[int, ort.IOBinding] = {}
        self._staged_slot: int | None = None
        self._staged_length: int | None = None
        """The number of positions of the staged slot that the pool does not have yet."""

    @override
    def reserve(self, positions: int) -> None:
        self.close()
        self.capacity = self.capacity._replace(positions=positions)
        self._staging = [self._allocate(tensor, 1) for tensor in self._spec.kv]
        self._bindings[1] = self._binding(self._staging)
        if (num_slots := self.capacity.num_slots) > 1:
            self._pool = [self._allocate(tensor, num_slots) for tensor in self._spec.kv]
            self._bindings[num_slots] = self._binding(self._pool)

    def copy(self, copies: Items[Copy]) -> None:
        """Copies positions from the first on, as many each as the longest copy. All are read before one is written."""
        self._write_back()
        sources: dict[int, int] = {}
        for copy in copies:
            sources[copy.target] = sources.get(copy.source, copy.source)
        self._move(self._pool, self._pool, sources, max(copy.length for copy in copies))
        if self._staged_slot in sources:
            self._staged_slot = None

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        slot, past, tokens = rows[0][:3]
        if len(rows) > 1:
            self._write_back()
            self._staged_slot = None
        elif self._pool:
            if self._staged_slot != slot:
                self._write_back()
                if past:
                    self._move(self._staging, self._pool, {0: slot}, past)
            self._staged_slot, self._staged_length = slot, past + len(tokens)
        return self._bindings[len(rows)]

    @override
    def bind_anew(self, rows: Items[Row]) -> ort.IOBinding:
        return self._binding(self._staging if len(rows) == 1 else self._pool)

    @override
    def close(self) -> None:
        self._bindings.clear()
        self._staging.clear()
        self._pool.clear()
        self._staged_slot = self._staged_length = None

    def _write_back(self) -> None:
        if self._staged_slot is not None and self._staged_length is not None:
            self._move(self._pool, self._staging, {self._staged_slot: 0}, self._staged_length)
            self._staged_length = None

    def _move(self, into: Values, out_of: Values, sources: Mapping[int, int], length: int) -> None:
        """Copies the first positions between rows, `sources` by target: up to a power of two, for few shapes."""
        if self._mover is None:
            rows = [RowTensor(tensor.elem_type, tensor.row_shape) for tensor in self._spec.kv]
            self._mover = self._open_graph(move_graph(rows))
        binding = self._mover.io_binding()
        for i, (target, source) in enumerate(zip(into, out_of, strict=True)):
            binding.bind_ortvalue_input(f"x{i}", target)
            binding.bind_ortvalue_input(f"r{i}", source)
            binding.bind_ortvalue_output(f"y{i}", target)
        for name, numbers in (("source", sources.values()), ("target", sources)):
            binding.bind_cpu_input(name, np.array([*numbers], np.int32).reshape(-1, 1, 1, 1))
        count = min(self.capacity.positions, 1 << (length - 1).bit_length())
        binding.bind_cpu_input("count", np.array([count], np.int64))
        self._mover.run_with_iobinding(binding)

    def _binding(self, values: Values) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, value in zip(self._spec.kv, values, strict=True):
            binding.bind_ortvalue_input(tensor.past, value)
            binding.bind_ortvalue_output(tensor.present, value)
        return binding

    def _allocate(self, tensor: KvTensor, num_rows: int) -> ort.OrtValue:
        return allocate(self._session, tensor.shape(num_rows, self.capacity.positions), tensor.elem_type, self._device)


class RowsOnGraph(GraphForm):
    """Short answers share steps where that is cheaper ("answers"); other texts do not."""

    name = "rows"

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        return None

    @classmethod
    @override
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        is_demanded, problem = model.settings.engine.scoring == "answers", against_answers(model)
        if is_demanded and problem:
            raise ConfigError(f"'engine.scoring' = \"answers\": {problem}", "engine.scoring")
        if problem:
            return Decision("scoring", "rows", reason)
        why = "short answers share steps of one token each where that is cheaper by rule"
        why_answers = "engine.scoring: if steps of short answers agree" if is_demanded else f"{reason}; {why}"
        return Decision("scoring", "answers", why_answers, "tried")

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        return ViewKv(place) if place.device.has_pointers else StagedKv(place)

    @override
    def finish(self, decoder: OpenedDecoder) -> None:
        """Pads steps to shape buckets, then lets short answers share steps, where both are wanted and proven."""
        wanted, size = self.model.buckets, decoder.chunk_size
        decoder.runner = with_buckets(decoder.runner, decoder.spec.vocab_size, size, wanted, decoder.notes)
        if against_answers(self.model) or decoder.runner.capacity.num_slots == 1:
            return
        form = decoder.runner.traits.form
        problem = check_answer_steps(decoder.runner, decoder.spec.vocab_size)
        if problem is not None:
            decoder.notes.append(f"short answers share no steps: {problem}")
        elif isinstance(form, SlotRows):
            decoder.runner.traits = replace(decoder.runner.traits, form=replace(form, answers=True))


def against_answers(model: ResolvedModel) -> str | None:
    """Why short answers are not fed one token a step together; None where they may be."""
    if model.settings.engine.scoring == "rows":
        return "engine.scoring"
    if model.buckets.is_strict:
        return "a step of many answers may have more targets than any that was run beforehand"
    if model.device.kind != "cuda" and model.spec.rounds_rows:
        return "one token is computed otherwise than several, which the rounding of activations would show"
    return against_buckets(model.spec)


def check_answer_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why short answers must not be fed one token a step together; None where they score as single rows do."""
    slots = runner.traits.form.slots_of([0, 1], runner.capacity.num_slots)
    idle = tuple(Row(slot, 0, (0,)) for slot in slots[2:])

    def together(stem: Text, *ends: Text) -> FloatArray:
        score(runner, stem)
        for depth, tokens in enumerate(zip(*ends, strict=True)):
            rows = tuple(Row(slot, STEM + depth, (token,)) for slot, token in enumerate(tokens))
            copies = () if depth else (Copy(0, 1, STEM),)
            step = Step((*rows, *idle), (LogitsRow(0, 0), LogitsRow(1, 0)), targets_of(2), copies=copies)
            logprobs_T = runner.run(step).target_logprobs
        return logprobs_T

    what = "a step of short answers", "short answers together"
    return two_ends_problem(runner, vocab_size, *what, together)
