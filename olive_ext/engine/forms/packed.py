"""Packed steps: the tokens of many slots, each after its own past, which lies in blocks that a table assigns to rows
(PagedAttention, on CUDA and WebGPU). GroupQueryAttention is rewritten where the device has a kernel to be trusted.

Slots that share a prefix name its blocks; the blocks in which such a prefix ends are copied, all of a step in one run,
when a slot is about to write there. The graph writes in place.

Steps in which every row decodes can be captured, padded with idle rows to 1, 2, 4, ... 64 rows. A captured step reads
tokens, positions, lengths and block tables from values on the device that are filled anew for each run. Its shapes
are frozen. So are the bounds of lengths that the host gives the attention: these hold for all steps whose longest row
lies between two powers of two, which have one block table's width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms.attention_trial import AttentionTrial, attends_otherwise, attention_trials
from olive_ext.engine.forms.buckets import PADDING, Capture, NotCapturedError, Shape, filled, shape_of
from olive_ext.engine.forms.kv_store import ONE_BY_ONE, GraphForm, KvPlace, KvStore, OpenedDecoder, Pool, decoder_graph
from olive_ext.engine.forms.paged_attention import KERNELS, gathered_bytes, with_paged_attention
from olive_ext.engine.runners.runner import NotFittingError, ReadySequences, Runner, ScoredSteps, ScoringRule, StepForm
from olive_ext.engine.runners.trials import STEM, TARGETS, Text, disagreement, draw, targets_of, two_ends_problem
from olive_ext.engine.scheduling.blocks import BlockCopy, BlockTables
from olive_ext.engine.scheduling.sequences import ChosenRow
from olive_ext.engine.step import UNLIMITED, Blocks, Capacity, Columns, Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import ConfigError, ProviderError, RunError
from olive_ext.graph.edits import WHOLE_LENGTH
from olive_ext.graph.nodes import ModelProto
from olive_ext.graph.standalone_graphs import RowTensor, copy_positions_graph, move_graph
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import BLOCK_SIZE, Decision, against_buckets, against_capture, planned_positions
from olive_ext.model.providers.bindings import KeptBinding
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import ceiling
from olive_ext.model.spec.step_choices import ALONE
from olive_ext.model.types import DecoderSpec, Role

IDLE_SLOT = -2
"""The slot of rows that pad a step, after the other rows: they write into a block that no slot holds."""


def longest_step(device: str) -> int:
    """The most tokens in a step that the device is known to handle without a crash."""
    return KERNELS[device].most_tokens if device in KERNELS else UNLIMITED


@dataclass(frozen=True)
class PackedSteps(StepForm):
    """A step has any slots, with any numbers of tokens."""

    name: ClassVar[str] = "packed"
    has_blocks: ClassVar[bool] = True

    most_cells: int = UNLIMITED
    """The most rows times positions of the longest row, for kernels that gather the keys and values of all rows."""

    longest_step: int = UNLIMITED

    def _within(self, lengths: Iterable[int]) -> int:
        """How many rows of these lengths, from the first on, a step holds: at least one."""
        if self.most_cells >= UNLIMITED:
            return UNLIMITED
        longest, count = 0, 0
        for length in lengths:
            longest = max(longest, length)
            if count and (count + 1) * longest > self.most_cells:
                break
            count += 1
        return count

    @override
    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        most = other.most_cells if isinstance(other, PackedSteps) else UNLIMITED
        return replace(self, most_cells=min(self.most_cells, most))

    @override
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        inputs, short = ready.split()
        short = short[: min(ready.limit, self._within(sequence.computed + 1 for sequence in short))]
        rows: list[ChosenRow] = [(sequence, ready.row(sequence, 1)) for sequence in short]
        num_short, room = len(rows), ready.most_tokens - len(rows)
        for sequence in inputs:
            if room <= 0 and rows:
                break
            row = ready.row(sequence, max(1, room))
            if sequence.media and len(row.tokens) > room:  # it begins with an item, which is not cut
                if len(rows) == num_short:
                    return [(sequence, row)]
                continue
            rows.append((sequence, row))
            room -= len(row.tokens)
        return rows[: self._within(row.past + len(row.tokens) for _, row in rows)]

    @override
    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        return most_tokens - pending, UNLIMITED

    @override
    def scored_steps(self, rule: ScoringRule) -> ScoredSteps:
        return ScoredSteps("packed", rule.reason)

    @override
    def runs(self, other: StepForm) -> bool:
        return True


class PagedKv(KvStore):
    """A pool of blocks for each KV tensor, which is past and present in one."""

    form = PackedSteps()
    kv_binding = f"blocks of {BLOCK_SIZE} positions, which slots share where their prefixes are equal"

    def __init__(self, place: KvPlace, *, has_idle_rows: bool = False) -> None:
        super().__init__(place)
        self._num_spare = int(has_idle_rows)
        cells = place.num_slots * planned_positions(place.spec) if place.spec.gathered_bytes else UNLIMITED
        self.form = PackedSteps(cells, longest_step(place.device.kind))
        self._most_blocks = self.capacity.most_positions // BLOCK_SIZE
        self.capacity = Capacity(place.num_slots, blocks=Blocks(0, BLOCK_SIZE))  # these bound the positions
        self._tables = BlockTables(place.num_slots, 0, BLOCK_SIZE)
        self._forker: ort.InferenceSession | None = None
        self._pools: list[Pool] = []
        self._forking: ort.IOBinding | None = None
        self._binding: ort.IOBinding | None = None
        self._table = next(entry.tensor.name for entry in self._spec.inputs if entry.role is Role.BLOCK_TABLE)

    @override
    def halve(self) -> bool:
        fewer = self._tables.num_blocks // 2
        if fewer < self._tables.blocks_per_slot:  # the longest sequence would not fit
            return False
        self._most_blocks = fewer
        return True

    @override
    def reserve(self, positions: int) -> None:
        self.close()
        num_slots, longest = self.capacity.num_slots, -(-positions // BLOCK_SIZE)
        number = max(longest, min(self._most_blocks, num_slots * longest))
        self.capacity = self.capacity._replace(positions=positions, blocks=Blocks(number, BLOCK_SIZE))
        self._tables = BlockTables(num_slots, positions, BLOCK_SIZE, number)
        for tensor in self._spec.kv:
            where = self._device, self._open_graph
            self._pools.append(Pool(self._session, tensor, number + self._num_spare, *where))
        self._binding = self.bind_anew(())

    def copy(self, copies: Items[Copy]) -> None:
        """Copies nothing: the blocks are assigned to the other slot."""
        for copy in copies:
            self._tables.fork(copy)

    @override
    def bind(self, rows: Items[Row]) -> ort.IOBinding:
        copies = [self._tables.make_room(*row) for row in self._tables.without_room(Columns.of(rows))]
        self._copy_blocks([copy for copy in copies if copy is not None])
        assert self._binding is not None
        return self._binding

    @override
    def bind_anew(self, rows: Items[Row]) -> ort.IOBinding:
        binding = KeptBinding(self._session)
        for tensor, pool in zip(self._spec.kv, self._pools, strict=True):
            pool.bind(binding, tensor.past, tensor.present)
        return binding

    @override
    def bind_masks(self, bind: Callable[[str, npt.NDArray[Any]], None], step: Step) -> None:
        slots_B, tables = step.columns.slots_B, self._tables
        tables_BP = np.full((len(slots_B), tables.blocks_per_slot), tables.num_blocks, np.int32)
        is_used_B = slots_B != IDLE_SLOT
        tables_BP[is_used_B] = tables.tables_SP[slots_B[is_used_B]]
        number = None if step.width is None else tables.covering(step.width)
        bind(self._table, np.ascontiguousarray(tables_BP[:, :number]))

    @override
    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "kv_blocks": self._tables.num_blocks}

    @override
    def close(self) -> None:
        self._binding = self._forking = None
        self._pools.clear()

    def _copy_blocks(self, copies: Items[BlockCopy]) -> None:
        """Makes all copies in one run, which reads before it writes: a block may be both source and target."""
        if not copies:
            return
        by_address = self._device.has_pointers
        if self._forker is None:
            rows = [RowTensor(tensor.elem_type, (None, tensor.heads, tensor.head_size)) for tensor in self._spec.kv]
            words = [pool.words for pool in self._pools]
            self._forker = self._open_graph(copy_positions_graph(words) if by_address else move_graph(rows))
        if (binding := self._forking) is None:
            binding = self._forking = self._forker.io_binding()
            for i, pool in enumerate(self._pools):
                pool.bind_copy(binding, i)
        *blocks, lengths_K = np.array(copies, np.int64).T
        within_M = np.concatenate([np.arange(length) for length in lengths_K])
        for name, blocks_K in zip(("source", "target"), blocks, strict=True):
            rows_K = blocks_K.astype(np.int32).reshape(-1, 1, 1, 1)
            positions_M = np.repeat(blocks_K * BLOCK_SIZE, lengths_K) + within_M
            binding.bind_cpu_input(name, positions_M if by_address else rows_K)
        if not by_address:  # what lies after the shorter ones is written before it is read
            binding.bind_cpu_input("count", lengths_K.max(keepdims=True))
        self._forker.run_with_iobinding(binding)


class PackedOnGraph(GraphForm):
    """Attention over a paged cache: the graph's own, or put in place of its attention."""

    name = "packed"

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__(model)
        self._trials: list[AttentionTrial] = []

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        engine, spec, device = model.settings.engine, model.spec, model.device.kind
        if spec.is_paged:
            _refuse_long_steps(model)
            return None
        if engine.scoring not in ("auto", "packed") or (engine.scoring == "auto" and device not in KERNELS):
            return ""
        if device not in KERNELS:
            return f"CUDA and WebGPU have paged attention, {device} has not"
        if engine.graph == "untouched":
            return "the graph is to run as it is, and packed steps need another attention"
        if model.buckets.steps == "all":
            return "packed steps have any shape, and steps are to have few"
        if reason := against_buckets(spec):
            return reason
        if any(entry.role is Role.POSITION_IDS and len(entry.tensor.shape) == 3 for entry in spec.inputs):
            return "positions are on three axes"
        if device == "webgpu" and spec.rounds_rows:
            return "packed steps add up in another order, which the rounding of activations would show"
        taken = KERNELS[device].quantized | set(KERNELS[device].floats.values())
        if others := {tensor.elem_type for tensor in spec.kv} - taken:
            return f"the {device} device has no paged attention over caches of ONNX's element type {min(others)}"
        _refuse_long_steps(model, " or 'engine.scoring' = \"rows\"")
        return None

    @classmethod
    @override
    def refused(cls, model: ResolvedModel, reason: str) -> str:
        if model.settings.engine.scoring == "packed":
            raise ConfigError(f"'engine.scoring' = \"packed\": {reason}", "engine.scoring")
        return f"{ONE_BY_ONE}: {reason}"

    @classmethod
    @override
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        if model.spec.is_paged:
            return Decision("scoring", "packed", "the graph has a paged cache")
        # Decoding too: a step of 64 rows after 500 positions takes an H200 3.4 ms (2026-11-27); for rows in slots of
        # their own, with XQA or without, there is no number to choose by.
        return Decision(
            "scoring", "packed", f"{model.settings.engine.scoring}: if attention over a paged cache agrees", "tried"
        )

    @override
    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        if spec.is_paged:
            return proto, self._counted(proto, spec)
        tokens = [entry.tensor.name for entry in spec.inputs if entry.role in (Role.INPUT_IDS, Role.POSITION_IDS)]
        kept = {*tokens, WHOLE_LENGTH}
        lengths = [entry.tensor.name for entry in spec.inputs if entry.tensor.name not in kept]
        caches = {tensor.past: tensor for tensor in spec.kv}
        paged = with_paged_attention(proto, caches, tokens, lengths, KERNELS[self.model.device.kind])
        paged_spec = replace(self.model.spec_of(paged), notes=spec.notes, choices=spec.choices)
        return paged, self._counted(paged, paged_spec)

    def _counted(self, paged: ModelProto, spec: DecoderSpec) -> DecoderSpec:
        """Also returns what the attention gathers beside its caches, which is to be tried."""
        caches = {tensor.past: tensor for tensor in spec.kv}
        self._trials = attention_trials(paged, caches)
        if (kernel := KERNELS.get(self.model.device.kind)) is not None:
            spec = replace(spec, gathered_bytes=gathered_bytes(paged, caches, kernel))
        if self.model.buckets.is_captured and (problem := against_capture(spec)):
            self.model.buckets.without(problem)
        return spec

    @override
    def refusal_of_graph(self) -> str | None:
        try:
            self.rewrite(*decoder_graph(self.model))
        except NotFittingError as error:
            return str(error)
        return None

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        return PagedKv(place, has_idle_rows=self.model.capture(place.spec).is_captured)

    @override
    def trial(self, decoder: OpenedDecoder) -> None:
        """Compares attention by itself, then a small tree through the model, then captured steps with plain ones.
        Raises `ProviderError` for a graph that has no other attention to fall back to."""
        runner = decoder.runner
        problem = attends_otherwise(runner, self._trials, decoder.chunk_size)
        if problem is None and runner.capacity.num_slots > 1:
            problem = check_packed_steps(runner, decoder.spec.vocab_size)
        if problem is not None and self.model.spec.is_paged:
            raise ProviderError(f"{problem}; the graph has no other attention: use another provider or device")
        if problem is not None:
            raise NotFittingError(problem)
        plan = self.model.capture(decoder.spec)
        if plan.is_captured:
            problem = check_captured_steps(runner, decoder.spec.vocab_size, decoder.chunk_size)
        if problem is not None and plan.is_tried:
            raise NotCapturedError(problem)
        if problem is not None:
            self.model.buckets.without(problem)


