"""Requests in, results out: plans them, drives the scheduler and the runner until nothing is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from itertools import islice
from typing import Any

from olive_ext.engine.oom_split import halve, joined, num_tokens
from olive_ext.engine.requests import Request, Result
from olive_ext.engine.scheduling.counters import Counters
from olive_ext.engine.scheduling.prefix_tree import Plan, make_plan
from olive_ext.engine.scheduling.scheduler import UNLIMITED, Scheduler, room_of
from olive_ext.engine.scheduling.scoring_form import ScoringSteps
from olive_ext.engine.scheduling.sequences import Answer
from olive_ext.engine.scheduling.shared_prefix import CELLS_PER_POSITION, FIRST_CELL
from olive_ext.engine.scheduling.step_thread import StepThread
from olive_ext.engine.step import Runner, Step, StepOutput
from olive_ext.errors import MemoryShortageError, OliveExtError, RunError
from olive_ext.model.free_memory import trim_host_memory
from olive_ext.model.types import SourceKind

logger = logging.getLogger(__name__)

WINDOW_PER_SLOT = 16
"""Requests that `run_continuous` plans together, for each slot: enough to share prefixes, few enough to stream."""


class Engine:
    """Runs requests on one runner. Not thread-safe: one call at a time."""

    def __init__(
        self,
        runner: Runner,
        chunk_size: int,
        steps: ScoringSteps | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self._runner = runner
        self._chunk_size = chunk_size
        self._steps = steps or ScoringSteps(runner, chunk_size, "engine.chunk_size")
        self._limit = UNLIMITED
        self._scheduler = self._new_scheduler()
        self._thread = StepThread(runner.run)
        self._begun: Future[StepOutput] | None = None
        self._is_closed = False

    @property
    def runner(self) -> Runner:
        """What it drives."""
        return self._runner

    @property
    def chunk_size(self) -> int:
        """Most tokens fed in one step."""
        return self._chunk_size

    @property
    def context_length(self) -> int:
        """Positions that a sequence may occupy at most."""
        return self._runner.context_length

    @property
    def host_bytes(self) -> int:
        """Bytes that have crossed from the device to the host."""
        return self._runner.host_bytes

    @property
    def source_kind(self) -> SourceKind | None:
        """What the encoder of an encoder-decoder takes; None where there is none."""
        return self._runner.source_kind

    def run(self, requests: Sequence[Request], on_result: Callable[[int, Result], None] | None = None) -> list[Result]:
        """Results in the order of `requests`; `on_result(index, result)` is called as each becomes complete."""
        results: dict[int, Result] = {}
        with _Guard(self):
            self._admit_all(list(enumerate(requests)))
            while self._scheduler.has_work:
                for answer in self._step():
                    index = answer.key
                    assert isinstance(index, int)
                    results[index] = answer.result()
                    if on_result is not None:
                        on_result(index, results[index])
        return [results[index] for index in range(len(requests))]

    def run_continuous(self, items: Iterable[tuple[Hashable, Request] | None]) -> Iterator[tuple[Hashable, Result]]:
        """`(key, result)` pairs in the order in which they complete. `items` is read as far ahead as one plan needs.

        None among them means that no more is there for now: what has been read runs, and `items` is read again when all
        of it has a slot.
        """
        source = iter(items)
        window = WINDOW_PER_SLOT * self._runner.num_slots
        with _Guard(self):
            batch = _read(source, window)
            while batch is not None or self._scheduler.has_work:
                if batch is not None and self._scheduler.num_waiting == 0 and self._fits(batch):
                    if batch:
                        self._admit_all(batch)
                    batch = _read(source, window)
                for answer in self._step() if self._scheduler.has_work else ():
                    yield answer.key, answer.result()

    def reset(self) -> None:
        """Forgets what is resident and what is in flight; the model stays open."""
        self._begun = None
        self._scheduler = self._new_scheduler()
        self._thread.settle()

    def release_memory(self) -> None:
        """`reset`, and frees what has grown with use; the next run allocates it anew."""
        self.reset()
        self._runner.release_memory()
        self._scheduler = self._new_scheduler()
        trim_host_memory()

    def close(self) -> None:
        """Releases the model. Calling it again does nothing."""
        if not self._is_closed:
            self._thread.close()  # nothing may run on what is released
            self._is_closed = True
            self._runner.close()

    def describe(self) -> dict[str, Any]:
        """Facts of the execution, stable in name."""
        counters = {**asdict(self.counters), "host_bytes": self.host_bytes}
        chunks = {"chunk_size": self._chunk_size, **self._steps.describe()}
        if self._limit < UNLIMITED:
            chunks["step_limit"] = self._limit
        return {**chunks, **self._runner.describe(), "counters": counters}

    def _fits(self, batch: list[tuple[Hashable, Request]]) -> bool:
        """Room can only be made while nothing runs."""
        slots, cells = self._needed([request for _, request in batch])
        has_room = slots <= self._runner.capacity and cells <= self._runner.shared_prefix_capacity
        return has_room or not self._scheduler.has_work

    def _admit_all(self, items: Sequence[tuple[Hashable, Request]]) -> None:
        for key, request in items:
            _check(key, request, self.context_length)
            self._runner.check_source(request.source)
        plan: Plan = make_plan(items, can_share=self._runner.chunked_prefill)
        if not self._scheduler.has_work and self._steps.choose(plan):
            self.reset()  # what was timed has written into the trunk
        self._reserve([request for _, request in items])
        self.counters.requests += len(items)
        self.counters.tokens_naive += plan.tokens_naive
        self.counters.tokens_distinct += plan.tokens_distinct
        self._scheduler.add(plan.sequences)

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Makes room for `requests`; a scheduler knows one size of slots and trunk, and one form of steps."""
        runner = self._runner
        slots, cells = self._needed(requests)
        runner.reserve(slots)
        runner.reserve_shared_prefix(cells)
        if self._scheduler.shape != room_of(runner, self._steps.size):
            self._scheduler = self._new_scheduler()

    def _needed(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Positions of a slot, and cells of the trunk."""
        if not self._steps.size:
            return _positions(requests), 0
        scored = [request for request in requests if request.generation is None]
        cells = FIRST_CELL + _positions(scored) + self._steps.size if scored else 0
        cells = min(cells, CELLS_PER_POSITION * self.context_length)
        return _positions(request for request in requests if request.generation is not None), cells

    def _step(self) -> list[Answer]:
        """Takes in one step. The one behind it begins before this one is read, where the scheduler knows it."""
        scheduler = self._scheduler
        present, self._begun = self._begun, None
        if present is None:
            scheduler.schedule()
        if (ahead := scheduler.schedule_overlapped()) is not None:
            present = present or self._thread.begin(scheduler.present)
            self._begun = self._thread.begin(ahead)
        try:
            output = self._runner.run(scheduler.present) if present is None else present.result()
        except MemoryShortageError as error:
            self._drop_overlapped()
            output = self._in_halves(scheduler.present, error)
        return scheduler.update(output)

    def _drop_overlapped(self) -> None:
        """Behind a step that failed none has run."""
        self._begun = None
        self._scheduler.drop_overlapped()
        self._thread.settle()

    def _run(self, step: Step) -> StepOutput:
        try:
            return self._runner.run(step)
        except MemoryShortageError as error:
            return self._in_halves(step, error)

    def _in_halves(self, step: Step, error: MemoryShortageError) -> StepOutput:
        """What a step finds that there is no memory for; later ones are no longer than its halves."""
        halves = halve(step, self._runner.batching)
        if halves is None:
            raise error
        first, second = halves
        self.counters.steps_halved += 1
        self._limit = min(self._limit, max(num_tokens(first), num_tokens(second)))
        self._scheduler.limit = self._limit
        logger.warning("%s; steps are cut to %d tokens", error, self._limit)
        return joined(self._run(first), self._run(second))

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self._runner, self._chunk_size, self.counters, self._steps.size)
        scheduler.limit = self._limit
        return scheduler


class _Guard:
    """Leaves the engine usable after an interruption: what was in flight is dropped, and so is what was resident."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        if self._engine._is_closed:
            raise RunError("this model is closed; open it again")
        self._engine._thread.settle()  # where an interruption was itself interrupted

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._engine.reset()


def _read(source: Iterator[tuple[Hashable, Request] | None], count: int) -> list[tuple[Hashable, Request]] | None:
    """The next items, `count` at most, up to the first None; None where there are no more."""
    found: list[tuple[Hashable, Request]] = []
    for item in islice(source, count):
        if item is None:
            return found
        found.append(item)
    return found or None


def _positions(requests: Iterable[Request]) -> int:
    return max((request.num_positions for request in requests), default=0)


def _check(key: Hashable, request: Request, context_length: int) -> None:
    if request.num_positions > context_length:
        raise OliveExtError(
            f"request {key!r} needs {request.num_positions} positions; the model has {context_length} (max_length)"
        )
