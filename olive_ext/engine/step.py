"""A runner's memory as planning depends on it, a step, and its output: the scheduler gives integers to a runner, and
gets small arrays back. Knows no runner.

Axes: R logits rows of a step, T targets, K sampled rows, N rows of beams, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.requests import Notes, integers
from olive_ext.media.items import Media, Source


class Blocks(NamedTuple):
    """The blocks of a paged KV cache: how many there are, and the positions of each."""

    number: int = 0
    size: int = 0


UNLIMITED = 2**31
"""The most tokens of a step, or positions of all slots, where nothing else limits them."""

FEW_READS = 16
"""The most targets of a row where it has more targets than tokens (the answers of a multiple choice)."""


class Capacity(NamedTuple):
    """The memory that a runner has allocated. It changes when requests need more, or when memory runs short."""

    num_slots: int
    positions: int = 0
    """Positions of each slot."""

    cells: int = 0
    """Cells of the shared-prefix cache."""

    blocks: Blocks = Blocks()
    """The blocks that slots take as they grow. There may be fewer than all slots together could need."""

    most_positions: int = UNLIMITED
    """The positions of all slots together that fit in memory."""

    def for_sequences(self, positions: int) -> Capacity:
        """The capacity with as many slots as fit for sequences of that many positions."""
        fitting = max(1, self.most_positions // max(1, positions))
        return self if fitting >= self.num_slots else self._replace(num_slots=fitting)

    def both(self, other: Capacity) -> Capacity:
        """The smaller value of each kind of memory."""
        blocks = [capacity.blocks for capacity in (self, other) if capacity.blocks.number]
        positions, cells = min(self.positions, other.positions), min(self.cells, other.cells)
        most = min(self.most_positions, other.most_positions)
        return Capacity(min(self.num_slots, other.num_slots), positions, cells, min(blocks, default=Blocks()), most)


FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
CellArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Copy:
    """The first `length` positions of slot `source` are copied to slot `target` before the rows run. With `length` 0
    the blocks of `target` become free."""

    source: int
    target: int
    length: int
    num_equal: int = 0
    """The number of these positions that are equal in both slots already, and need not be copied."""


class Side(NamedTuple):
    """A range of lengths, `first` to `last` positions, within which a model computes texts alike."""

    first: int = 0
    last: int = UNLIMITED


ONE_SIDE = Side()
"""The range of all lengths."""

SHARED_PREFIX = -1
"""In place of a slot, for the rows of a tree batch: the shared-prefix cache."""

FIRST_CELL = 1
"""Cell 0 of the shared-prefix cache is never attended to: without a past, GroupQueryAttention counts by itself."""


@dataclass(frozen=True)
class Move:
    """Cells `source_N` of the shared-prefix cache are copied to cells `target` and following before the rows run."""

    source_N: CellArray
    target: int


class Row(NamedTuple):
    """`tokens` are fed after the `past` positions that are resident in `slot`."""

    slot: int
    past: int
    tokens: tuple[int, ...]
    is_checkpoint: bool = False
    """Whether the slot's content after these tokens is kept, so that other sequences can continue from it."""

    source: Source | None = None
    """The input of an encoder-decoder's encoder. It is the same for all that is resident in the slot."""

    media: Media = ()
    """The pictures and sounds of the whole sequence. `tokens` hold numbers in place of their placeholders."""

    cells_P: CellArray | None = None
    """For a row of a tree batch, the cell of each of the `past` positions; None where cells are positions."""


class Ban(IntEnum):
    """The suppressed tokens, which a logits row must not generate; scores stay the model's own."""

    NONE = 0
    LATER = 1
    """The tokens that are never generated."""

    FIRST = 2
    """The tokens that are never generated, and those that are not generated as the first token."""


class LogitsRow(NamedTuple):
    """A position whose next-token distribution is read: a row of the step, and the offset in its tokens."""

    row: int
    offset: int
    record: int = -1
    """The number of that distribution in the reference log-prob cache, where one is read."""

    ban: Ban = Ban.NONE


IDLE_TOKEN = 0
"""The token of idle rows, whose outputs nobody reads."""


class Columns(NamedTuple):
    """The rows of a step as arrays of B rows, so that numpy handles all rows at once."""

    slots_B: IntArray
    past_B: IntArray
    lengths_B: IntArray
    starts_B: IntArray
    """Offset of each row's first token among all tokens of the step."""

    tokens_N: IntArray
    """The tokens of all rows, one row after the other."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """The columns of these rows."""
        slots, past, tokens, *_ = zip(*rows, strict=True)
        lengths_B = integers([*map(len, tokens)])
        starts_B = np.cumsum(lengths_B) - lengths_B
        return cls(integers(slots), integers(past), lengths_B, starts_B, integers([*chain.from_iterable(tokens)]))

    def tokens_after(self, follows: Sequence[int], greedy_R: IntArray) -> IntArray:
        """All tokens, [N]. A row whose `follows` is 0 or more takes a token that the step before has found."""
        if not follows:
            return self.tokens_N
        follows_B, tokens_N = integers(follows), np.array(self.tokens_N)
        tokens_N[self.starts_B[follows_B >= 0]] = greedy_R[follows_B[follows_B >= 0]]
        return tokens_N


@dataclass(frozen=True)
class Step:
    """One forward pass: `rows` (of one length unless packed or a tree batch), the `logits_rows` to read, `targets`
    (index of a logits row, token id), `samples` and `beams` (indices of logits rows)."""

    rows: tuple[Row, ...]
    logits_rows: tuple[LogitsRow, ...] = ()
    targets: tuple[tuple[int, int], ...] = ()
    samples: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    moves: tuple[Move, ...] = ()
    first_cell: int | None = None
    """For a tree batch, the cell of the first row's first token; the other tokens follow it. None for other steps."""

    width: int | None = None
    """The positions of masks and caches, where these are more than the rows'; the excess is masked."""

    follows: tuple[int, ...] = ()
    """For each row, the logits row of the step before whose greedy token is fed in place of the row's one token; -1
    where its tokens are known. Empty where all are."""

    beams: tuple[int, ...] = ()
    num_candidates: int = 0
    """The number of most probable tokens that are read for each row of `beams`."""

    whole_length: int = 0
    """The shortest length of the texts that all rows belong to, where the model computes long texts otherwise."""

    @property
    def whole_rows(self) -> tuple[int, ...]:
        """Logits rows that are needed whole, on the host or on the device."""
        return (*self.samples, *self.beams)

    @cached_property
    def columns(self) -> Columns:
        """The rows as arrays."""
        return Columns.of(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.columns.tokens_N)


class Candidates(NamedTuple):
    """The C most probable tokens of N logits rows, best first, with log-probabilities in nats."""

    logprobs_NC: FloatArray
    ids_NC: IntArray


NO_CANDIDATES = Candidates(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))


@dataclass(frozen=True)
class StepOutput:
    """`target_logprobs[T]` in nats, `greedy_ids[R]`, `sample_logits_KV` in fp32, up to a number for each row."""

    target_logprobs: FloatArray
    greedy_ids: IntArray
    sample_logits_KV: FloatArray
    logits_RV: Any = None
    """The logits of the logits rows in fp32, where the runner returns them: an OrtValue on its device, or a numpy
    array. Without logits rows it is one row without meaning."""

    notes_T: Notes | None = None
    """The tap's note on each target."""

    candidates: Candidates = NO_CANDIDATES
    """The candidates of the step's `beams`."""