def _refuse_long_steps(model: ResolvedModel, otherwise: str = "") -> None:
    """Raises `ConfigError` for steps of more tokens than the device's kernel is known to handle, and for texts that are
    fed in one step and have more tokens than that."""
    size, spec, device = model.settings.engine.chunk_size, model.spec, model.device.kind
    most = longest_step(device)
    problem = f"steps over a paged cache on the {device} device have at most {most} tokens"
    problem += ", because longer ones crash near a full context"
    if isinstance(size, int) and size > most:
        raise ConfigError(f"{problem}; give {most}{otherwise}", "engine.chunk_size", size)
    if spec.alone and spec.context_length > most:
        why = ALONE.format(spec.alone)
        shown = f"'max_length': texts may have {spec.context_length} tokens, and {why}; {problem}"
        raise ConfigError(f"{shown}; give {most} at most, or another 'execution_provider'")


def check_packed_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why packed steps must not be used on this model and device; None where they score as single rows do."""

    def together(stem: Text, left: Text, right: Text) -> FloatArray:
        runner.run(Step((Row(0, 0, stem + left[:2]),)))
        rows = Row(0, STEM + 2, left[2:]), Row(1, STEM, right)
        read = LogitsRow(0, len(left) - 3), LogitsRow(1, len(right) - 1)
        return runner.run(Step(rows, read, targets_of(2), copies=(Copy(0, 1, STEM),))).target_logprobs

    return two_ends_problem(runner, vocab_size, "a packed step", "packed steps", together)


MOST_ROWS = 64
"""Steps of more rows are not captured, and the trial has no more. On an H200, captured steps are 1.29 times as fast
with 8 rows, 1.06 with 64 and 1.006 with 256."""

PLAIN_RUNS = 3
"""Steps of one shape that run plainly before one is captured, which takes two runs."""

MOST_STEPS = 64
"""The most captured steps: each holds memory of the device."""

ROUNDS = PLAIN_RUNS
"""Steps of the trial, which run plainly first, then captured."""

MOST_OTHERS = 0.25
"""The part of the greedy tokens that may differ in the trial: two may be equally probable but for the last bit."""


class PackedCapture(Capture):
    """The captured steps of a session over a paged cache, one for each bucket of rows and of positions."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        super().__init__(session, device)
        self._num_seen: Counter[Shape] = Counter()

    @override
    def prepared(self, step: Step, num_slots: int) -> tuple[Step, bool]:
        padded = self._padded(step)
        if padded is not None:
            shape = shape_of(padded)
            self._num_seen[shape] += 1
            has_room = self._num_seen[shape] > PLAIN_RUNS and len(self._steps) < MOST_STEPS
            if has_room or shape in self._steps:
                return padded, True
        return replace(step, logits_rows=step.logits_rows or (LogitsRow(0, 0),)), False

    @override
    def forget(self) -> None:
        super().forget()
        self._num_seen.clear()

    def _padded(self, step: Step) -> Step | None:
        """The step, padded to its bucket; None where not every row decodes, or it reads more than a bucket has."""
        num_rows, longest = len(step.rows), max(row.past for row in step.rows)
        num_reads = max(len(step.logits_rows), len(step.targets), len(step.samples))
        if num_rows > MOST_ROWS or max(num_reads, step.num_tokens) > num_rows or step.beams or step.whole_length:
            return None
        size = ceiling(num_rows)
        return replace(
            step,
            rows=filled(step.rows, size, Row(IDLE_SLOT, 0, (PADDING,))),
            logits_rows=filled(step.logits_rows, size, LogitsRow(0, 0)),
            targets=filled(step.targets, size, (0, PADDING)),
            samples=filled(step.samples, size, 0) if step.samples else (),
            follows=filled(step.follows, size, -1) if step.follows else (),
            width=max(BLOCK_SIZE, ceiling(1 + longest)),
        )


