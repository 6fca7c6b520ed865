"""Short answers as steps of one token of each, where attention takes several tokens behind a past in one row only: how
many tokens such an answer may have, by what steps and copies cost, measured on the opened model or by a rule.

One by one, n answers are n steps. Together they are as many steps as the longest has tokens, for every `num_slots` of
them, and a copy of the prefix into a slot for each. Knows no graph and no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from olive_ext.engine.runners.runner import Traits
from olive_ext.engine.scheduling.prefix_tree import Plan
from olive_ext.engine.scheduling.step_cost import REPEATS, Target
from olive_ext.engine.step import Batching, Copy, LogitsRow, Row, Step

LIMITS = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens among which the best limit is chosen."""

TOKENS = 2, 18
"""Tokens of the two steps of one row that are timed: two, because one token is a step that decodes."""

PAST = 7 * TOKENS[1]
"""Positions before them."""

MIN_ANSWERS = 20 * REPEATS * 4
"""Short answers from which on measuring pays: its steps are a twentieth of theirs."""

MARGIN = 0.95
"""Answers share steps where that costs less than this part of what one step for each costs."""


@dataclass(frozen=True)
class AnswerCost:
    """Seconds: of a step with one row, `alone`, and of each token in it; of a step with a token in every slot,
    `together`; and of a copy of a slot."""

    alone: float
    per_token: float
    together: float
    copy: float

    def of(self, tokens: Iterable[int], limit: int, num_slots: int) -> float:
        """Seconds of texts that have so many tokens behind their prefix, where those of up to `limit` share steps."""
        shared = [count for count in tokens if count <= limit]
        rows = max(1, min(num_slots, len(shared)))
        alone = sum(self.alone + self.per_token * count for count in tokens if count > limit)
        return alone + sum(shared) * self.together / rows + len(shared) * self.copy


TYPICAL = AnswerCost(alone=1.0, per_token=1 / 256, together=1.1, copy=0.1)
"""The rule, in units of a step's cost: on a device a step of a few tokens costs what it takes to read the weights, and
a copy what it takes to read one slot."""


class AnswerSteps:
    """The present choice: `tokens` is the most tokens of an answer that shares steps, 0 where none does."""

    def __init__(self, traits: Traits, *, is_measured: bool) -> None:
        """`is_measured`: costs are taken from the clock, not from the rule."""
        self.is_possible = traits.answer_steps and traits.batching in (Batching.RANGE, Batching.POOL)
        self._cost = None if is_measured else TYPICAL
        self.tokens = 0
        self.reason = "not measured yet: too few short answers so far" if is_measured else "by rule: none so far"

    def choose(self, plan: Plan, target: Target) -> bool:
        """Takes the limit that is cheapest for `plan`. The first time that it has answers enough, steps of `target`
        are timed; True then, because that has overwritten slots."""
        tokens = [one.end - one.num_shared for one in plan.sequences if one.generation is None]
        if not self.is_possible or not tokens or target.capacity.num_slots == 1:
            return False
        is_worth_it = sum(count <= LIMITS[-1] for count in tokens) >= MIN_ANSWERS
        is_timed = self._cost is None and is_worth_it and target.traits.context_length >= PAST + max(TOKENS)
        if is_timed:
            self._cost = measure(target)
        if self._cost is not None:
            self.tokens, self.reason = choose(self._cost, tokens, target.capacity.num_slots)
        return is_timed

    def describe(self) -> Mapping[str, Any]:
        """What was measured, in seconds, and the limit."""
        facts: dict[str, Any] = {"answer_tokens": self.tokens} if self.tokens else {}
        if self._cost is None or self._cost is TYPICAL:
            return facts
        return {**facts, "answer_cost": {f"{name}_s": seconds for name, seconds in asdict(self._cost).items()}}


def choose(cost: AnswerCost, tokens: list[int], num_slots: int) -> tuple[int, str]:
    """The cheapest limit for texts of so many tokens behind their prefix, and why; 0 where each has a step of its
    own."""
    origin, unit = ("by rule", "steps' cost") if cost is TYPICAL else ("measured", "s")
    alone = cost.of(tokens, 0, num_slots)
    costs = {limit: cost.of(tokens, limit, num_slots) for limit in LIMITS}
    limit = min(costs, key=lambda limit: costs[limit])
    words = f"{costs[limit]:.3g} {unit} expected where answers of up to {limit} tokens share steps"
    return limit if costs[limit] < MARGIN * alone else 0, f"{origin}: {words}, {alone:.3g} {unit} one by one"


def measure(target: Target, clock: Callable[[], float] = time.perf_counter) -> AnswerCost:
    """Times steps of one row, of all slots, and of all slots behind copies; the best of a few of each, behind one that
    is not counted."""
    target.reserve(PAST + max(TOKENS))
    num_slots = target.capacity.num_slots

    def seconds(step: Step) -> float:
        return min([_timed(target, step, clock) for _ in range(REPEATS)][1:])

    for past in range(0, PAST, TOKENS[1]):
        target.run(Step((Row(0, past, (0,) * TOKENS[1]),)))
    rows = tuple(Row(slot, PAST, (0,)) for slot in range(num_slots))
    step = Step(rows, tuple(LogitsRow(slot, 0) for slot in range(num_slots)))
    forked = seconds(replace(step, copies=tuple(Copy(0, slot, PAST) for slot in range(1, num_slots))))
    together = seconds(step)
    few, many = (seconds(Step((Row(0, PAST, (0,) * count),), (LogitsRow(0, count - 1),))) for count in TOKENS)
    per_token = max(0.0, many - few) / (TOKENS[1] - TOKENS[0])
    copy = max(0.0, forked - together) / max(1, num_slots - 1)
    return AnswerCost(max(0.0, few - TOKENS[0] * per_token), per_token, together, copy)


def _timed(target: Target, step: Step, clock: Callable[[], float]) -> float:
    begin = clock()
    target.run(step)
    return clock() - begin
