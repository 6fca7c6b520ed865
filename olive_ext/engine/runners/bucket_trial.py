"""Tries on the opened model whether its steps may be padded to shape buckets, and replayed where they are captured."""

from __future__ import annotations

import numpy as np

from olive_ext.engine.runners.shape_buckets import DECODING, BucketedRunner, step_sizes
from olive_ext.engine.runners.trials import disagreement
from olive_ext.engine.step import FloatArray, LogitsRow, Row, Runner, Step, StepOutput
from olive_ext.errors import RunError
from olive_ext.model.decisions import BucketPlan

TOKENS = 5
TARGETS = ((0, 0), (0, 1), (0, 2), (0, 3))


def with_buckets(runner: Runner, vocab_size: int, chunk_size: int, plan: BucketPlan, notes: list[str]) -> Runner:
    """`runner`, or one around it that gives its steps few shapes. Adds to `notes` why not where `plan` has
    buckets.

    Raises `ConfigError` where nothing else will do."""
    if plan.steps == "none":
        return runner
    sizes = DECODING if plan.steps == "decoding" else step_sizes(chunk_size)
    shaped = BucketedRunner(runner, sizes, is_strict=plan.is_strict)
    problem = _check(runner, shaped, vocab_size)
    if problem is None and plan.is_captured:
        problem = _check_replay(runner, shaped, vocab_size)
    if problem is None:
        return shaped
    notes.append(plan.without(problem).note)
    return runner


def _check(runner: Runner, shaped: BucketedRunner, vocab_size: int) -> str | None:
    """Why steps of few shapes must not be used on this model and device; None where they score what others do."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, vocab_size, (2, TOKENS)).tolist()
    runner.reserve(TOKENS)
    try:
        expected = [_score(runner, text, None) for text in texts]
        found = [_score(runner, text, shaped) for text in texts]
        again = [_score(runner, text[:end], None, end - 1) for text in texts[1:] for end in range(1, TOKENS + 1)]
    except RunError as error:
        return f"a step that was filled up fails: {error}"
    problem = disagreement(expected, found, again[-1])
    return None if problem is None else f"steps that were filled up score {problem}"


def _check_replay(runner: Runner, shaped: BucketedRunner, vocab_size: int) -> str | None:
    """Why captured steps must not be used; None where a replay finds in other tokens what a plain step finds."""
    slots = range(runner.num_slots)
    heads = tuple(LogitsRow(slot, 0) for slot in slots)
    targets = tuple((slot, token) for slot in slots for _, token in TARGETS)
    expected, found = [], []
    try:
        for slot in slots:
            runner.run(Step((Row(slot, 0, (slot % vocab_size,)),), heads[:1]))
        for first in (0, vocab_size // 2):
            rows = tuple(Row(slot, 1, ((first + slot) % vocab_size,)) for slot in slots)
            step = Step(rows, heads, targets)
            expected.append(runner.run(step))
            found.append(_run(runner, step, shaped))
    except RunError as error:
        return f"a captured step fails: {error}"
    if any((a.greedy_ids != b.greedy_ids[: len(slots)]).any() for a, b in zip(expected, found, strict=True)):
        return "replays of a captured step find other tokens"
    plain, replayed = ([output.target_logprobs[: len(targets)] for output in outputs] for outputs in (expected, found))
    problem = disagreement(plain, replayed, plain[1])
    return None if problem is None else f"replays of a captured step score {problem}"


def _score(runner: Runner, text: list[int], shaped: BucketedRunner | None, past: int = 0) -> FloatArray:
    """Log-probabilities behind `text`, of which `past` tokens are resident; with `shaped` in its last two steps."""
    if shaped is not None and past == 0:
        _run(runner, Step((Row(0, 0, tuple(text[:-2])),)), shaped)
        past = len(text) - 2
    step = Step((Row(0, past, tuple(text[past:])),), (LogitsRow(0, len(text) - past - 1),), TARGETS)
    return _run(runner, step, shaped).target_logprobs[: len(TARGETS)]


def _run(runner: Runner, step: Step, shaped: BucketedRunner | None) -> StepOutput:
    run = step if shaped is None else shaped.padded(step)
    assert run is not None
    return runner.run(run)
