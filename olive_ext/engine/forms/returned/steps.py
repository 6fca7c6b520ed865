"""Steps over caches that the graph returns anew: a step has any slots whose rows are alike, which copies nothing while
the rows stay the same. How far they must be alike is tried at opening. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import astuple, dataclass
from typing import ClassVar

from typing_extensions import override

from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.forms.base import ReadySequences, StepForm
from olive_ext.engine.media.items import runs_within
from olive_ext.engine.requests import Source
from olive_ext.engine.scheduling.chosen_rows import ChosenRows
from olive_ext.engine.scheduling.sequences import Sequence


@dataclass(frozen=True)
class AlikeRows(StepForm):
    """Rows of a step have equally many tokens; those of one token behind equally many positions may always share it."""

    name: ClassVar[str] = "alike"
    has_blocks: ClassVar[bool] = True

    mixes_pasts: bool = False
    """One token each, behind different numbers of positions; otherwise behind equally many."""

    prompts: bool = False
    """Several tokens each, behind nothing."""

    continued: bool = False
    """Several tokens each, behind equally many positions."""

    sources: bool = True
    """Sources of different shapes."""

    def group(self, past: int, num_tokens: int, source: Source | None) -> Hashable | None:
        """What rows that may share a step have in common; None for a row that runs alone."""
        shape = None if self.sources or source is None else source.array.shape
        if num_tokens == 1:
            return (1, None if self.mixes_pasts else past, shape)
        return (num_tokens, past, shape) if (self.continued if past else self.prompts) else None

    @override
    def next_rows(self, ready: ReadySequences) -> ChosenRows:
        rows = {one.slot: ready.row(one, ready.most_tokens) for one in ready.sequences}
        chosen = self._alike([(one, len(rows[one.slot].tokens)) for one in ready.sequences])
        return ChosenRows([(one, rows[one.slot]) for one in chosen[: ready.limit]])

    @override
    def decoding(self, sequences: list[Sequence], limit: int) -> list[Sequence]:
        return self._alike([(one, 1) for one in sequences])[:limit] if sequences else []

    def _alike(self, ready: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """The most of these sequences, of which so many tokens are next, whose rows may share a step. Inputs come
        first, of these the ones that run alone, so that what follows their pictures or sounds can be fed together."""
        alone: list[Sequence] = []
        groups: dict[Hashable, list[Sequence]] = {}
        for one, num_tokens in ready:
            group = self.group(one.computed, num_tokens, one.source)
            stop = one.computed + num_tokens
            if group is None or (num_tokens > 1 and runs_within(one.media, one.computed, stop)):
                alone.append(one)
            else:
                groups.setdefault(group, []).append(one)
        if alone:
            return alone[:1]
        inputs = [group for group in groups.values() if any(one.pending > 1 for one in group)]
        return max(inputs or groups.values(), key=len)

    @override
    def room(self, most_tokens: int, pending: int) -> tuple[int, int]:
        return UNLIMITED, UNLIMITED

    @override
    def min_copy(self, answer_tokens: int) -> int:
        return 1

    @override
    def most_step_tokens(self, chunk_size: int, num_slots: int) -> int:
        return chunk_size * num_slots

    @override
    def runs(self, other: StepForm) -> bool:
        return isinstance(other, AlikeRows)

    @override
    def with_other(self, other: StepForm) -> StepForm:
        """Rows as alike as both demand; forms of other caches vouch for one token behind equal pasts only."""
        if not isinstance(other, AlikeRows):
            return AlikeRows(sources=self.sources)
        pairs = zip(astuple(self), astuple(other), strict=True)
        return AlikeRows(*(mine and its for mine, its in pairs))
