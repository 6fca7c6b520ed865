"""Beam search as transformers 5 defines it (`GenerationMixin._beam_search`), for one request. Knows no slot.

Axes: B sequences that go on, C candidates of each, as many as are looked at of all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from olive_ext.engine.requests import FinishReason, Generation, Hypothesis
from olive_ext.engine.step import Candidates


def num_candidates(generation: Generation) -> int:
    """How many continuations are looked at: enough to go on from where as many end on a stop id as can. 0 without
    beams."""
    beams = generation.beams
    return 0 if beams is None else max(2, 1 + len(generation.stop_ids)) * beams.num_beams


class Follower(NamedTuple):
    """A sequence that goes on with `token`, from sequence number `parent` of those before."""

    parent: int
    token: int


@dataclass(frozen=True)
class _Running:
    """A sequence that has not finished."""

    tokens: tuple[int, ...]
    score: np.float32
    """The sum of its log-probabilities."""

    is_finished: Callable[[Sequence[int]], bool] | None


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
        """The sequences that go on, best first, given the candidates of those before, in their order; none where the
        search is over."""
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
        """`parent` with one more token, and why it is finished, if it is."""
        child = _Running((*parent.tokens, token), score, copy.copy(parent.is_finished))
        if token in self._generation.stop_ids:
            return child, FinishReason.STOP_ID
        if child.is_finished is not None and child.is_finished(child.tokens):
            return child, FinishReason.STOPPED
        return child, FinishReason.LENGTH if len(child.tokens) >= self._generation.max_new_tokens else None

    def _finish(self, sequence: _Running, reason: FinishReason) -> None:
        """Keeps the sequence where it is among the best."""
        tokens, score = sequence.tokens, self._penalized(sequence.score, len(sequence.tokens))
        is_stopped = reason is FinishReason.STOP_ID
        found = (tokens[:-1], score, reason, tokens[-1]) if is_stopped else (tokens, score, reason)
        self._finished.append(Hypothesis(*found))
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self._beams.num_beams :]

    def _is_over(self) -> bool:
        """Whether nothing goes on, or what does is not looked at any more."""
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
