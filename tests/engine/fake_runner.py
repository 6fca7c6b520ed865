"""A runner that stores token ids where a real one stores keys and values, and an oracle that shares nothing."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from olive_ext.engine.step import Batching, Row, Step, StepOutput
from olive_ext.engine.types import FinishReason, Generation, Request, Result

VOCAB = 23
GARBAGE = -7


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    """A distribution that depends on every token of the prefix."""
    seed = zlib.crc32(np.array(prefix, np.int64).tobytes())
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3


def logprobs_of(prefix: Sequence[int]) -> np.ndarray:
    logits_V = logits_of(prefix).astype(np.float64)
    return logits_V - np.log(np.exp(logits_V).sum())


class FakeRunner:
    """Holds tokens in slots, refuses what a GroupQueryAttention graph refuses, and writes garbage in idle rows."""

    def __init__(self, num_slots: int, batching: Batching, context_length: int = 512, *, can_cut: bool = True) -> None:
        self.can_cut = can_cut
        self._forks: list[set[int]] = []
        self._ends: list[int] = []
        self.num_slots = num_slots
        self.batching = batching
        self.capacity = 0
        self.context_length = context_length
        self.host_bytes = 0
        self.steps: list[Step] = []
        self._kv: list[list[int]] = []

    def reserve(self, positions: int) -> None:
        if positions > self.capacity:
            self.capacity = positions
            self._kv = [[GARBAGE] * positions for _ in range(self.num_slots)]
            self._forks = [{0} for _ in range(self.num_slots)]
            self._ends = [0] * self.num_slots

    def run(self, step: Step) -> StepOutput:
        self.steps.append(step)
        self._check(step)
        for copy in step.copies:
            self._kv[copy.target][: copy.length] = self._kv[copy.source][: copy.length]
            self._check_resumable(copy.source, copy.length)
            self._forks[copy.target], self._ends[copy.target] = {0, copy.length}, copy.length
        for row in step.rows:
            assert row.past + len(row.tokens) <= self.capacity
            self._advance(row)
            self._kv[row.slot][row.past : row.past + len(row.tokens)] = row.tokens
        prefixes = []
        for head in step.heads:
            row = step.rows[head.row]
            prefixes.append(self._kv[row.slot][: row.past + head.offset + 1])
        assert all(GARBAGE not in prefix for prefix in prefixes)
        return StepOutput(
            np.array([logprobs_of(prefixes[head])[token] for head, token in step.targets], np.float32),
            np.array([logits_of(prefix).argmax() for prefix in prefixes], np.int64),
            np.array([logits_of(prefixes[head]) for head in step.samples], np.float32).reshape(-1, VOCAB),
        )

    def _advance(self, row: Row) -> None:
        self._check_resumable(row.slot, row.past)
        self._ends[row.slot] = row.past + len(row.tokens)
        self._forks[row.slot] = {length for length in self._forks[row.slot] if length <= row.past}
        if row.is_fork:
            self._forks[row.slot].add(self._ends[row.slot])

    def _check_resumable(self, slot: int, length: int) -> None:
        """A state that cannot be cut goes on only from where it stands, or from a fork that was kept."""
        assert self.can_cut or length == self._ends[slot] or length in self._forks[slot]

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._kv = []

    def _check(self, step: Step) -> None:
        lengths = {len(row.tokens) for row in step.rows}
        slots = [row.slot for row in step.rows]
        assert len(lengths) == 1
        assert 0 not in lengths
        assert len(slots) == 1 or lengths == {1}
        assert len(set(slots)) == len(slots)
        if self.batching is Batching.SINGLE:
            assert len(slots) == 1
        if self.batching is Batching.RANGE:
            assert slots == list(range(slots[0], slots[-1] + 1))
        if self.batching is Batching.POOL:
            assert len(slots) == 1 or slots == list(range(self.num_slots))


def oracle(request: Request) -> Result:
    """The result computed from the definition, one prefix at a time."""
    tokens = list(request.tokens)
    first = len(tokens) - request.num_targets
    logprobs = tuple(float(logprobs_of(tokens[:i])[tokens[i]]) for i in range(first, len(tokens)))
    greedy = tuple(int(logits_of(tokens[:i]).argmax()) == tokens[i] for i in range(first, len(tokens)))
    if request.generation is None:
        return Result(logprobs, greedy)
    generated, reason = _generate(tokens, request.generation)
    return Result(logprobs, greedy, tuple(generated), reason)


def _generate(tokens: list[int], generation: Generation) -> tuple[list[int], FinishReason]:
    generated: list[int] = []
    while len(generated) < generation.max_new_tokens:
        token = int(logits_of(tokens + generated).argmax())
        if token in generation.stop_ids:
            return generated, FinishReason.STOP_ID
        generated.append(token)
        if generation.is_finished and generation.is_finished(generated):
            return generated, FinishReason.STOPPED
    return generated, FinishReason.LENGTH
