"""One beam search as transformers 5 defines it (`GenerationMixin._beam_search`): its sequences, each in a slot of its
own, and who goes on in whose slot. Knows no runner.

before   slot 0  7 3 | 9      its best continuation is 4, another one 6
         slot 1  7 3 | 2      has none
after    slot 0  7 3 9 | 4    where its parent was
         slot 1  7 3 9 | 6    a fork of slot 0, whose content stays: what is copied from is never copied to

Axes: B sequences that go on, C candidates of each, as many as are looked at of all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from olive_ext.engine.requests import FinishReason, Generation, Hypothesis
from olive_ext.engine.scheduling.sequences import Sequence
from olive_ext.engine.scheduling.slots import Slots
from olive_ext.engine.step import Candidates


def num_candidates(generation: Generation) -> int:
    """How many continuations are looked at, where as many as can end on a stop id. 0 without beams."""
    beams = generation.beams
    return 0 if beams is None else max(2, 1 + len(generation.stop_ids)) * beams.num_beams


class Follower(NamedTuple):
    """A sequence that goes on with `token`, from sequence number `parent` of those before."""

    parent: int
    token: int


@dataclass(frozen=True)
class _Running:
    tokens: tuple[int, ...]
    score: np.float32
    """The sum of its log-probabilities."""

    is_finished: Callable[[Items[int]], bool] | None


class BeamSearch:
    """Goes on from one sequence of no token, with `generation.beams`."""

    def __init__(self, generation: Generation) -> None:
        assert generation.beams is not None
        self._generation = generation
        self._beams = generation.beams
        self._running = [_Running((), np.float32(0), generation.is_finished)]
        self._finished: list[Hypothesis] = []

    @property
    def best(self) -> tuple[Hypothesis, ...]:
        """The sequences to be returned, best first."""
        return tuple(self._finished[: self._beams.num_return_sequences])

    def advance(self, found: Candidates) -> list[Follower]:
        """The sequences that go on, best first, given the candidates of those before; none where the search is over."""
        running_B1 = np.array([[sequence.score] for sequence in self._running], np.float32)
        scores = (running_B1 + found.logprobs_NC).ravel()
        best = np.argsort(-scores, kind="stable")[: num_candidates(self._generation)].tolist()
        going: list[_Running] = []
        followers: list[Follower] = []
        for rank, place in enumerate(best):
            parent, token = place // found.ids_NC.shape[1], int(found.ids_NC.flat[place])
            if not scores[place] > -np.inf:
                break  # tokens that the model rules out
            child, reason = self._child(self._running[parent], token, scores[place])
            if reason is None and len(going) < self._beams.num_beams:
                going.append(child)
                followers.append(Follower(parent, token))
            elif reason is not None and rank < self._beams.num_beams:
                self._finish(child, reason)
        self._running = going
        return [] if self._is_over() else followers

    def _child(self, parent: _Running, token: int, score: np.float32) -> tuple[_Running, FinishReason | None]:
        child = _Running((*parent.tokens, token), score, copy.copy(parent.is_finished))
        if token in self._generation.stop_ids:
            return child, FinishReason.STOP_ID
        if child.is_finished is not None and child.is_finished(child.tokens):
            return child, FinishReason.STOPPED
        return child, FinishReason.LENGTH if len(child.tokens) >= self._generation.max_new_tokens else None

    def _finish(self, sequence: _Running, reason: FinishReason) -> None:
        tokens, score = sequence.tokens, self._penalized(sequence.score, len(sequence.tokens))
        is_stopped = reason is FinishReason.STOP_ID
        found = (tokens[:-1], score, reason, tokens[-1]) if is_stopped else (tokens, score, reason)
        self._finished.append(Hypothesis(*found))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self._beams.num_beams :]

    def _is_over(self) -> bool:
        if not self._running:
            return True
        if len(self._finished) < self._beams.num_beams:
            return False
        beams, best = self._beams, self._running[0]
        is_never = beams.early_stopping == "never" and beams.length_penalty > 0
        length = self._generation.max_new_tokens if is_never else len(best.tokens)
        return beams.early_stopping is True or not self._penalized(best.score, length) > self._finished[-1].score

    def _penalized(self, score: np.float32, length: int) -> float:
        return float(score) / float(length**self._beams.length_penalty)


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

    def advance(self) -> int:
        """Once the candidates of all are known: lets sequences go on, or ends the search. Returns how many forked."""
        if len(self._found) < len(self._running):
            return 0
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
        return 0

    def _place(self, followers: list[Follower]) -> int:
        """Gives each of the sequences that go on a slot, and its next token."""
        parents = [self._running[follower.parent] for follower in followers]
        free = [sequence for sequence in self.members if all(sequence is not parent for parent in parents)]
        num_free, placed = len(free), list[Sequence]()
        for parent in parents:
            if all(sequence is not parent for sequence in placed):
                placed.append(parent)
                continue
            fork = free.pop(0)
            fork.continue_from(parent)
            self._slots.fork(parent.slot, fork.slot)
            placed.append(fork)
        for sequence, follower in zip(placed, followers, strict=True):
            sequence.feed(follower.token)
        self._running, self._others = placed, free
        return num_free - len(free)


def _waiting(root: Sequence, slot: int) -> Sequence:
    shared: dict[str, Any] = {"answer": root.answer, "source": root.source, "media": root.media}
    return Sequence(root.tokens.copy(), root.end, generation=root.generation, slot=slot, computed=root.end, **shared)
