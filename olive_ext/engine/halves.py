"""A step for which memory does not suffice, as two. The scores of a step come in the order of its rows, so the outputs
of the two parts one behind the other are the step's. Knows no runner.
"""

from __future__ import annotations

import numpy as np

from olive_ext.engine.media import border, chunk_end
from olive_ext.engine.step import NO_CANDIDATES, Batching, Candidates, Row, Step, StepOutput


def halve(step: Step, batching: Batching) -> tuple[Step, Step] | None:
    """Two steps that do what `step` does, behind its copies and moves; None where it cannot be split: a token, or an
    item alone."""
    if step.first_cell is None and len(step.rows) > 1:
        return None if batching is Batching.POOL else _cut(step, len(step.rows) // 2, 0)
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
        beams=tuple(index - cut for index in step.beams if index >= cut),
        num_candidates=step.num_candidates,
        whole_length=step.whole_length,
    )
    first = Step(
        before,
        step.logits_rows[:cut],
        tuple((index, token) for index, token in step.targets if index < cut),
        tuple(index for index in step.samples if index < cut),
        first_cell=step.first_cell,
        beams=tuple(index for index in step.beams if index < cut),
        num_candidates=step.num_candidates,
        whole_length=step.whole_length,
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
