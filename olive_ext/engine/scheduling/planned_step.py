"""A step with what becomes of its numbers, which is planned with it: where they go, and which no working model has.
Knows no runner.

Lawful are a log-probability of -inf (a suppressed token) and -inf among the logits of a row. Axes: T targets, K sampled
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.scheduling.beams import BeamGroup
from olive_ext.engine.scheduling.chosen_rows import ChosenRows
from olive_ext.engine.scheduling.sequences import PROBE, PROBED, PendingAnswer, Reading, Sequence
from olive_ext.engine.step import Ban, LogitsRow, Step, StepOutput
from olive_ext.errors import NonFiniteError


@dataclass(frozen=True)
class PlannedStep:
    """A step, the sequence of each of its rows (None for idle ones), and what becomes of each of its logits rows."""

    step: Step
    sequences: tuple[Sequence | None, ...]
    readings: tuple[Reading, ...]
    has_scores: bool
    """Whether there are targets that are no probes."""


@lru_cache(maxsize=1024)
def _read_of_plain(num_rows: int) -> tuple[tuple[LogitsRow, ...], tuple[tuple[int, int], ...]]:
    """Logits rows and targets of plain rows, which are the same in all steps that have so many."""
    return tuple([LogitsRow(row, 0) for row in range(num_rows)]), tuple([(row, PROBED) for row in range(num_rows)])


def planned(chosen: ChosenRows, beams: Mapping[int, BeamGroup], **more: Any) -> PlannedStep:
    """The step of these rows, with all logits rows, targets and samples of their sequences; `beams` by slot; `more`:
    other fields of the step."""
    plain_rows, plain_targets = _read_of_plain(len(chosen.plain))
    logits_rows, targets = [*plain_rows], [*plain_targets]
    readings = [sequence.decoding for sequence in chosen.plain]
    samples: list[int] = []
    groups: dict[int, BeamGroup] = {}
    has_scores = False
    for place, (sequence, row) in enumerate(chosen.others, len(chosen.plain)):
        if sequence is None:
            continue
        for position, reading in sequence.readings(row.past, len(row.tokens)):
            number, record = len(logits_rows), -1
            has_scores = has_scores or bool(reading.reads and reading.reads[0].target != PROBE)
            for read in reading.reads:
                targets.append((number, read.token))
                record = read.record if read.record > record else record
            if reading.is_next and row.slot in beams:
                groups[number] = beams[row.slot]
            elif reading.is_next and sequence.needs_rows:
                samples.append(number)
            ban = sequence.ban_at(position) if reading.is_next and sequence.has_bans else Ban.NONE
            logits_rows.append(LogitsRow(place, position - row.past, record, ban))
            readings.append(reading)
    most = max((group.num_candidates for group in groups.values()), default=0)
    read_of = tuple(logits_rows), tuple(targets), tuple(samples)
    step = Step(chosen.rows, *read_of, beams=tuple(groups), num_candidates=most, **more)
    return PlannedStep(step, chosen.sequences, tuple(readings), has_scores)


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NonFinite:
    """What is wrong in a step's output: the targets whose log-probability is NaN or +inf, or whose KL divergence from a
    reference is not finite (it is infinite where the model gives a token no probability at all that the reference gives
    one), and the rows to sample from that hold NaN or +inf."""

    targets_T: BoolArray
    samples_K: BoolArray

    @classmethod
    def of(cls, output: StepOutput) -> NonFinite:
        """What is wrong in an output."""
        targets_T: BoolArray = ~(output.target_logprobs < np.inf)
        if (kl_T := _kl(output)) is not None:
            targets_T |= ~np.isfinite(kl_T)
        samples_K = np.logical_not((output.sample_logits_KV < np.inf).all(-1))
        return cls(targets_T, samples_K)

    def refuse(self, planned: PlannedStep, output: StepOutput, num_steps: int) -> None:
        """Raises `NonFiniteError` for the first wrong request and position; `num_steps` is the step's number."""
        if self.targets_T.any():
            place = int(self.targets_T.argmax())
            index, token = planned.step.targets[place]
            logprob = f"log-probability of token {token}: {output.target_logprobs[place]}"
            kl_T = _kl(output)
            kl = "" if kl_T is None else f", KL divergence from the reference: {kl_T[place]}"
            raise _error(planned, index, f"{logprob}{kl}, step {num_steps}")
        if self.samples_K.any():
            index = planned.step.samples[int(self.samples_K.argmax())]
            raise _error(planned, index, f"a logit is NaN or infinite, step {num_steps}")


def _kl(output: StepOutput) -> Any:
    """Of each target [T], where a tap compares them; one that records notes none."""
    notes_T = output.notes_T
    return None if notes_T is None or "kl" not in (notes_T.dtype.names or ()) else notes_T["kl"]


def _error(planned: PlannedStep, index: int, found: str) -> NonFiniteError:
    """The error about logits row `index` of a step."""
    logits_row = planned.step.logits_rows[index]
    row, sequence = planned.step.rows[logits_row.row], planned.sequences[logits_row.row]
    position = row.past + logits_row.offset
    assert sequence is not None
    reads = sequence.reads.get(position, ())
    answer = reads[0].answer if reads else sequence.answer
    key = answer.key if answer is not None else "?"
    return NonFiniteError(
        f"request {key!r}: the model's output behind {position + 1} tokens is not finite ({found}): its weights, its "
        "data type or the execution provider give NaN or infinity",
        " (`olive-ext check MODEL --verify` finds the layer; 'non_finite' = \"report\" counts such requests instead)",
    )


def put_scores(planned: PlannedStep, output: StepOutput, wrong: NonFinite) -> tuple[list[PendingAnswer], int]:
    """Puts the scores of a step's targets into their answers: those that are complete now, and how many have an output
    that is not finite for the first time. Probes of generations that have ended meanwhile mean nothing."""
    completed: list[PendingAnswer] = []
    num_wrong, notes_T = 0, output.notes_T
    if not planned.has_scores and not wrong.targets_T.any():
        return completed, 0
    found = zip(planned.readings, output.greedy_ids.tolist(), strict=True)
    reads = [(read, best) for reading, best in found for read in reading.reads]
    scores = zip(reads, output.target_logprobs.tolist(), wrong.targets_T.tolist(), strict=True)
    for place, (((token, answer, target, _), best), logprob, is_wrong) in enumerate(scores):
        if is_wrong and (target != PROBE or answer.finish_reason is None):
            num_wrong += answer.note_non_finite()
        if target == PROBE:
            continue
        note = None if notes_T is None else notes_T[place : place + 1]
        if answer.put_score(target, logprob, best == token, note):
            completed.append(answer)
    return completed, num_wrong
