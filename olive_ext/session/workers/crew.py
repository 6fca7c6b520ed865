"""Reads chunks ahead of open workers and drives the workers: each gets the next chunk when it is free, and the chunk of
a lost worker runs again. A chunk that costs two workers runs request by request; requests that cost one more are
reported. `open_crew` opens the workers of a resolved model, and a `WorkerPool` is a session's executor on them.

Knows no text, and not where the workers are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from olive_ext.config import ModelSettings
from olive_ext.config.model import WorkerSettings
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Lost, Request, Result
from olive_ext.engine.scheduling.prefix_tree import predicted_tokens
from olive_ext.errors import OliveExtError, RunError, WorkerError, counted, one_line
from olive_ext.model import ResolvedModel
from olive_ext.python_processes import usable_processors
from olive_ext.records import Records
from olive_ext.registry import hook
from olive_ext.session.answer_journal import ChunkResults, Executor
from olive_ext.session.local import RecordTo
from olive_ext.session.tokenizer import Tokenizer
from olive_ext.session.workers.worker import OWN, ProcessWorker, Served, Watchdog, Worker, WorkerJob, WorkerLostError

logger = logging.getLogger(__name__)

AHEAD = 4
"""The most chunks that wait for each worker: at the end of a call the largest of these begin first."""

HELD_TOKENS = 1 << 24
"""About the most tokens of requests that are read and not complete: some 300 MB. One chunk is read whatever its size.
"""

MOST_GUILTY = 4
"""After so many requests of a chunk have each cost a worker alone, the rest is given up: each opening takes time."""

_OVERHEAD_TOKENS = 128
"""A request takes as much memory as so many tokens, besides its own tokens."""


@dataclass(eq=False)
class Chunk:
    """Requests that run together, or one by one after they have cost two workers."""

    number: int
    requests: Sequence[Request]
    num_lost: int = 0
    """The number of workers that were lost while they ran it."""

    results: list[Result | Lost] = field(default_factory=list)
    """The results of its first requests."""

    @property
    def next(self) -> Sequence[Request]:
        """The requests that a worker is asked next."""
        begin = len(self.results)
        return self.requests[begin : begin + 1] if self.num_lost > 1 else self.requests

    @property
    def is_complete(self) -> bool:
        """Whether every request has its result."""
        return len(self.results) == len(self.requests)

    def lose(self, how: str) -> None:
        """Notes that a worker was lost. A request that it ran alone, and that has cost a worker before, is given up;
        all others with it if `MOST_GUILTY` have."""
        is_guilty = self.num_lost > 0 and len(self.next) == 1
        self.num_lost += 1
        if not is_guilty:
            logger.warning("a worker %s; its chunk is run again", how)
            return
        reason = f"each worker that ran it {how}"
        num_guilty = 1 + sum(isinstance(result, Lost) for result in self.results)
        count = len(self.requests) - len(self.results) if num_guilty >= MOST_GUILTY else 1
        self.results += [Lost(reason)] * count
        logger.error("%s given up: %s", counted(count, "request is", "requests are"), reason)

    @cached_property
    def held_tokens(self) -> int:
        """About what it takes in memory."""
        return sum(len(request.tokens) + _OVERHEAD_TOKENS for request in self.requests)


class ChunkFeed:
    """The chunks of one call, and their progress. Workers' threads call `take`, `put` and `leave`; everything else is
    for the calling thread.

    Chunks are handed out in order, so that early ones are complete first, and dropped. When no more chunks follow, the
    largest is handed out first, so that the workers end together. A chunk that cost a worker comes last.
    """

    def __init__(self, chunks: Iterable[Sequence[Request]], num_workers: int) -> None:
        self._source = enumerate(chunks)
        self._num_workers = num_workers
        self._open: list[Chunk] = []
        self._has_more = True
        self._waiting: list[Chunk] = []
        self._changed = threading.Condition()
        self.outcomes: queue.SimpleQueue[Chunk | BaseException] = queue.SimpleQueue()
        """Complete chunks, and what ends the call."""

        self.is_over = threading.Event()
        """Set when no more workers may be opened for the call."""

    @property
    def has_work(self) -> bool:
        """Whether a chunk is not complete yet."""
        return self._has_more or bool(self._open)

    def read(self) -> Chunk | None:
        """Reads the next chunk; None where there is no room for it, or none is left."""
        has_room = len(self._waiting) < AHEAD * self._num_workers
        if not self._has_more or not has_room or sum(chunk.held_tokens for chunk in self._open) >= HELD_TOKENS:
            return None
        number, requests = next(self._source, (0, None))
        if requests is None:
            self._has_more = False
            return None
        chunk = Chunk(number, requests)
        self._open.append(chunk)
        self.put(chunk)
        return chunk

    def take(self) -> Chunk | None:
        """Waits for a chunk; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_over.is_set())
            if self.is_over.is_set():
                return None
            chunk = min(self._waiting, key=self._order)
            self._waiting.remove(chunk)
            return chunk

    def put(self, chunk: Chunk) -> None:
        """Has a chunk computed, as far as it is not: an empty one is complete."""
        if chunk.is_complete:
            self.outcomes.put(chunk)
            return
        with self._changed:
            self._waiting.append(chunk)
            self._changed.notify()

    def leave(self, error: WorkerError) -> None:
        """Notes that a worker takes no more chunks; if none is left, its error ends the call."""
        if self.is_over.is_set():
            return
        logger.warning("%s", error)
        with self._changed:
            self._num_workers -= 1
            if not self._num_workers:
                self.outcomes.put(error)

    def complete(self, chunk: Chunk) -> ChunkResults:
        """Drops a complete chunk; returns its number and results."""
        self._open.remove(chunk)
        return chunk.number, chunk.results

    def end(self) -> None:
        """Makes `take` return None from now on."""
        self.is_over.set()
        with self._changed:
            self._changed.notify_all()

    def _order(self, chunk: Chunk) -> tuple[bool, int, int]:
        first = 0 if self._has_more else -predicted_tokens(chunk.requests)
        return chunk.num_lost > 0, first, chunk.number