def check_captured_steps(runner: Runner, vocab_size: int, chunk_size: int) -> str | None:
    """Why captured steps must not be used on this model and device; None where replays find what plain steps find. They
    are tried on other tokens, after prefixes in one block and in several."""
    longest = min(2 * BLOCK_SIZE + ROUNDS, runner.traits.context_length - ROUNDS)
    tokens_of = draw(vocab_size)
    runner.reserve(longest + ROUNDS)
    capacity = runner.capacity
    fitting = min(MOST_ROWS, capacity.num_slots * 3 // 4, capacity.blocks.number // 3)
    num_rows = min(max(3, fitting), capacity.num_slots)
    lengths = [min(length, longest) for length in (longest, BLOCK_SIZE - 1, *range(7, 5 + num_rows))][:num_rows]
    text = tokens_of(longest)
    steps = [_round(lengths, number, tokens_of(len(lengths))) for number in range(ROUNDS)]
    try:
        for past in range(0, longest, chunk_size):
            runner.run(Step((Row(0, past, text[past : past + chunk_size]),)))
        copies = tuple(Copy(0, slot, length) for slot, length in enumerate(lengths) if slot)
        steps[0] = replace(steps[0], copies=copies)
        runs, outputs = [_num_replayed(runner)], []
        for _ in range(2):
            outputs.append([runner.run(step) for step in steps])
            runs.append(_num_replayed(runner))
    except RunError as error:
        return f"a captured step fails: {error}"
    runner.release_memory()  # requests decide how long slots are
    if runs != [runs[0], runs[0], runs[0] + ROUNDS]:
        return "no step was captured"
    plain, again = ([output.target_logprobs for output in run] for run in outputs)
    if np.mean([a.greedy_ids != b.greedy_ids for a, b in zip(*outputs, strict=True)]) > MOST_OTHERS:
        return "replays of a captured step find other tokens"
    return disagreement("replays of a captured step", plain, again, plain[1])


def _round(lengths: list[int], number: int, tokens: tuple[int, ...]) -> Step:
    rows = tuple(Row(slot, length + number, (tokens[slot],)) for slot, length in enumerate(lengths))
    reads = tuple(LogitsRow(slot, 0) for slot in range(len(rows)))
    return Step(rows, reads, tuple((slot, TARGETS[slot % 4]) for slot in range(len(rows))))


def _num_replayed(runner: Runner) -> int:
    return int(runner.describe()["steps_replayed"])
