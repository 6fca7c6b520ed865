"""What the scheduler hands to a runner and what comes back: integers out, small arrays in. Knows no runner.

Axes: R logits rows of a step, T targets, K sampled rows, N rows of beams, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media.items import Media
from olive_ext.engine.requests import Notes, Source

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
CellArray = npt.NDArray[np.int32]


class Blocks(NamedTuple):
    """The blocks of a paged KV cache: how many there are, and the positions of each."""

    number: int
    size: int


NO_BLOCKS = Blocks(0, 0)

UNLIMITED = 2**31
"""The most tokens of a step, or positions of all slots, where nothing limits them."""


class Capacity(NamedTuple):
    """The memory that a runner has allocated. It changes as requests need more, or memory turns out to be short."""

    num_slots: int
    positions: int = 0
    """Positions of each slot."""

    cells: int = 0
    """Cells of the shared-prefix cache."""

    blocks: Blocks = NO_BLOCKS
    """That slots take as they grow: there may be fewer than all of them could need."""

    most_positions: int = UNLIMITED
    """Positions of all slots together that memory holds."""

    def for_sequences(self, positions: int) -> Capacity:
        """With as many slots as may hold sequences of so many positions."""
        fitting = max(1, self.most_positions // max(1, positions))
        return self if fitting >= self.num_slots else self._replace(num_slots=fitting)

    def both(self, other: Capacity) -> Capacity:
        """The lesser of each kind of memory."""
        blocks = [one.blocks for one in (self, other) if one.blocks.number]
        positions, cells = min(self.positions, other.positions), min(self.cells, other.cells)
        most = min(self.most_positions, other.most_positions)
        return Capacity(min(self.num_slots, other.num_slots), positions, cells, min(blocks, default=NO_BLOCKS), most)


@dataclass(frozen=True)
class Copy:
    """The first `length` positions of slot `source` are copied to slot `target` before the rows run. Where that is none
    the blocks of `target` are free."""

    source: int
    target: int
    length: int
    num_equal: int = 0
    """Of these positions so many are the same in both slots already, and need not be copied."""


class Side(NamedTuple):
    """Texts of `first` to `last` positions, which a model computes alike."""

    first: int = 0
    last: int = UNLIMITED


ONE_SIDE = Side()
"""All texts."""

SHARED_PREFIX = -1
"""The slot of a tree batch's rows: the shared-prefix cache."""

FIRST_CELL = 1
"""Cell 0 of the shared-prefix cache is never seen: behind no past at all, GroupQueryAttention counts positions by
itself."""


@dataclass(frozen=True)
class Move:
    """Cells `source_N` of the shared-prefix cache are copied to cells `target` and following before the rows run."""

    source_N: CellArray
    target: int


class Row(NamedTuple):
    """`tokens` are fed behind the `past` positions resident in `slot`."""

    slot: int
    past: int
    tokens: tuple[int, ...]
    is_checkpoint: bool = False
    """The slot's content after these tokens is kept, for other sequences to go on from."""

    source: Source | None = None
    """The input of an encoder-decoder's encoder; the same for all that is resident in the slot."""

    media: Media = ()
    """The pictures and sounds of the whole sequence. `tokens` hold numbers in place of their placeholders."""

    cells_P: CellArray | None = None
    """For a row of a tree batch the cell of each of the `past` positions; None where position and cell are equal."""

    @property
    def begins_item(self) -> bool:
        """Whether a picture, a sound or the source begins among `tokens`."""
        stop = self.past + len(self.tokens)
        return (self.source is not None and not self.past) or any(self.past <= run.start < stop for run in self.media)


class Ban(IntEnum):
    """Which of a model's suppressed tokens a logits row must not give; what is scored is the model's own."""

    NONE = 0
    LATER = 1
    """Those that are never generated."""

    FIRST = 2
    """Those, and those that are not generated as the first token."""


