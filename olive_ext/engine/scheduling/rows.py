"""A sequence's part of a step: its next tokens, and the positions that are read there. Knows no other sequence."""

from __future__ import annotations

from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import Row

IDLE_TOKEN = 0
"""Is fed where a step needs a token whose outputs nobody reads."""


def next_row(sequence: Sequence, most: int, traits: Traits, capacity: int) -> Row:
    """The sequence's next tokens, up to `most` of them where it may be split; its slot has `capacity` positions."""
    start, stop = sequence.computed, sequence.end
    if traits.chunked_prefill:
        stop = min(stop, start + most)
    if not traits.can_rewind:
        stop = min((length for length in sequence.checkpoints if start < length < stop), default=stop)
    is_checkpoint = not traits.can_rewind and stop in sequence.checkpoints
    tokens = tuple(sequence.tokens[start:stop].tolist())
    if sequence.generation is None and stop == sequence.end:
        tokens += _rest_of_group(start, stop, traits.row_group, capacity)
    return Row(sequence.slot, start, tokens, is_checkpoint, sequence.source, sequence.media)


def _rest_of_group(start: int, stop: int, group: int, capacity: int) -> tuple[int, ...]:
    """Tokens behind a text that is scored, which make its last group of rows a whole one; none where the slot has no
    room for them."""
    missing = (start - stop) % group
    return (IDLE_TOKEN,) * missing if stop + missing <= capacity else ()


def read_positions(sequence: Sequence, row: Row) -> list[int]:
    """Positions of the row's tokens whose distribution is read, in order."""
    last = row.past + len(row.tokens) - 1
    found = {position for position in sequence.reads if row.past <= position <= last}
    if sequence.wants_next(last):
        found.add(last)
    return sorted(found)
