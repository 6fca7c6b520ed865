"""A step with what becomes of its numbers, which is planned with it and not worked out again when it is read. Knows no
runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from olive_ext.engine.scheduling.beam_group import BeamGroup
from olive_ext.engine.scheduling.sequences import Read, Sequence
from olive_ext.engine.step import LogitsRow, Row, Step


class Reading(NamedTuple):
    """What is done with the numbers of a logits row: with none of them where there is no sequence, in an idle row."""

    sequence: Sequence | None = None
    reads: list[Read] = []  # noqa: RUF012 (nobody changes it)
    """Those of its targets, in their order."""

    is_next: bool = False
    """Whether its token is the sequence's next one."""


IDLE = Reading()


@dataclass(frozen=True)
class PlannedStep:
    """A step, the sequence of each of its rows (None for idle ones), and what becomes of each of its logits rows."""

    step: Step
    sequences: tuple[Sequence | None, ...]
    readings: tuple[Reading, ...]


def planned(
    rows: tuple[tuple[Sequence | None, Row], ...], beams: Mapping[int, BeamGroup], *, reads_idle: bool
) -> PlannedStep:
    """The step of these rows, with all logits rows, targets and samples of their sequences; `beams` by slot. With
    `reads_idle` idle rows find a token, too, where none is chosen from a whole row: a step that follows needs one for
    them."""
    logits_rows: list[LogitsRow] = []
    targets: list[tuple[int, int]] = []
    samples: list[int] = []
    groups: dict[int, BeamGroup] = {}
    readings: list[Reading] = []
    reads_idle = reads_idle and all(found is None or not found.needs_rows for found, _ in rows)
    for place, (sequence, row) in enumerate(rows):
        if sequence is None:
            if reads_idle:
                logits_rows.append(LogitsRow(place, 0))
                readings.append(IDLE)
            continue
        for position in sequence.read_positions(row.past, len(row.tokens)):
            reading = Reading(sequence, sequence.reads_behind(position), sequence.wants_next(position))
            targets += [(len(logits_rows), read.token) for read in reading.reads]
            if reading.is_next and row.slot in beams:
                groups[len(logits_rows)] = beams[row.slot]
            elif reading.is_next and sequence.needs_rows:
                samples.append(len(logits_rows))
            record = max([read.record for read in reading.reads], default=-1)
            logits_rows.append(LogitsRow(place, position - row.past, record))
            readings.append(reading)
    most = max((group.num_candidates for group in groups.values()), default=0)
    read = tuple([row for _, row in rows]), tuple(logits_rows), tuple(targets), tuple(samples)
    step = Step(*read, beams=tuple(groups), num_candidates=most)
    return PlannedStep(step, tuple([sequence for sequence, _ in rows]), tuple(readings))
