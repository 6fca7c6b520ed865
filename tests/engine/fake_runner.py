"""A runner that stores token ids where a real one stores keys and values, and an oracle that shares nothing.

Beside each token it notes the source behind which it was computed. An item's tokens are numbers that follow from its
content, whatever the engine has put in their place; a step that cuts an item fails.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from olive_ext.engine.forms.packed import PackedSteps
from olive_ext.engine.forms.returned import AlikeRows
from olive_ext.engine.forms.rows import AllSlots, NeighbouringSlots, SlotRows
from olive_ext.engine.requests import FinishReason, Generation, Request, Result
from olive_ext.engine.runners.runner import ONE_ROW, Capacity, OneRow, Runner, StepForm, Traits
from olive_ext.engine.scheduling.blocks import BlockCopy, BlockTables
from olive_ext.engine.step import UNLIMITED, Blocks, Candidates, Columns, Row, Step, StepOutput
from olive_ext.errors import LostItemError, MemoryShortageError
from olive_ext.media.items import Media, Source, runs_within

SINGLE, RANGE, PACKED, ALIKE, POOL = ONE_ROW, NeighbouringSlots(), PackedSteps(), AlikeRows(), AllSlots()
FORMS = (SINGLE, RANGE, PACKED, ALIKE, POOL)
VOCAB = 23
GARBAGE = -7
FIRST_ITEM = 1 << 40

BLOCK_SIZE = 4
"""Positions of a block where slots are made of blocks."""


Memory = list[tuple[int, Source | None]]
"""Tokens, and the source behind which each was computed."""


def logits_of(prefix: Sequence[int], source: Source | None = None) -> np.ndarray:
    """A distribution that depends on every token of the prefix, and on the source."""
    return _drawn(zlib.crc32(np.array(prefix, np.int64).tobytes(), zlib.crc32(source.array.tobytes()) if source else 0))


@lru_cache(2**16)
def _drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    wide_V = logits_V.astype(np.float64)
    return wide_V - np.log(np.exp(wide_V).sum())


def logprobs_of(prefix: Sequence[int], source: Source | None = None) -> np.ndarray:
    return log_softmax(logits_of(prefix, source))


class FakeRunner(Runner):
    """Holds tokens in slots, or in blocks where it takes packed steps, refuses what a GroupQueryAttention graph
    refuses, and writes garbage in idle rows.

    With `overlaps_steps` it takes steps that follow; `steps` holds them with the tokens that were fed. On each side of
    `lengths` it computes a token otherwise: what is resident shows by which side it was computed.
    """

    host_bytes = 0
    capacity = Capacity(0)
    bad = ""
    """The key of an item on which its encoder fails."""

    num_lost = 0
    """How often it has failed."""

    embedding = SimpleNamespace(check=id, expect=id)
    """Takes requests with items and without, behind padding too."""

    def __init__(
        self,
        num_slots: int,
        form: StepForm,
        context_length: int = 512,
        *,
        can_rewind: bool = True,
        chunked_prefill: bool = True,
        has_tree_batches: bool = False,
        answer_steps: bool = False,
        overlaps_steps: bool = False,
        most_blocks: int = UNLIMITED,
        most_positions: int = UNLIMITED,
        most_tokens: int = UNLIMITED,
        lengths: tuple[int, ...] = (),
        row_mix: AlikeRows = ALIKE,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """`most_tokens`: of a step that memory suffices for; the error comes after copies and moves, as a session's."""
        form = row_mix if form is ALIKE else form
        if answer_steps and isinstance(form, SlotRows):
            form = replace(form, answers=True)
        can = has_tree_batches, can_rewind, chunked_prefill, overlaps_steps
        super().__init__(Traits(context_length, form, *can, lengths=lengths))
        self.most_tokens = most_tokens
        self._has_blocks = isinstance(form, PackedSteps)
        self._most_blocks = most_blocks
        self._block_size = block_size
        self.capacity = Capacity(num_slots, most_positions=most_positions)
        self._kept: list[int] | None = None
        self._running = threading.Lock()
        self._cells: list[tuple[int, int]] = []
        self._forks: list[set[int]] = []
        self._ends: list[int] = []
        self.steps: list[Step] = []
        self.copied: list[BlockCopy] = []
        self.steps_copying = 0
        self._slots: list[Memory] = []
        self._blocks: list[Memory] = []
        self.tables = BlockTables(num_slots, 0, block_size)

    def reserve(self, positions: int, cells: int = 0) -> None:
        if positions > self.capacity.positions:
            num_slots = self.capacity.num_slots
            self.capacity = self.capacity._replace(positions=positions)
            self._slots = [[(GARBAGE, None)] * positions for _ in range(num_slots)]
            longest = -(-positions // self._block_size)
            number = max(longest, min(self._most_blocks, num_slots * longest))
            self.tables = BlockTables(num_slots, positions, self._block_size, number)
            if self._has_blocks:
                self.capacity = self.capacity._replace(blocks=Blocks(number, self._block_size))
            self._blocks = [[(GARBAGE, None)] * self._block_size for _ in range(self.tables.num_blocks)]
            self._forks = [{0} for _ in range(num_slots)]
            self._ends = [0] * num_slots
        if cells > self.capacity.cells:
            self.capacity = self.capacity._replace(cells=cells)
            self._cells = [(GARBAGE, GARBAGE)] * cells

    def release_memory(self) -> None:
        self.capacity = Capacity(self.capacity.num_slots, most_positions=self.capacity.most_positions)
        self._slots, self._blocks, self._forks, self._ends, self._cells = [], [], [], [], []

    def check_source(self, source: Source | None) -> None:
        """Takes requests with a source and without."""

    def run(self, step: Step) -> StepOutput:
        assert self._running.acquire(blocking=False), "two steps at once"
        try:
            return self._execute(self._with_kept(step))
        finally:
            self._running.release()

    def _with_kept(self, step: Step) -> Step:
        """The step with the tokens that the one before has found, where it follows that."""
        kept, self._kept = self._kept, None
        if not step.follows:
            return step
        assert self.traits.overlaps_steps
        assert kept is not None
        assert all(len(row.tokens) == 1 for row, read in zip(step.rows, step.follows, strict=True) if read >= 0)
        pairs = zip(step.rows, step.follows, strict=True)
        rows = tuple(row if read < 0 else row._replace(tokens=(kept[read],)) for row, read in pairs)
        return replace(step, rows=rows, follows=())

    def _execute(self, step: Step) -> StepOutput:
        self._fail(step)
        self.steps.append(step)
        self._check(step)
        step = replace(step, rows=tuple(_as_kept(row, step.whole_length) for row in step.rows))
        self._prepare(step)
        if step.first_cell is not None:
            return self._answer(step, self._run_tree_batch(step, step.first_cell))
        self._make_room(step.rows)
        for row in step.rows:
            assert row.past + len(row.tokens) <= self.capacity.positions
            self._advance(row)
            for position, token in enumerate(row.tokens, start=row.past):
                self._put(row.slot, position, (token, row.source))
        output = self._answer(step, [self._seen(row) for row in step.rows])
        self._kept = output.greedy_ids.tolist()
        return output

    def _fail(self, step: Step) -> None:
        """Raises what a session without memory, or its encoder, does."""
        fed = [run.item for row in step.rows for run in runs_within(row.media, row.past, row.past + len(row.tokens))]
        is_short = step.num_tokens > self.most_tokens
        if is_short or self.bad in {item.key for item in fed}:
            self._prepare(step)
            self.num_lost += not is_short
            raise MemoryShortageError("planted") if is_short else LostItemError("planted", self.bad)

    def _seen(self, row: Row) -> list[int]:
        """What lies in the row's slot. Behind more than one source, as an idle row may be, it makes no sense."""
        end = row.past + len(row.tokens)
        held = self._held(row.slot)
        is_pure = {source for _, source in held[:end]} == {row.source}
        return [token for token, _ in held] if is_pure else [GARBAGE] * end

    def _held(self, slot: int) -> Memory:
        if not self._has_blocks:
            return self._slots[slot]
        return [cell for block in self.tables.table(slot) for cell in self._blocks[block]]

    def _put(self, slot: int, position: int, cell: tuple[int, Source | None]) -> None:
        if not self._has_blocks:
            self._slots[slot][position] = cell
            return
        place, offset = divmod(position, self._block_size)
        block = self.tables.table(slot)[place]
        assert sum(block in self.tables.table(other) for other in range(self.capacity.num_slots)) == 1
        self._blocks[block][offset] = cell

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Blocks for the rows, with all copies of the step at once."""
        if not self._has_blocks:
            return
        made = [self.tables.make_room(*row) for row in self.tables.without_room(Columns.of(rows))]
        copies = [copy for copy in made if copy is not None]
        read = [list(self._blocks[copy.source]) for copy in copies]
        for copy, cells in zip(copies, read, strict=True):
            self._blocks[copy.target][: copy.num_positions] = cells[: copy.num_positions]
        self.copied += copies
        self.steps_copying += bool(copies)

    def _prepare(self, step: Step) -> None:
        """What comes before the rows."""
        for copy in step.copies:
            if self._has_blocks:
                self.tables.fork(copy)
            else:
                positions = slice(copy.num_equal, copy.length)
                self._slots[copy.target][positions] = self._slots[copy.source][positions]
            self._check_resumable(copy.source, copy.length)
            self._forks[copy.target], self._ends[copy.target] = {0, copy.length}, copy.length
        for move in step.moves:
            self._cells[move.target : move.target + len(move.source_N)] = [self._cells[c] for c in move.source_N]

    def _run_tree_batch(self, step: Step, first_cell: int) -> list[list[int]]:
        """The tokens that each row sees, by what lies in its cells; a cell also knows its position."""
        assert self.traits.tree_batches
        assert first_cell >= 1  # cell 0 is never seen
        cell = first_cell
        seen = []
        for row in step.rows:
            assert row.cells_P is not None
            assert len(row.cells_P) == row.past
            assert all(1 <= past < cell for past in row.cells_P)
            new = range(cell, cell + len(row.tokens))
            for position, (place, token) in enumerate(zip(new, row.tokens, strict=True), start=row.past):
                self._cells[place] = (token, position)
            cell += len(row.tokens)
            cells = [self._cells[place] for place in (*row.cells_P, *new)]
            assert [position for _, position in cells] == list(range(len(cells)))
            seen.append([token for token, _ in cells])
        assert cell <= self.capacity.cells
        return seen

    def _answer(self, step: Step, seen: Sequence[Sequence[int]]) -> StepOutput:
        """What the head reads, of the tokens that each row sees."""
        prefixes = [seen[head.row][: step.rows[head.row].past + head.offset + 1] for head in step.logits_rows]
        of = [(prefix, step.rows[head.row].source) for prefix, head in zip(prefixes, step.logits_rows, strict=True)]
        assert all(GARBAGE not in prefix for prefix in prefixes)
        return StepOutput(
            np.array([log_softmax(self.logits(*of[head]))[token] for head, token in step.targets], np.float32),
            np.array([self.logits(*prefix).argmax() for prefix in of], np.int64),
            np.array([self.logits(*of[head]) for head in step.samples], np.float32).reshape(-1, VOCAB),
            np.array([self.logits(*prefix) for prefix in of] or [[0.0] * VOCAB], np.float32),
            candidates=_best([self.logits(*of[head]) for head in step.beams], step.num_candidates),
        )

    def logits(self, prefix: Sequence[int], source: Source | None = None) -> np.ndarray:
        """What it says of the next token."""
        return logits_of(prefix, source)

    def _advance(self, row: Row) -> None:
        self._check_resumable(row.slot, row.past)
        self._ends[row.slot] = row.past + len(row.tokens)
        self._forks[row.slot] = {length for length in self._forks[row.slot] if length <= row.past}
        if row.is_checkpoint:
            self._forks[row.slot].add(self._ends[row.slot])

    def _check_resumable(self, slot: int, length: int) -> None:
        """A state that cannot be cut goes on only from where it stands, or from a fork that was kept."""
        assert self.traits.can_rewind or length == self._ends[slot] or length in self._forks[slot]

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._slots, self._blocks = [], []

    def _check(self, step: Step) -> None:
        lengths = {len(row.tokens) for row in step.rows}
        slots = [row.slot for row in step.rows]
        assert 0 not in lengths
        if step.first_cell is not None:
            return
        form = self.traits.form
        assert isinstance(form, PackedSteps | AlikeRows) or len(slots) == 1 or lengths == {1}
        assert len(set(slots)) == len(slots)
        if isinstance(form, OneRow):
            assert len(slots) == 1
        if isinstance(form, PackedSteps):
            longest = max(row.past + len(row.tokens) for row in step.rows)
            assert len(slots) == 1 or len(slots) * longest <= form.most_cells
        if isinstance(form, AlikeRows) and len(slots) > 1:
            groups = {form.group(row.past, len(row.tokens), row.source) for row in step.rows}
            assert len(groups) == 1
            assert None not in groups
        if isinstance(form, NeighbouringSlots):
            assert slots == list(range(slots[0], slots[-1] + 1))
        if isinstance(form, AllSlots):
            assert len(slots) == 1 or slots == list(range(self.capacity.num_slots))


SIDE = 1 << 20


def _as_kept(row: Row, whole_length: int) -> Row:
    """The row with the tokens that are stored: on a side as on no other, and items' by their content."""
    if not (row.media or whole_length):
        return row
    tokens = tuple(token + SIDE * whole_length for token in row.tokens)
    return row._replace(tokens=tuple(with_items(tokens, row.past, row.media)))


def with_items(tokens: Sequence[int], past: int, media: Media) -> list[int]:
    """Tokens from position `past` on with numbers in place of the items' that follow from their content."""
    found = list(tokens)
    for run in runs_within(media, past, past + len(tokens)):
        first = FIRST_ITEM + zlib.crc32(run.item.key.encode())
        found[run.start - past : run.stop - past] = range(first, first + run.item.num_tokens)
    return found


def _best(rows: Sequence[np.ndarray], count: int) -> Candidates:
    logprobs_NV = np.array([log_softmax(logits_V) for logits_V in rows], np.float32).reshape(-1, VOCAB)
    ids_NC = np.argsort(-logprobs_NV, kind="stable")[:, :count]
    return Candidates(np.take_along_axis(logprobs_NV, ids_NC, 1), ids_NC)


def oracle(request: Request, lengths: tuple[int, ...] = ()) -> Result:
    """The result computed from the definition, one prefix at a time. `lengths`: a text is computed as all of it that is
    fed in one pass."""
    tokens, source = with_items(request.tokens, 0, request.media), request.source
    first = len(tokens) - request.num_targets
    fed = _on_side(tokens, len(tokens) - (request.generation is None), lengths)
    logprobs = tuple(float(logprobs_of(fed[:i], source)[tokens[i]]) for i in range(first, len(tokens)))
    greedy = tuple(int(logits_of(fed[:i], source).argmax()) == tokens[i] for i in range(first, len(tokens)))
    if request.generation is None:
        return Result(logprobs, greedy)
    return Result(logprobs, greedy, *_generate(tokens, request.generation, source, lengths))


def _on_side(tokens: list[int], num_fed: int, lengths: tuple[int, ...]) -> list[int]:
    return [token + SIDE * max([length + 1 for length in lengths if length < num_fed], default=0) for token in tokens]


def _generate(
    tokens: list[int], generation: Generation, source: Source | None, lengths: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason, int | None]:
    generated: list[int] = []
    budget, num_forced = generation.thinking, 0
    while len(generated) < generation.max_new_tokens:
        text = tokens + generated
        token = int(logits_of(_on_side(text, len(text), lengths), source).argmax())
        if budget is not None and len(generated) - num_forced >= budget.num_tokens and num_forced < len(budget.marker):
            freely = generated[: budget.num_tokens]
            ends = [at for at in range(len(freely)) if tuple(freely[at : at + len(budget.marker)]) == budget.marker]
            if ends:
                budget = None
            else:
                token, num_forced = budget.marker[num_forced], num_forced + 1
        if token in generation.stop_ids:
            return tuple(generated), FinishReason.STOP_ID, token
        generated.append(token)
        if generation.is_finished and generation.is_finished(generated):
            return tuple(generated), FinishReason.STOPPED, None
    return tuple(generated), FinishReason.LENGTH, None
