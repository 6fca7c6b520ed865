"""A form as the planner sees it: the scheduler asks it for the rows of the next step, and never checks its type.

Knows no arrays, no runner and no graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from olive_ext.engine.scheduling.prefix_tree import TreeBatches
from olive_ext.engine.scheduling.sequences import ChosenRow, Sequence
from olive_ext.engine.step import IDLE_TOKEN, UNLIMITED, Capacity, Row
from olive_ext.media.items import chunk_end

MIN_COPY, MIN_FORK = 16, 4
"""The fewest positions that a copy from another slot must save; below that, feeding the tokens costs less. The second
number is for slots of blocks, of which at most one is copied. Where nothing is copied, any saving counts."""


@dataclass(frozen=True)
class ReadySequences:
    """The running sequences that have tokens to compute, and what limits the next step."""

    sequences: list[Sequence]
    most_tokens: int
    """The most tokens of inputs in a step."""

    limit: int
    """The most tokens of a step, where memory did not suffice for a longer one; also the most rows."""

    capacity: int
    """Positions of a slot."""

    can_rewind: bool
    chunked_prefill: bool
    row_group: int

    def split(self) -> tuple[list[Sequence], list[Sequence]]:
        """The inputs, whose next rows may have several tokens, and the sequences that are fed one token a step. The
        last row of a scored text is extended to a whole group of rows, unless it is fed one token a step."""
        inputs: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence in self.sequences:
            has_many = sequence.end - sequence.computed > 1 or (sequence.generation is None and self.row_group > 1)
            (inputs if has_many and not sequence.is_short else decoding).append(sequence)
        return inputs, decoding

    def row(self, sequence: Sequence, most: int) -> Row:
        """The sequence's next tokens, up to `most` where it may be split; all of an item that they begin with."""
        start, stop = sequence.computed, sequence.end
        if stop - start == 1 and sequence.generation is not None and not sequence.checkpoints:
            return Row(sequence.slot, start, (sequence.tokens.item(start),), False, sequence.source, sequence.media)
        if self.chunked_prefill:
            stop = min(stop, start + most)
            if sequence.media and stop < sequence.end:
                stop = chunk_end(sequence.media, start, stop, self.row_group)
        if not self.can_rewind:
            stop = min((length for length in sequence.checkpoints if start < length < stop), default=stop)
        is_checkpoint = not self.can_rewind and stop in sequence.checkpoints
        tokens = tuple(sequence.tokens[start:stop].tolist())
        if sequence.generation is None and stop == sequence.end and not sequence.is_short:
            missing = (start - stop) % self.row_group
            if stop + missing <= self.capacity:  # else the slot has no room for a whole group
                tokens += (IDLE_TOKEN,) * missing
        return Row(sequence.slot, start, tokens, is_checkpoint, sequence.source, sequence.media)


class StepForm(ABC):
    """Which sequences may share a step, and which other rows the step must have."""

    name: ClassVar[str]
    """The form's name in `describe_execution` ("batching")."""

    has_blocks: ClassVar[bool] = False
    """Whether slots share memory, so that copies between them cost next to nothing."""

    spans_slots: ClassVar[bool] = False
    """Whether a step has rows for all slots from the first to the last of its sequences."""

    longest_step: int = UNLIMITED
    """The most tokens in a step that the device is known to handle without a crash. An item, which is fed in one step,
    must not have more either."""

    mixes_pasts: bool = True
    """Whether rows of one token each may have pasts of different lengths."""

    @property
    def padded(self) -> StepForm:
        """The form of the same steps where each is padded to one of a few shapes: one row, or all slots."""
        return ONE_ROW

    @abstractmethod
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        """The rows of the next step."""

    def slots_of(self, slots: list[int], num_slots: int) -> list[int]:
        """The slots of a step in which `slots` (ascending) have rows. Those without a sequence get idle rows."""
        return slots

    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        """The tokens and the number of inputs to admit beside inputs with `pending` tokens: here one by one."""
        return (0, 0) if pending else (most_tokens, 1)

    def min_copy(self, answer_tokens: int) -> int:
        """The fewest positions that a copy between slots must save: few for a short answer, whose steps are shared."""
        return MIN_FORK if answer_tokens else MIN_COPY

    def most_step_tokens(self, chunk_size: int, num_slots: int) -> int:
        """The tokens of a step whose inputs have up to `chunk_size`."""
        return chunk_size + num_slots

    def scored_steps(self, rule: ScoringRule) -> ScoredSteps:
        """How scored texts share steps."""
        return ScoredSteps("rows", rule.reason)

    @abstractmethod
    def runs(self, other: StepForm) -> bool:
        """Whether a runner of this form can run steps of the `other` form, too."""

    def with_other(self, other: StepForm, counts: Items[int]) -> StepForm:
        """This form, limited to steps that a runner of the `other` form, which `runs` it, can compute as well. The
        runners have `counts` slots."""
        return self


def joined(first: StepForm, second: StepForm, counts: Items[int]) -> StepForm:
    """The form of steps that two runners both execute. `counts`: the slots of each runner."""
    if second.runs(first):
        return first.with_other(second, counts)
    return second.with_other(first, counts) if first.runs(second) else ONE_ROW


@dataclass(frozen=True)
class OneRow(StepForm):
    """A step has one row."""

    name: ClassVar[str] = "single"
    mixes_pasts: ClassVar[bool] = False  # type: ignore[misc]

    @override
    def next_rows(self, ready: ReadySequences) -> list[ChosenRow]:
        inputs, decoding = ready.split()
        return [(sequence, ready.row(sequence, ready.most_tokens)) for sequence in (inputs or decoding)[:1]]

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, OneRow)


ONE_ROW = OneRow()


@dataclass(frozen=True)
class ScoringRule:
    """How scored texts share steps: the chunk size decides, or a rule on what steps cost."""

    is_open: bool = False
    reason: str = "engine.chunk_size"


class ScoredSteps:
    """The present choice of how scored texts share steps: here they are computed in slots, as all others."""

    num_tokens = 0
    """Tokens of a step of texts without slots; 0 where scored texts have slots."""

    answer_tokens = 0
    """A text whose unshared tokens are at most so many is fed one token a step."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes that a scheduler plans by."""
        return self.num_tokens, self.answer_tokens

    def choose(self, sequences: Iterable[Sequence], capacity: Capacity) -> None:
        """Takes what is cheapest for these sequences."""

    def batches(self, capacity: Capacity) -> TreeBatches | None:
        """The plan of scored texts where they have no slots."""
        return None

    def memory(self, scored: int, generated: int, context_length: int, row_group: int) -> tuple[int, int]:
        """Positions of a slot, and cells beside the slots, for requests of at most so many positions."""
        most = max(scored, generated)
        return min(most + -most % row_group, context_length), 0

    def describe(self) -> Mapping[str, Any]:
        """The form and the reason."""
        facts = {"scoring": self.name, "scoring_step": self.num_tokens, "scoring_reason": self.reason}
        return {**facts, "answer_tokens": self.answer_tokens} if self.answer_tokens else facts
