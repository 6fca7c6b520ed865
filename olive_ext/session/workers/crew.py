"""Hands chunks to workers, the largest first, each worker the next one when it is free; what a lost worker held is run
again. A chunk that costs two workers is halved, until the request that does it is named.

Knows no text, and not where the workers are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olive_ext.engine.requests import Counters, Request, Result
from olive_ext.engine.scheduling.chunks import predicted_tokens
from olive_ext.errors import OliveExtError, RunError
from olive_ext.session.executor import Lost
from olive_ext.session.workers.served_model import Reply, Served, to_send
from olive_ext.session.workers.worker import Worker, WorkerLostError

logger = logging.getLogger(__name__)

MAX_OPENINGS = 3
"""Times in a row that a worker may fail to open before it is given up."""

_JOIN_S = 0.5

Part = Sequence[Request]


@dataclass
class _Piece:
    """Requests of one chunk that run together: the whole chunk, or a part of one that has cost workers."""

    chunk: int
    places: Sequence[int]
    num_kills: int = 0

    def halves(self) -> Iterator[_Piece]:
        middle = len(self.places) // 2
        for places in (self.places[:middle], self.places[middle:]):
            yield _Piece(self.chunk, places, 1)


@dataclass
class _Call:
    """One call of `Crew.run`: what is waiting, and what the threads of the workers tell."""

    which: str
    chunks: Sequence[Part]
    waiting: queue.SimpleQueue[_Piece | None] = field(default_factory=queue.SimpleQueue)
    told: queue.SimpleQueue[tuple[_Piece, Any]] = field(default_factory=queue.SimpleQueue)
    is_over: bool = False
    """No worker is to be opened for it any more."""


class Crew:
    """Open workers. One call at a time."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Opens all of them together. Raises the first error of opening; those that were opened are ended then."""
        self.workers = list(workers)
        self.num_lost = 0
        self._latest: dict[str, Counters] = {}
        self._executions: dict[str, Mapping[str, Any]] = {}
        self._counted = Counters()
        self._closed: set[str] = set()
        try:
            self.all_served = self._open_all()
        except BaseException:
            self.stop()
            raise

    @property
    def served(self) -> Served:
        """What the first worker has told of its models."""
        return self.all_served[0]

    @property
    def counters(self) -> Counters:
        """What all workers have done, those included that were lost."""
        return _sum([self._counted, *self._latest.values()])

    def executions(self, which: str) -> list[Mapping[str, Any]]:
        """What the workers have told of their executions behind their latest chunks; at first, when they opened."""
        told = [self._executions.get(f"{worker.name} {which}") for worker in self.workers]
        return [latest for latest in told if latest] or [self.served.models[which].execution]

    def run(self, which: str, chunks: Sequence[Part], done: Callable[[int, Sequence[Result | Lost]], None]) -> None:
        """Runs all chunks; `done(number, results)` is called from here as each is complete. Raises what a model raises,
        and `RunError` where no worker is left."""
        call = _Call(which, chunks)
        order = sorted(range(len(chunks)), key=lambda number: -predicted_tokens(chunks[number]))
        for number in order:
            call.waiting.put(_Piece(number, range(len(chunks[number]))))
        threads = [
            threading.Thread(target=self._work, args=(worker, call), name=worker.name, daemon=True)
            for worker in self.workers[: len(chunks)]
        ]
        for thread in threads:
            thread.start()
        try:
            self._collect(call, len(threads), done)
        except BaseException:
            call.is_over = True
            self.stop()  # whatever a worker is doing
            raise
        finally:
            call.is_over = True
            for _ in threads:
                call.waiting.put(None)
            for thread, worker in zip(threads, self.workers, strict=False):
                self._join(thread, worker)

    def call(self, which: str, name: str) -> list[Any]:
        """The method `name` of the executor of every worker that is open."""
        return [worker.call(which, name) for worker in self.workers if worker.name not in self._closed]

    def stop(self) -> None:
        """Ends all workers; they are opened again where `run` follows."""
        for worker in self.workers:
            self._closed.add(worker.name)
            worker.stop()

    def _join(self, thread: threading.Thread, worker: Worker) -> None:
        """Waits for a worker's thread. Where others have done the work, a worker that is still being opened, for which
        a cluster may never have room again, is not waited for: the next call opens it."""
        while thread.is_alive():
            if worker.name in self._closed and len(self._closed) < len(self.workers):
                worker.stop()
            thread.join(_JOIN_S)

    def _open_all(self) -> list[Served]:
        """Opens all workers together."""
        found: list[Any] = [None] * len(self.workers)

        def open_one(place: int) -> None:
            try:
                found[place] = self.workers[place].open()
            except (OliveExtError, WorkerLostError) as error:
                found[place] = error

        threads = [threading.Thread(target=open_one, args=(place,), daemon=True) for place in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker, served in zip(self.workers, found, strict=True):
            if isinstance(served, WorkerLostError):
                raise RunError(f"{worker.name} {served} while it opened the model")
            if isinstance(served, OliveExtError):
                raise served
        return found

    def _collect(self, call: _Call, num_threads: int, done: Callable[[int, Sequence[Result | Lost]], None]) -> None:
        """Takes in what workers tell until every chunk is complete."""
        results: list[list[Result | Lost | None]] = [[None] * len(chunk) for chunk in call.chunks]
        left = [len(chunk) for chunk in call.chunks]
        idle = 0
        while any(left):
            piece, told = call.told.get()
            if isinstance(told, WorkerLostError):
                told = self._again(call, piece, told)
            elif isinstance(told, Exception):
                if not piece.places:  # a worker that cannot be opened again
                    idle += 1
                    logger.warning("%s", told)
                    if idle < num_threads:
                        continue
                raise told
            for place, result in zip(piece.places, told, strict=False):
                results[piece.chunk][place] = result
                left[piece.chunk] -= 1
            if told and not left[piece.chunk]:
                done(piece.chunk, [result for result in results[piece.chunk] if result is not None])
                results[piece.chunk] = []

    def _again(self, call: _Call, piece: _Piece, error: WorkerLostError) -> Sequence[Lost]:
        """Puts back what a lost worker held: whole the first time, halved from then on. Of one request alone nothing is
        left to try."""
        self.num_lost += 1
        if not piece.num_kills:
            logger.warning("a worker %s; its %d requests are run again", error, len(piece.places))
            call.waiting.put(_Piece(piece.chunk, piece.places, 1))
            return ()
        if len(piece.places) == 1:
            logger.error("a request is given up: each worker that ran it %s", error)
            return (Lost(f"each worker that ran it {error}"),)
        logger.warning("another worker %s; its %d requests are run in halves", error, len(piece.places))
        for half in piece.halves():
            call.waiting.put(half)
        return ()

    def _work(self, worker: Worker, call: _Call) -> None:
        """A worker's thread: one piece after the other; a worker that was lost is opened anew."""
        if worker.name in self._closed and not self._reopen(worker, call):
            return
        while (piece := call.waiting.get()) is not None:
            requests = [to_send(call.chunks[piece.chunk][place]) for place in piece.places]
            try:
                reply: Reply = worker.run(call.which, requests)
            except WorkerLostError as error:
                self._closed.add(worker.name)
                self._retire_counters(worker)
                call.told.put((piece, error))
                if not self._reopen(worker, call):
                    return
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the call
                call.told.put((piece, error))
                return
            else:
                self._latest[f"{worker.name} {call.which}"] = Counters(**reply.counters)
                self._executions[f"{worker.name} {call.which}"] = reply.execution
                call.told.put((piece, reply.results))

    def _reopen(self, worker: Worker, call: _Call) -> bool:
        """Opens a lost worker; False where that fails again and again."""
        problem: Exception = WorkerLostError("was stopped")
        for _ in range(MAX_OPENINGS):
            if call.is_over:
                break
            try:
                worker.open()
            except (OliveExtError, WorkerLostError) as error:
                problem = error
            else:
                self._closed.discard(worker.name)
                return True
        call.told.put((_Piece(0, ()), RunError(f"{worker.name} cannot be started again: {problem}")))
        return False

    def _retire_counters(self, worker: Worker) -> None:
        for name in [name for name in self._latest if name.startswith(f"{worker.name} ")]:
            self._counted = _sum([self._counted, self._latest.pop(name)])


def _sum(counters: Sequence[Counters]) -> Counters:
    return Counters(**{name: sum(getattr(item, name) for item in counters) for name in vars(Counters())})