PAUSES_S = (0.0, 1.0, 4.0)
"""Seconds before each opening of a lost worker, which is given up after the last: the memory of a killed process is not
free at once, and no other worker can be started until it is."""

_JOIN_S = 0.5


class Crew:
    """Open workers. One call at a time. Their threads drive them, and count."""

    def __init__(self, workers: Sequence[Worker], pauses_s: Sequence[float] = PAUSES_S) -> None:
        """Opens all of them together. Raises the first error of opening; those that were opened are ended then."""
        self.workers = list(workers)
        self._pauses_s = pauses_s
        self._lock = threading.RLock()
        self.num_lost = 0
        self.counters = Counters()
        """The counters of all workers together, also of those that were lost."""

        self._executions: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._closed: set[str] = set()
        try:
            self.served = self._open_all()
        except BaseException:
            self.stop()
            raise

    @property
    def at_work(self) -> str:
        """How many workers are open and, if any were lost, how many so far: "3 of 4 workers, 2 lost". Workers that are
        back count in both. Empty for a single worker that has not been lost."""
        count = len(self.workers)
        lost = f", {self.num_lost} lost" if self.num_lost else ""
        return f"{count - len(self._closed)} of {count} workers{lost}" if lost or count > 1 else ""

    def executions(self, which: str) -> list[Mapping[str, Any]]:
        """The workers' executions after their latest chunks; before any chunk, the first worker's as it opened."""
        latest = [self._executions.get((worker.name, which)) for worker in self.workers]
        return [execution for execution in latest if execution] or [self.served.models[which].execution]

    def run(self, which: str, chunks: Iterable[Sequence[Request]]) -> Iterator[ChunkResults]:
        """Runs all chunks; yields the number and the results of each when it is complete. `chunks` is read in the
        thread that reads the results; if that stops early, all workers end. All workers' threads start with the first
        request, however little there is to do, because workers may be lost or not come up. Raises what a model raises,
        and `RunError` where no worker is left."""
        feed, threads = ChunkFeed(chunks, len(self.workers)), list[threading.Thread]()
        try:
            while (chunk := feed.read()) is not None or feed.has_work:
                if chunk is not None and chunk.requests and not threads:
                    threads.extend(_started(worker, self._work, worker, which, feed) for worker in self.workers)
                try:
                    outcome = feed.outcomes.get(block=chunk is None)
                except queue.Empty:
                    continue
                if isinstance(outcome, BaseException):
                    raise outcome
                yield feed.complete(outcome)
        except BaseException:
            feed.end()
            self.stop()  # whatever a worker is doing
            raise
        finally:
            feed.end()
            for thread, worker in zip(threads, self.workers, strict=False):
                self._join(thread, worker)

    def release_memory(self, which: str) -> None:
        """Frees what has grown with use on every open worker; a lost one is opened again by the next `run`."""
        for worker in [worker for worker in self.workers if worker.name not in self._closed]:
            try:
                worker.release_memory(which)
            except WorkerLostError as error:  # noqa: PERF203 - the other workers are asked all the same
                self._closed.add(worker.name)
                logger.warning("%s %s", worker.name, error)

    def stop(self) -> None:
        """Ends all workers; a later `run` opens them again."""
        for worker in self.workers:
            self._closed.add(worker.name)
            worker.stop()

    def _open_all(self) -> Served:
        """Opens all workers together; the facts of the first one's models."""
        opened: dict[str, Any] = {}

        def open_one(worker: Worker) -> None:
            try:
                opened[worker.name] = worker.open()
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                opened[worker.name] = error

        for thread in [_started(worker, open_one, worker) for worker in self.workers]:
            thread.join()
        first: Served = opened[self.workers[0].name]
        for name, served in [(worker.name, opened[worker.name]) for worker in self.workers]:
            if isinstance(served, OliveExtError):
                raise served
            if isinstance(served, WorkerLostError):
                raise WorkerError(f"{name} {served} while it opened the model{served.advice}") from served
            if isinstance(served, BaseException):
                raise WorkerError(f"{name} cannot be started: {one_line(served)}") from served
            served.refuse_unlike(name, first)
        return first

    def _work(self, worker: Worker, which: str, feed: ChunkFeed) -> None:
        """A worker's thread: it runs chunk after chunk, opens a lost worker anew, and reports whatever ends it."""
        try:
            while self._is_open(worker, feed) and (chunk := feed.take()) is not None:
                self._run_chunk(worker, which, feed, chunk)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the call
            ended = error if isinstance(error, Exception) else RunError(f"{worker.name}: {one_line(error)}")
            feed.outcomes.put(ended)

    def _run_chunk(self, worker: Worker, which: str, feed: ChunkFeed, chunk: Chunk) -> None:
        """Runs a chunk until it is complete, or the worker is lost. After the end of the call nothing is counted."""
        while not chunk.is_complete:
            reply, problem = None, ""
            try:
                reply = worker.run(which, chunk.next)
            except WorkerLostError as error:
                if worker.name in self._closed:  # it was stopped: whoever called is closing everything
                    raise RunError(f"{worker.name} {error}") from error
                problem = str(error)
                self._closed.add(worker.name)
            with self._lock:
                if feed.is_over.is_set():
                    return
                if reply is None:
                    self.num_lost += 1
                    chunk.lose(problem)
                    break
                counted = vars(self.counters).items()
                self.counters = Counters(**{name: count + reply.counters[name] for name, count in counted})
                self._executions[worker.name, which] = reply.execution
            chunk.results += reply.results
        feed.put(chunk)

    def _is_open(self, worker: Worker, feed: ChunkFeed) -> bool:
        """Whether the worker is open. A lost one is opened anew; if that fails again and again, it leaves the call."""
        if worker.name not in self._closed:
            return True
        problem: object = "it was stopped"
        for pause in self._pauses_s:
            if feed.is_over.wait(pause):
                break
            try:
                worker.open().refuse_unlike(worker.name, self.served)
            except (OliveExtError, WorkerLostError) as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - of the machine, which may have room again
                problem = one_line(error)
            else:
                self._closed.discard(worker.name)
                logger.warning("%s is open again", worker.name)
                return True
        feed.leave(WorkerError(f"{worker.name} cannot be started again: {problem}"))
        return False

    def _join(self, thread: threading.Thread, worker: Worker) -> None:
        """Waits for a worker's thread. A worker that is still being opened is ended; the next call opens it again."""
        was_stopped = False
        while thread.is_alive():
            if worker.name in self._closed:
                worker.stop()
                was_stopped = True
            thread.join(_JOIN_S)
        if was_stopped:  # however far it had come
            self._closed.add(worker.name)


