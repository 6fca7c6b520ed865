"""Steps over slots in memory that the graph writes in place: one row of several tokens, or one token of each of many
slots; and short answers, which share steps as rows that decode do. Knows no graph and no device.

GroupQueryAttention refuses several tokens behind a past in a batch, so an input is a step of its own. One by one, n
short answers are n steps. Together they are as many steps as the longest has tokens, for every `num_slots` of them, and
a copy of the prefix into a slot for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from olive_ext.engine.forms.base import OneRow, ReadySequences, ScoredSteps, ScoringRule, StepForm, StepTarget
from olive_ext.engine.scheduling.chosen_rows import ChosenRows
from olive_ext.engine.scheduling.sequences import Sequence

LIMITS = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens among which the best limit is chosen."""

TOKENS_PER_STEP, STEP_OF_SLOTS, COPY = 256, 1.1, 0.1
"""The rule, in units of a step's cost: so many tokens of a row cost as much again; a step with a token in every slot; a
copy of a slot. On a device a step of a few tokens costs what it takes to read the weights, and a copy what it takes to
read one slot."""

MARGIN = 0.95
"""Answers share steps where that costs less than this part of what one step for each costs."""


@dataclass(frozen=True)
class SlotRows(StepForm):
    """What forms over slots have in common: inputs come first, each alone."""

    answers: bool = False
    """Texts that are scored may be fed one token a step, many of them in one, as rows that decode are."""

    @override
    def next_rows(self, ready: ReadySequences) -> ChosenRows:
        inputs, decoding = ready.split()
        if inputs:
            return ChosenRows([(inputs[0], ready.row(inputs[0], ready.most_tokens))])
        return ChosenRows([(one, ready.row(one, 1)) for one in self.decoding(decoding, ready.limit)])

    @override
    def scored_steps(self, chunk_size: int, rule: ScoringRule) -> ScoredSteps:
        return AnswerSteps() if self.answers else super().scored_steps(chunk_size, rule)

    @override
    def with_other(self, other: StepForm) -> StepForm:
        return replace(self, answers=self.answers and isinstance(other, SlotRows) and other.answers)


@dataclass(frozen=True)
class NeighbouringSlots(SlotRows):
    """A step decodes neighbouring slots; a gap between two rows is filled with an idle row."""

    name: ClassVar[str] = "range"
    spans_slots: ClassVar[bool] = True

    @override
    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        return list(range(slots[0], slots[-1] + 1))

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, SlotRows | OneRow)


@dataclass(frozen=True)
class AllSlots(SlotRows):
    """A step has one row, or a row for every slot; slots that are not decoding have idle rows."""

    name: ClassVar[str] = "pool"
    splits_rows: ClassVar[bool] = False

    @override
    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        return slots if len(slots) == 1 else list(range(num_slots))  # a sequence that runs alone has no company

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, AllSlots | OneRow)

    @override
    def for_slots(self, counts: Iterable[int]) -> StepForm:
        return self if len(set(counts)) == 1 else OneRow()


class AnswerSteps(ScoredSteps):
    """Short answers share steps where that is cheaper: `answer_tokens` is the most tokens of such an answer."""

    def __init__(self) -> None:
        super().__init__("rows", "by rule: none so far")

    @override
    def choose(self, sequences: Iterable[Sequence], target: StepTarget, context_length: int) -> bool:
        scored = [one for one in sequences if one.generation is None]
        tokens = [one.end - one.num_shared for one in scored]
        num_slots = target.capacity.for_sequences(max((one.end for one in scored), default=1)).num_slots
        if tokens and num_slots > 1:
            self.answer_tokens, self.reason = choose_limit(tokens, num_slots)
            self.name = "answers" if self.answer_tokens else "rows"
        return False


def choose_limit(tokens: list[int], num_slots: int) -> tuple[int, str]:
    """The cheapest limit for texts of so many tokens behind their prefix (0: a step for each), and why."""
    alone = _cost(tokens, 0, num_slots)
    costs = {limit: _cost(tokens, limit, num_slots) for limit in LIMITS}
    limit = min(costs, key=lambda limit: costs[limit])
    words = f"{costs[limit]:.3g} steps' cost expected where answers of up to {limit} tokens share steps"
    return limit if costs[limit] < MARGIN * alone else 0, f"by rule: {words}, {alone:.3g} steps' cost one by one"


def _cost(tokens: Iterable[int], limit: int, num_slots: int) -> float:
    """What texts cost that have so many tokens behind their prefix, where those of up to `limit` share steps."""
    shared = [count for count in tokens if count <= limit]
    rows = max(1, min(num_slots, len(shared)))
    alone = sum(1 + 1 / TOKENS_PER_STEP * count for count in tokens if count > limit)
    return alone + sum(shared) * STEP_OF_SLOTS / rows + len(shared) * COPY