class LogitsRow(NamedTuple):
    """A position whose next-token distribution is read: a row of the step, and the offset in its tokens."""

    row: int
    offset: int
    record: int = -1
    """Number of that distribution in the reference log-prob cache, where one is read."""

    ban: Ban = Ban.NONE


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
    """For a tree batch the cell of the first row's first token; the other tokens follow it. None for other steps."""

    width: int | None = None
    """Positions that masks and caches have where these are more than the rows': what is behind the rows is masked."""

    follows: tuple[int, ...] = ()
    """For each row the logits row of the step before whose greedy token it is fed with, in place of its one token; -1
    where its tokens are known. Empty where all are."""

    beams: tuple[int, ...] = ()
    num_candidates: int = 0
    """Of the rows of `beams` so many of the most probable tokens are read."""

    whole_length: int = 0
    """The least positions of the texts that all rows are parts of, where the model computes long texts otherwise."""

    @property
    def whole_rows(self) -> tuple[int, ...]:
        """Logits rows that are needed whole, on the host or on the device."""
        return (*self.samples, *self.beams)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


class Candidates(NamedTuple):
    """The C most probable tokens of N logits rows, best first, with log-probabilities in nats."""

    logprobs_NC: FloatArray
    ids_NC: IntArray

    @property
    def nbytes(self) -> int:
        """Bytes that cross to the host."""
        return self.logprobs_NC.nbytes + self.ids_NC.nbytes

    def rows(self) -> list[Candidates]:
        """Those of each row by themselves."""
        return [Candidates(self.logprobs_NC[n : n + 1], self.ids_NC[n : n + 1]) for n in range(len(self.ids_NC))]

    def first(self, num_rows: int | None = None, count: int | None = None) -> Candidates:
        """The best `count` of the first rows."""
        return Candidates(self.logprobs_NC[:num_rows, :count], self.ids_NC[:num_rows, :count])

    @classmethod
    def stacked(cls, parts: Sequence[Candidates]) -> Candidates:
        """The rows of all parts, each with as many candidates."""
        return cls(
            np.concatenate([part.logprobs_NC for part in parts]), np.concatenate([part.ids_NC for part in parts])
        )


NO_CANDIDATES = Candidates(np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))


@dataclass(frozen=True)
class StepOutput:
    """`target_logprobs[T]` in nats, `greedy_ids[R]`, `sample_logits_KV` in fp32, up to a number for each row."""

    target_logprobs: FloatArray
    greedy_ids: IntArray
    sample_logits_KV: FloatArray
    logits_RV: Any = None
    """The logits rows' logits in fp32, where the runner returns them: an OrtValue on its device, or a numpy array. One
    row, which means nothing, where there are no logits rows."""

    notes_T: Notes | None = None
    """What a tap notes of each target."""

    candidates: Candidates = NO_CANDIDATES
    """Of the step's `beams`."""

    @property
    def scores_nbytes(self) -> int:
        """Bytes of the scores, the greedy tokens, the sampled rows and the candidates."""
        rows = self.target_logprobs.nbytes + self.greedy_ids.nbytes + self.sample_logits_KV.nbytes
        return rows + self.candidates.nbytes


def visible_cells(rows: Sequence[Row], first_cell: int, window: int | None) -> npt.NDArray[np.bool_]:
    """[1, 1, S, T], S tokens of a tree batch and T cells: a token sees the cells of its own row and of the row's past,
    within the window. Cells behind the token itself count as seen: attention hides those."""
    num_tokens = sum(len(row.tokens) for row in rows)
    visible_ST = np.zeros((num_tokens, first_cell + num_tokens), np.bool_)
    positions_T = np.arange(first_cell + num_tokens) - FIRST_CELL
    start = 0
    for row in rows:
        stop = start + len(row.tokens)
        assert row.cells_P is not None
        visible_ST[start:stop, row.cells_P] = True
        visible_ST[start:stop, first_cell + start : first_cell + stop] = True
        positions_T[first_cell + start : first_cell + stop] = row.past + np.arange(stop - start)
        start = stop
    if window is not None:
        visible_ST &= positions_T[first_cell:, None] - positions_T < window
    return visible_ST[None, None]
