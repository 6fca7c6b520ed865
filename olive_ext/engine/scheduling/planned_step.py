"""A step with what becomes of its numbers, which is planned with it and not worked out again when it is read. Knows no
runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olive_ext.engine.scheduling.beam_group import BeamGroup
from olive_ext.engine.scheduling.sequences import Reading, Sequence
from olive_ext.engine.step import Ban, LogitsRow, Row, Step

IDLE = Reading()


@dataclass(frozen=True)
class PlannedStep:
    """A step, the sequence of each of its rows (None for idle ones), and what becomes of each of its logits rows."""

    step: Step
    sequences: tuple[Sequence | None, ...]
    readings: tuple[Reading, ...]

    @property
    def finds_next(self) -> bool:
        """Whether each row finds exactly one token, and that is its sequence's next one; rows that are idle find one
        that nobody reads."""
        if self.step.uses_previous_tokens:
            return True
        if self.step.samples or self.step.beams or len(self.readings) != len(self.step.rows):
            return False
        return not [one for one in self.readings if not one.is_next and one.sequence is not None]


def planned(
    rows: tuple[tuple[Sequence | None, Row], ...],
    beams: Mapping[int, BeamGroup],
    *,
    reads_idle: bool,
    **more: Any,
) -> PlannedStep:
    """The step of these rows, with all logits rows, targets and samples of their sequences; `beams` by slot. With
    `reads_idle` idle rows find a token, too, where none is chosen from a whole row: a step that follows needs one for
    them. `more`: other fields of the step."""
    logits_rows: list[LogitsRow] = []
    targets: list[tuple[int, int]] = []
    samples: list[int] = []
    groups: dict[int, BeamGroup] = {}
    readings: list[Reading] = []
    reads_idle = reads_idle and not [True for found, _ in rows if found is not None and found.needs_rows]
    for place, (sequence, row) in enumerate(rows):
        if sequence is None:
            if reads_idle:
                logits_rows.append(LogitsRow(place, 0))
                readings.append(IDLE)
            continue
        for position, reading in sequence.readings(row.past, len(row.tokens)):
            number, record = len(logits_rows), -1
            for read in reading.reads:
                targets.append((number, read.token))
                record = read.record if read.record > record else record
            if reading.is_next and row.slot in beams:
                groups[number] = beams[row.slot]
            elif reading.is_next and sequence.needs_rows:
                samples.append(number)
            ban = sequence.ban_at(position) if reading.is_next else Ban.NONE
            logits_rows.append(LogitsRow(place, position - row.past, record, ban))
            readings.append(reading)
    most = max((group.num_candidates for group in groups.values()), default=0)
    read_of = tuple(logits_rows), tuple(targets), tuple(samples)
    step = Step(tuple([row for _, row in rows]), *read_of, beams=tuple(groups), num_candidates=most, **more)
    return PlannedStep(step, tuple([sequence for sequence, _ in rows]), tuple(readings))