def _started(worker: Worker, target: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=worker.name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        why = f"the machine starts no thread ({error}): close other programs, or set fewer 'workers'"
        raise WorkerError(f"{worker.name} cannot be driven, because {why}") from error
    return thread


WINDOW_CHUNKS = 8
"""Requests of a stream that are planned together, for each worker and in multiples of its slots."""

_COUNTS = ("s_encoded", "_cache_hits", "s_evicted", "encoder_runs", "_late")
"""The endings of facts that count a worker's work: those of all workers are added."""


class WorkerPool(Executor):
    """One of the models that `crew` has open."""

    context_length = num_slots = 0

    def __init__(self, crew: Crew, which: str = OWN) -> None:
        self._crew, self._which, facts = crew, which, crew.served.models[which]
        self.context_length, self.num_slots = facts.context_length, facts.num_slots

    @property
    def counters(self) -> Counters:
        """The counters of all workers together."""
        return self._crew.counters

    @property
    def at_work(self) -> str:
        """See `Crew.at_work`."""
        return self._crew.at_work

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[ChunkResults]:
        """Runs each chunk on whichever worker is free."""
        return self._crew.run(self._which, ([request for _, request in items] for items in chunks))

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """Runs the items that are there, up to a few times what the slots of all workers hold; then reads on."""
        most = WINDOW_CHUNKS * self.num_slots * len(self._crew.workers)
        window: list[KeyedRequest] = []
        for item in chain(items, [None]):
            if item is not None:
                window.append(item)
            if window and (item is None or len(window) >= most):
                yield from list(self.run_slices([window]))  # all of them: who stops reading ends no worker
                window = []

    def release_memory(self) -> None:
        """Frees what has grown with use, on every worker."""
        self._crew.release_memory(self._which)

    def describe(self) -> dict[str, Any]:
        """The facts of a worker's execution, of one whose trial failed if there is one, and the number of workers."""
        names = [worker.name for worker in self._crew.workers]
        executions = self._crew.executions(self._which)
        first = max(executions, key=lambda one: "parts_failure" in one)
        counts = {name: sum(one.get(name, 0) for one in executions) for name in first if name.endswith(_COUNTS)}
        counters = [execution.get("counters", {}) for execution in executions]
        others = counters[0].keys() - vars(Counters()).keys()  # the engine's own are live: `counters`
        summed = {name: sum(counter[name] for counter in counters) for name in others}
        workers = {"names": names, "lost": self._crew.num_lost}
        return {**first, **counts, "counters": summed, "workers": workers}

    def close(self) -> None:
        """Ends the workers."""
        self._crew.stop()


def open_crew(
    model: ResolvedModel,
    reference: ResolvedModel | Records | None,
    record_to: RecordTo | None,
    tokenizers: Sequence[Tokenizer | None],
) -> Crew:
    """The open workers that the settings of `model` ask for. Records are written by one worker alone. `tokenizers` are
    for workers on this machine."""
    wanted, limit_s = model.settings.workers, model.settings.step_timeout
    if wanted is None:
        job = replace(_job_of(model, reference, record_to, 1), tokenizers=tokenizers)
        return Crew([ProcessWorker(job, Watchdog(limit_s))])
    count = 1 if record_to is not None else wanted.count
    job = _job_of(model, reference, record_to, count if wanted.address is None else 1)
    return Crew(hook("workers", "'workers'")(job, wanted, [Watchdog(limit_s) for _ in range(count)]))


def _job_of(
    model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: RecordTo | None, share: int
) -> WorkerJob:
    """The job of each of `share` workers on this machine: the model's settings, with the machine's threads divided.
    Their number decides how much memory each may take."""
    other: Mapping[str, Any] | str | None = None
    digests = [model.digest, None]
    if isinstance(reference, Records):
        other = str(reference.folder.resolve())
    elif reference is not None:
        other, digests[1] = _settings(reference, share), reference.digest
    return WorkerJob(_settings(model, share), other, record_to, digests=digests)


def _settings(model: ResolvedModel, share: int) -> dict[str, Any]:
    engine = model.settings.engine
    if share > 1 and engine.num_threads == "auto":
        engine = engine.model_copy(update={"num_threads": max(1, (usable_processors() or 1) // share)})
    given = {
        "deterministic": model.settings.deterministic is not False,
        "isolation": "none",
        "workers": WorkerSettings(count=share) if share > 1 else None,
        "tokenizer": model.files.tokenizer,
        "engine": engine,
    }
    settings: ModelSettings = model.settings.model_copy(update=given)
    return settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
