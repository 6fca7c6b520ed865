"""Runs every step on a reference and on a candidate, and compares what both say. Knows no graph.

Axes: R logits rows of a step, T targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.reference.kernels import Divergence
from olive_ext.engine.requests import Notes, Source
from olive_ext.engine.runners.wrapper import WrappedRunner
from olive_ext.engine.step import Batching, Runner, Step, StepOutput
from olive_ext.errors import ConfigError, MemoryShortageError
from olive_ext.stats.compared_fields import COMPARED

_BATCHING = (Batching.SINGLE, Batching.POOL, Batching.RANGE, Batching.PACKED)
"""Each allows what those before it allow."""


class PairRunner(WrappedRunner):
    """A candidate and its reference, both of which expose their rows of logits. Can do what both can.

    Scores and tokens are the candidate's; the notes of each target are `COMPARED`. The candidate has the slots that its
    scheduler is told of, the reference at least as many. Raises `ConfigError` for models of different kinds.
    """

    def __init__(self, candidate: Runner, reference: Runner, divergence: Divergence) -> None:
        super().__init__(candidate)
        self._reference = reference
        self._divergence = divergence
        self._owed: tuple[Step, ...] = ()
        if candidate.source_kind is not reference.source_kind:
            kinds = [runner.source_kind.value if runner.source_kind else "none" for runner in (reference, candidate)]
            raise ConfigError(f"the reference's encoder takes {kinds[0]} and the model's {kinds[1]}")

    @property
    def batching(self) -> Batching:
        """POOL steps hold all slots, which are one number for both only where both have as many."""
        weaker = min(self._inner.batching, self._reference.batching, key=_BATCHING.index)
        is_uneven = self._inner.num_slots != self._reference.num_slots
        return Batching.SINGLE if weaker is Batching.POOL and is_uneven else weaker

    @property
    def can_rewind(self) -> bool:
        return self._inner.can_rewind and self._reference.can_rewind

    @property
    def chunked_prefill(self) -> bool:
        return self._inner.chunked_prefill and self._reference.chunked_prefill

    @property
    def num_slots(self) -> int:
        return min(self._inner.num_slots, self._reference.num_slots)

    @property
    def has_tree_batches(self) -> bool:
        return self._inner.has_tree_batches and self._reference.has_tree_batches

    @property
    def shared_prefix_capacity(self) -> int:
        return min(self._inner.shared_prefix_capacity, self._reference.shared_prefix_capacity)

    @property
    def capacity(self) -> int:
        return min(self._inner.capacity, self._reference.capacity)

    @property
    def context_length(self) -> int:
        return min(self._inner.context_length, self._reference.context_length)

    @property
    def host_bytes(self) -> int:
        return self._inner.host_bytes + self._reference.host_bytes + self._divergence.host_bytes

    def check_source(self, source: Source | None) -> None:
        self._inner.check_source(source)
        self._reference.check_source(source)

    def reserve(self, positions: int) -> None:
        self._inner.reserve(positions)
        self._reference.reserve(positions)

    def reserve_shared_prefix(self, cells: int) -> None:
        self._inner.reserve_shared_prefix(cells)
        self._reference.reserve_shared_prefix(cells)

    def run(self, step: Step) -> StepOutput:
        """Raises `MemoryShortageError` where one of them has no memory for the step; its halves, which come without its
        copies and moves, may be run then."""
        try:
            reference = self._reference.run(step)
        except MemoryShortageError:
            self._owed = (*self._owed, step)
            raise
        copies = (copy for owed in (*self._owed, step) for copy in owed.copies)
        moves = (move for owed in (*self._owed, step) for move in owed.moves)
        whole = replace(step, copies=tuple(copies), moves=tuple(moves)) if self._owed else step
        self._owed = ()
        candidate = self._inner.run(whole)
        return replace(candidate, logits_RV=None, notes_T=self._notes(step, reference, candidate))

    def describe(self) -> Mapping[str, Any]:
        return {**self._inner.describe(), "reference": {"mode": "resident", **self._reference.describe()}}

    def close(self) -> None:
        self._inner.close()
        self._reference.close()

    def _notes(self, step: Step, reference: StepOutput, candidate: StepOutput) -> Notes:
        notes_T = np.zeros(len(step.targets), COMPARED)
        if not step.targets:
            return notes_T
        found = self._divergence.compare(
            reference.logits_RV, candidate.logits_RV, reference.greedy_ids, candidate.greedy_ids
        )
        heads_T, tokens_T = heads_and_tokens(step)
        for name, values_R in found.items():
            notes_T[name] = values_R[heads_T]
        notes_T["kl_lower"] = notes_T["kl"]
        notes_T["reference_logprobs"] = reference.target_logprobs
        notes_T["reference_is_greedy"] = reference.greedy_ids[heads_T] == tokens_T
        notes_T["same_top"] = (reference.greedy_ids == candidate.greedy_ids)[heads_T]
        return notes_T


def heads_and_tokens(step: Step) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each target: the logits row, and the token; [T] each."""
    pairs_T2 = np.array(step.targets, np.int64).reshape(-1, 2)
    return pairs_T2[:, 0], pairs_T2[:, 1]
