"""A step for which memory does not suffice, as two. The scores of a step come in the order of its rows, so the outputs
of the two parts one after the other are the step's. Knows no runner.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from olive_ext.engine.step import NO_CANDIDATES, Candidates, Row, Step, StepOutput
from olive_ext.media.items import border, chunk_end


def halve(step: Step, *, splits_rows: bool = True) -> tuple[Step, Step] | None:
    """Two steps that do what `step` does, after its copies and moves; None where it cannot be split."""
    if step.first_cell is None and len(step.rows) > 1:
        return _cut(step, len(step.rows) // 2, 0) if splits_rows else None
    half = step.num_tokens // 2
    if half == 0:
        return None
    place = 0
    while half >= len(step.rows[place].tokens):
        half -= len(step.rows[place].tokens)
        place += 1
    row = step.rows[place]
    end = row.past + len(row.tokens)
    half = border(row.media, row.past + half) - row.past
    if place or half:
        return _cut(step, place, half)
    half = min(chunk_end(row.media, row.past, row.past + 1), end) - row.past
    if half < len(row.tokens):
        return _cut(step, 0, half)
    return _cut(step, 1, 0) if len(step.rows) > 1 else None


def joined(first: StepOutput, second: StepOutput) -> StepOutput:
    """The outputs of a split step's two parts as one, but for rows of logits, which only a tap reads."""
    notes, more = first.notes_T, second.notes_T
    found = [output.candidates for output in (first, second) if len(output.candidates.ids_NC)]
    return StepOutput(
        np.concatenate([first.target_logprobs, second.target_logprobs]),
        np.concatenate([first.greedy_ids, second.greedy_ids]),
        np.concatenate([first.sample_logits_KV, second.sample_logits_KV]),
        notes_T=None if notes is None or more is None else np.concatenate([notes, more]),
        candidates=Candidates.stacked(found) if found else NO_CANDIDATES,
    )


def _cut(step: Step, place: int, offset: int) -> tuple[Step, Step]:
    """Cuts before token `offset` of row `place`."""
    row = step.rows[place]
    before, tail = step.rows[:place], step.rows[place:]
    if offset:
        before = (*before, row._replace(tokens=row.tokens[:offset], is_checkpoint=False))
        tail = (_rest(step, place, offset), *tail[1:])
    cut = sum((one.row, one.offset) < (place, offset) for one in step.logits_rows)
    moved = [
        one._replace(row=one.row - place, offset=one.offset - (offset if one.row == place else 0))
        for one in step.logits_rows[cut:]
    ]
    fed = sum(len(earlier.tokens) for earlier in before)
    first_cell = None if step.first_cell is None else step.first_cell + fed
    parts = (before, step.logits_rows[:cut], range(cut)), (tail, tuple(moved), range(cut, len(step.logits_rows)))
    first, second = (
        Step(
            rows,
            logits_rows,
            tuple((index - kept.start, token) for index, token in step.targets if index in kept),
            tuple(index - kept.start for index in step.samples if index in kept),
            first_cell=step.first_cell,
            beams=tuple(index - kept.start for index in step.beams if index in kept),
            num_candidates=step.num_candidates,
            whole_length=step.whole_length,
        )
        for rows, logits_rows, kept in parts
    )
    return first, replace(second, first_cell=first_cell)


def _rest(step: Step, place: int, offset: int) -> Row:
    row = step.rows[place]
    cells_P = row.cells_P
    if cells_P is not None and step.first_cell is not None:
        begin = step.first_cell + sum(len(before.tokens) for before in step.rows[:place])
        cells_P = np.concatenate([cells_P, np.arange(begin, begin + offset, dtype=np.int32)])
    return row._replace(past=row.past + offset, tokens=row.tokens[offset:], cells_P=cells_P)
