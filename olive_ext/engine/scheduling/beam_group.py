"""The sequences of one beam search, each in a slot of its own, and who goes on in whose slot. Knows no runner.

before   slot 0  7 3 | 9      its best continuation is 4, another one 6
         slot 1  7 3 | 2      has none
after    slot 0  7 3 9 | 4    where its parent was
         slot 1  7 3 9 | 6    a fork of slot 0, whose content stays: what is copied from is never copied to
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from olive_ext.engine.requests import FinishReason
from olive_ext.engine.scheduling.beam_search import BeamSearch, Follower, num_candidates
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import Candidates, Copy


class BeamGroup:
    """Begins with one sequence, the prompt's; the others follow once its candidates are known."""

    def __init__(self, root: Sequence, slots: Slots, wanted: Container[int]) -> None:
        """Takes slots for the others, the `wanted` ones last."""
        assert root.generation is not None
        assert root.answer is not None
        self.num_candidates = num_candidates(root.generation)
        self._others = [_waiting(root, slots.take_empty(wanted)) for _ in range(root.generation.num_slots - 1)]
        self._slots = slots
        self._answer = root.answer
        self._search = BeamSearch(root.generation)
        self._running = [root]
        self._found: dict[int, Candidates] = {}

    @property
    def members(self) -> list[Sequence]:
        """All sequences, whether they go on or not."""
        return [*self._running, *self._others]

    def put(self, sequence: Sequence, found: Candidates) -> None:
        """Takes in the candidates [1, C] of one sequence."""
        self._found[sequence.slot] = found.first(count=self.num_candidates)

    def advance(self) -> list[Copy]:
        """Once the candidates of all are known: lets sequences go on, or ends the search. Returns the forks."""
        if len(self._found) < len(self._running):
            return []
        found = [self._found[sequence.slot] for sequence in self._running]
        self._found.clear()
        followers = self._search.advance(Candidates.stacked(found)) if self._answer.is_finite else []
        if followers:
            return self._place(followers)
        if self._answer.is_finite:
            self._answer.put_hypotheses(self._search.best)
        else:
            self._answer.finish_reason = FinishReason.NON_FINITE
        for sequence in self.members:
            sequence.has_ended = True
        return []

    def _place(self, followers: list[Follower]) -> list[Copy]:
        """Gives each of the sequences that go on a slot, and its next token."""
        parents = [self._running[follower.parent] for follower in followers]
        free = [sequence for sequence in self.members if all(sequence is not parent for parent in parents)]
        placed: list[Sequence] = []
        copies = []
        for parent in parents:
            if all(sequence is not parent for sequence in placed):
                placed.append(parent)
                continue
            fork = free.pop(0)
            fork.continue_from(parent)
            copies.append(self._slots.fork(parent.slot, fork.slot))
            placed.append(fork)
        for sequence, follower in zip(placed, followers, strict=True):
            sequence.feed(follower.token)
        self._running, self._others = placed, free
        return copies


def _waiting(root: Sequence, slot: int) -> Sequence:
    """A sequence of the search that nothing is fed to yet."""
    shared: dict[str, Any] = {"answer": root.answer, "source": root.source, "media": root.media}
    return Sequence(root.tokens.copy(), root.end, generation=root.generation, slot=slot, computed=root.end, **shared)
