"""What the scheduler hands to a runner and what comes back: integers out, small arrays in. Knows no runner.

A step for which memory does not suffice is split in two. The scores of a step come in the order of its rows, so the
outputs of the two parts one behind the other are the step's.

Axes: R logits rows of a step, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.media import Media
from olive_ext.engine.requests import Notes, Source

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
CellArray = npt.NDArray[np.int32]


class Batching(str, Enum):
    """Which slots one step may decode together."""

    SINGLE = "single"
    """A step has one row."""

    RANGE = "range"
    """A step decodes neighbouring slots; a gap between two rows is filled with an idle row."""

    PACKED = "packed"
    """A step decodes any slots, with any numbers of tokens."""

    ALIKE = "alike"
    """A step has any slots whose rows are alike; `RowMix` says how far."""

    POOL = "pool"
    """A step has a row for every slot; slots that are not decoding have idle rows."""


@dataclass(frozen=True)
class RowMix:
    """Which rows of a runner with `Batching.ALIKE` may share a step. They all have equally many tokens."""

    pasts: bool = False
    """One token each, behind different numbers of positions; otherwise behind equally many."""

    prompts: bool = False
    """Several tokens each, behind nothing."""

    continued: bool = False
    """Several tokens each, behind equally many positions."""

    sources: bool = True
    """Sources of different shapes."""

    def group(self, past: int, num_tokens: int, source: Source | None) -> Hashable | None:
        """What rows that may share a step have in common; None for a row that runs alone."""
        shape = None if self.sources or source is None else source.array.shape
        if num_tokens == 1:
            return (1, None if self.pasts else past, shape)
        return (num_tokens, past, shape) if (self.continued if past else self.prompts) else None

    def both(self, other: RowMix) -> RowMix:
        """What `other` allows, too."""
        return RowMix(*(mine and its for mine, its in zip(astuple(self), astuple(other), strict=True)))


ALONE = RowMix()
"""Every row runs alone, but for one token each behind equally many positions."""


@dataclass(frozen=True)
class Copy:
    """The first `length` positions of slot `source` are copied to slot `target` before the rows run."""

    source: int
    target: int
    length: int


UNLIMITED = 2**31
"""The most tokens of a step where nothing limits them."""

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


class LogitsRow(NamedTuple):
    """A position whose next-token distribution is read: a row of the step, and the offset in its tokens."""

    row: int
    offset: int
    record: int = -1
    """Number of that distribution in the reference log-prob cache, where one is read."""


@dataclass(frozen=True)
class Step:
    """One forward pass: `rows` (of one length unless packed or a tree batch), the `logits_rows` to read, `targets`
    (index of a logits row, token id) and `samples` (indices of logits rows)."""

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

    uses_previous_tokens: bool = False
    """The rows are fed with the greedy tokens of the step before, row by row; `tokens` are placeholders."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True)
class StepOutput:
    """`target_logprobs[T]` in nats, `greedy_ids[R]`, `sample_logits_KV` in fp32."""

    target_logprobs: FloatArray
    greedy_ids: IntArray
    sample_logits_KV: FloatArray
    logits_RV: Any = None
    """The logits rows' logits in fp32, where the runner returns them: an OrtValue on its device, or a numpy array. One
    row, which means nothing, where there are no logits rows."""

    notes_T: Notes | None = None
    """What a tap notes of each target."""

    @property
    def scores_nbytes(self) -> int:
        """Bytes of the scores, the greedy tokens and the sampled rows."""
        return self.target_logprobs.nbytes + self.greedy_ids.nbytes + self.sample_logits_KV.nbytes


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


def halve(step: Step, batching: Batching) -> tuple[Step, Step] | None:
    """Two steps that do what `step` does, behind its copies and moves; None where it cannot be split."""
    if step.first_cell is None and len(step.rows) > 1:
        return None if batching is Batching.POOL else _cut(step, len(step.rows) // 2, 0)
    half = step.num_tokens // 2
    if half == 0:
        return None
    place = 0
    while half >= len(step.rows[place].tokens):
        half -= len(step.rows[place].tokens)
        place += 1
    return _cut(step, place, half)


def joined(first: StepOutput, second: StepOutput) -> StepOutput:
    """The outputs of a split step's two parts as one, but for rows of logits, which only a tap reads."""
    notes, more = first.notes_T, second.notes_T
    return StepOutput(
        np.concatenate([first.target_logprobs, second.target_logprobs]),
        np.concatenate([first.greedy_ids, second.greedy_ids]),
        np.concatenate([first.sample_logits_KV, second.sample_logits_KV]),
        notes_T=None if notes is None or more is None else np.concatenate([notes, more]),
    )


def _cut(step: Step, place: int, offset: int) -> tuple[Step, Step]:
    """Cuts before token `offset` of row `place`."""
    row = step.rows[place]
    before, tail = step.rows[:place], step.rows[place:]
    if offset:
        before = (*before, row._replace(tokens=row.tokens[:offset], is_checkpoint=False))
        tail = (_rest(step, place, offset), *tail[1:])
    cut = sum((found.row, found.offset) < (place, offset) for found in step.logits_rows)
    fed = sum(len(earlier.tokens) for earlier in before)
    second = Step(
        tail,
        tuple(
            found._replace(row=found.row - place, offset=found.offset - (offset if found.row == place else 0))
            for found in step.logits_rows[cut:]
        ),
        tuple((index - cut, token) for index, token in step.targets if index >= cut),
        tuple(index - cut for index in step.samples if index >= cut),
        first_cell=None if step.first_cell is None else step.first_cell + fed,
    )
    first = Step(
        before,
        step.logits_rows[:cut],
        tuple((index, token) for index, token in step.targets if index < cut),
        tuple(index for index in step.samples if index < cut),
        first_cell=step.first_cell,
    )
    return first, second


def _rest(step: Step, place: int, offset: int) -> Row:
    """Row `place` from token `offset` on, behind what comes before it."""
    row = step.rows[place]
    cells_P = row.cells_P
    if cells_P is not None and step.first_cell is not None:
        begin = step.first_cell + sum(len(before.tokens) for before in step.rows[:place])
        cells_P = np.concatenate([cells_P, np.arange(begin, begin + offset, dtype=np.int32)])
    return row._replace(past=row.past + offset, tokens=row.tokens[offset:], cells_P=cells_P)
