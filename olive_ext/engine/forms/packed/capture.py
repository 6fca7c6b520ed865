"""Captured steps over a paged cache: those in which every row decodes, padded with idle rows to 1, 2, 4, ... rows.

A captured step reads tokens, positions, lengths and block tables from values on the device that are filled anew for
each run. Frozen are its shapes, and the bounds of lengths that the host tells the attention: these hold for all steps
whose longest row lies between two powers of two, which have one block table's width.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.forms import agreement
from olive_ext.engine.forms.packed.kv import IDLE_SLOT
from olive_ext.engine.forms.rows.buckets import PADDING, Shape, filled, shape_of
from olive_ext.engine.forms.rows.capture import Capture
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import Copy, LogitsRow, PlainRows, Row, Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.providers.devices import Device
from olive_ext.model.spec.role_inputs import ceiling

MOST_ROWS = 512
"""Steps of more rows run plainly."""

PLAIN_RUNS = 3
"""Steps of one shape that run plainly before one is captured, which takes two runs."""

MOST_STEPS = 64
"""Captured steps: each holds memory of the device."""

ROUNDS = PLAIN_RUNS
"""Steps of the trial, which run plainly first, then captured."""

MOST_TRIED = 80
"""Rows of a step of the trial."""

MOST_OTHERS = 0.25
"""Part of the greedy tokens that may differ in the trial: two may be as good to the last bit but one."""


class PackedCapture(Capture):
    """The captured steps of a session over a paged cache, one for each bucket of rows and of positions."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        super().__init__(session, device)
        self._num_seen: Counter[Shape] = Counter()

    @override
    def prepared(self, step: Step, num_slots: int) -> tuple[Step, bool]:
        padded = self._padded(step)
        if padded is not None:
            shape = shape_of(padded)
            self._num_seen[shape] += 1
            has_room = self._num_seen[shape] > PLAIN_RUNS and len(self._steps) < MOST_STEPS
            if has_room or shape in self._steps:
                return padded, True
        return replace(step, logits_rows=step.logits_rows or (LogitsRow(0, 0),)), False

    @override
    def forget(self) -> None:
        super().forget()
        self._num_seen.clear()

    def _padded(self, step: Step) -> Step | None:
        """The step in its bucket; None for one in which not every row decodes, or that reads more than that."""
        slots_B, past_B, _, _, tokens_N = step.columns
        num_rows = len(slots_B)
        num_reads = max(len(step.logits_rows), len(step.targets), len(step.samples))
        if num_rows > MOST_ROWS or max(num_reads, len(tokens_N)) > num_rows or step.beams or step.whole_length:
            return None
        size = ceiling(num_rows)
        slots_B, past_B, tokens_B = (
            np.concatenate([values, np.full(size - num_rows, idle, np.int64)])
            for values, idle in ((slots_B, IDLE_SLOT), (past_B, 0), (tokens_N, PADDING))
        )
        return replace(
            step,
            rows=PlainRows(slots_B, past_B, tokens_B, ()),
            logits_rows=filled(step.logits_rows, size, LogitsRow(0, 0)),
            targets=filled(step.targets, size, (0, PADDING)),
            samples=filled(step.samples, size, 0) if step.samples else (),
            follows=filled(step.follows, size, -1) if step.follows else (),
            width=max(BLOCK_SIZE, ceiling(1 + int(past_B.max()))),
        )


def check_captured_steps(runner: Runner, vocab_size: int, chunk_size: int) -> str | None:
    """Why captured steps must not be used on this model and device; None where replays find in other tokens, behind
    prefixes in one block and in several, what the same steps find that run plainly."""
    longest = min(2 * BLOCK_SIZE + ROUNDS, runner.traits.context_length - ROUNDS)
    draw = agreement.draw(vocab_size)
    runner.reserve(longest + ROUNDS)
    capacity = runner.capacity
    fitting = min(MOST_TRIED, capacity.num_slots * 3 // 4, capacity.blocks.number // 3)
    num_rows = min(max(3, fitting), capacity.num_slots)
    lengths = [min(length, longest) for length in (longest, BLOCK_SIZE - 1, *range(7, 5 + num_rows))][:num_rows]
    text = draw(longest)
    steps = [_round(lengths, number, draw(len(lengths))) for number in range(ROUNDS)]
    try:
        for past in range(0, longest, chunk_size):
            runner.run(Step((Row(0, past, text[past : past + chunk_size]),)))
        copies = tuple(Copy(0, slot, length) for slot, length in enumerate(lengths) if slot)
        runs = [_num_replayed(runner)]
        outputs: list[list[StepOutput]] = []
        for _ in range(2):
            outputs.append([runner.run(replace(step, copies=() if i else copies)) for i, step in enumerate(steps)])
            runs.append(_num_replayed(runner))
    except RunError as error:
        return f"a captured step fails: {error}"
    runner.release_memory()  # requests decide how long slots are
    if runs != [runs[0], runs[0], runs[0] + ROUNDS]:
        return "no step was captured"
    plain, again = ([one.target_logprobs for one in found] for found in outputs)
    if np.mean([a.greedy_ids != b.greedy_ids for a, b in zip(*outputs, strict=True)]) > MOST_OTHERS:
        return "replays of a captured step find other tokens"
    return agreement.disagreement("replays of a captured step", plain, again, plain[1])


def _round(lengths: list[int], number: int, tokens: tuple[int, ...]) -> Step:
    rows = tuple(Row(slot, length + number, (tokens[slot],)) for slot, length in enumerate(lengths))
    reads = tuple(LogitsRow(slot, 0) for slot in range(len(rows)))
    return Step(rows, reads, tuple((slot, agreement.TARGETS[slot % 4]) for slot in range(len(rows))))


def _num_replayed(runner: Runner) -> int:
    return int(runner.describe()["steps_replayed"])
