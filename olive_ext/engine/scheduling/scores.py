"""Puts a step's scores into the answers that they are for. Knows no runner, and no sequence."""

from __future__ import annotations

from olive_ext.engine.scheduling.finite import NonFinite
from olive_ext.engine.scheduling.planned_step import PlannedStep
from olive_ext.engine.scheduling.sequences import PROBE, Answer
from olive_ext.engine.step import StepOutput


def put_scores(planned: PlannedStep, output: StepOutput, wrong: NonFinite) -> tuple[list[Answer], int]:
    """Puts the scores of a step's targets into their answers: those that are complete now, and how many have an output
    that is not finite for the first time. Probes of generations that have ended meanwhile mean nothing."""
    completed: list[Answer] = []
    num_wrong, notes_T = 0, output.notes_T
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
