"""The step behind one that has not been read: the same rows, fed with what that one finds. Pure functions, one of which
says whether there are such steps at all."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.step import IntArray, LogitsRow, Row, Step

UNKNOWN_TOKEN = 0
"""Stands in the rows of a step whose tokens are not read yet."""


@dataclass(frozen=True)
class PlannedStep:
    """A step, and whose row each of its rows is: None for idle ones."""

    step: Step
    sequences: tuple[Sequence | None, ...]

    def has(self, sequence: Sequence) -> bool:
        """Whether one of the rows is its."""
        return any(found is sequence for found in self.sequences)


def can_be_followed(planned: PlannedStep) -> bool:
    """Whether each row finds exactly one token, and that is its sequence's next one; rows that are idle, or whose
    sequence has ended, find one that nobody wants."""
    step = planned.step
    is_plain = step.first_cell is None and not step.samples
    if not is_plain or step.logits_rows != _last_heads(step.rows, step.logits_rows):
        return False
    return all(
        sequence is None or not sequence.pending or sequence.wants_next(row.past + len(row.tokens) - 1)
        for row, sequence in zip(step.rows, planned.sequences, strict=True)
    )


def goes_on(sequence: Sequence) -> bool:
    """Whether a sequence whose next token is being computed may have one more behind that."""
    return sequence.pending > 0 and sequence.end < sequence.num_positions


def following(planned: PlannedStep, chosen: Container[int], capacity: int) -> PlannedStep:
    """The step behind `planned`, in which the rows of slots that are not `chosen` are idle."""
    rows: list[Row] = []
    sequences: list[Sequence | None] = []
    for row, sequence in zip(planned.step.rows, planned.sequences, strict=True):
        is_live = sequence is not None and row.slot in chosen
        past = row.past if sequence is None else row.past + len(row.tokens)
        # An idle row writes behind what is resident, or over the position that a released slot leaves unused.
        rows.append(Row(row.slot, past if is_live else min(past, capacity - 1), (UNKNOWN_TOKEN,), source=row.source))
        sequences.append(sequence if is_live else None)
    heads = tuple(LogitsRow(place, 0) for place in range(len(rows)))
    return PlannedStep(Step(tuple(rows), heads, uses_previous_tokens=True), tuple(sequences))


def with_tokens(planned: PlannedStep, tokens_B: IntArray) -> PlannedStep:
    """The same with the tokens that the step before has found, now that these are known."""
    rows = tuple(replace(row, tokens=(token,)) for row, token in zip(planned.step.rows, tokens_B.tolist(), strict=True))
    return replace(planned, step=replace(planned.step, rows=rows, uses_previous_tokens=False))


def _last_heads(rows: tuple[Row, ...], heads: tuple[LogitsRow, ...]) -> tuple[LogitsRow, ...]:
    """One head at the last token of each row; the numbers of records are those of `heads`."""
    records = [head.record for head in heads] + [-1] * len(rows)
    return tuple(LogitsRow(place, len(row.tokens) - 1, records[place]) for place, row in enumerate(rows))
