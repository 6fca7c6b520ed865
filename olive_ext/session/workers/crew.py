"""Hands chunks to workers, each the next one when it is free; what a lost worker held is run
again. A chunk that costs two workers is halved, until the request that does it is named.

Knows no text, and not where the workers are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from olive_ext.engine.requests import Counters, Lost, Request, Result
from olive_ext.errors import OliveExtError, RunError, WorkerError, one_line
from olive_ext.session.executor import OnChunk
from olive_ext.session.workers.feed import Feed, Piece
from olive_ext.session.workers.served_model import Reply, Served, to_send
from olive_ext.session.workers.worker import Worker, WorkerLostError

logger = logging.getLogger(__name__)

PAUSES_S = (0.0, 1.0, 4.0)
"""Before each opening of a lost worker, which is given up behind the last: what a killed process held is not free at
once, and no other can be started until it is."""

_JOIN_S = 0.5

Told = tuple[Worker, Piece | None, Reply | BaseException]
"""What a worker's thread tells: the reply to a piece, or what was raised instead; of no piece what ended the thread."""


class _Call:
    """One call of `Crew.run`: what is waiting, and what the threads of the workers tell."""

    def __init__(self, which: str, feed: Feed) -> None:
        self.which = which
        self.feed = feed
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.is_over = threading.Event()
        """Set once no worker is to be opened for it any more."""

        self.threads: list[threading.Thread] = []
        self.num_gone = 0
        """Threads whose worker cannot be opened again."""


class Crew:
    """Open workers. One call at a time. Their threads drive them and tell; the thread of the call counts."""

    def __init__(self, workers: Sequence[Worker], pauses_s: Sequence[float] = PAUSES_S) -> None:
        """Opens all of them together. Raises the first error of opening; those that were opened are ended then."""
        self.workers = list(workers)
        self._pauses_s = pauses_s
        self.num_lost = 0
        self.unlike: dict[str, str] = {}
        """What is other of a worker that was opened again than of the first: its numbers may differ by rounding."""

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

    @property
    def at_work(self) -> str:
        """How many workers are open and, where any were, lost so far: "3 of 4 workers, 2 lost". Those that are back
        count among both. Nothing of a single worker, as long as it has not been lost."""
        count = len(self.workers)
        lost = f", {self.num_lost} lost" if self.num_lost else ""
        return f"{count - len(self._closed)} of {count} workers{lost}" if lost or count > 1 else ""

    def executions(self, which: str) -> list[Mapping[str, Any]]:
        """What the workers have told of their executions behind their latest chunks; at first, when they opened."""
        told = [self._executions.get(f"{worker.name} {which}") for worker in self.workers]
        return [latest for latest in told if latest] or [self.served.models[which].execution]

    def run(self, which: str, chunks: Iterable[Sequence[Request]], done: OnChunk) -> None:
        """Runs all chunks; `done(number, results)` is called from here as each is complete, and `chunks` is read from
        here. Raises what a model raises, and `RunError` where no worker is left."""
        call = _Call(which, Feed(chunks, len(self.workers)))
        try:
            self._collect(call, done)
        except BaseException:
            call.is_over.set()
            self.stop()  # whatever a worker is doing
            raise
        finally:
            call.is_over.set()
            call.feed.end(len(call.threads))
            for thread, worker in zip(call.threads, self.workers, strict=False):
                self._join(thread, worker)

    def call(self, which: str, name: str) -> list[Any]:
        """The method `name` of the executor of every worker that is open. One that turns out to be lost has nothing to
        be asked for: the next `run` opens it again."""
        found: list[Any] = []
        for worker in [worker for worker in self.workers if worker.name not in self._closed]:
            with self._noting_loss(worker):
                found.append(worker.call(which, name))
        return found

    def stop(self) -> None:
        """Ends all workers; they are opened again where `run` follows."""
        for worker in self.workers:
            self._closed.add(worker.name)
            self._retire_counters(worker)
            worker.stop()

    def _join(self, thread: threading.Thread, worker: Worker) -> None:
        """Waits for a worker's thread. A worker that is still being opened, for which a cluster may never have room
        again, is not waited for: the next call opens it."""
        was_stopped = False
        while thread.is_alive():
            if worker.name in self._closed:
                worker.stop()
                was_stopped = True
            thread.join(_JOIN_S)
        if was_stopped:  # however far it had come
            self._closed.add(worker.name)

    def _open_all(self) -> list[Served]:
        """Opens all workers together."""
        found: list[Any] = [None] * len(self.workers)

        def open_one(place: int) -> None:
            try:
                found[place] = self.workers[place].open()
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                found[place] = error

        threads = [threading.Thread(target=open_one, args=(place,), daemon=True) for place in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker, served in zip(self.workers, found, strict=True):
            if isinstance(served, OliveExtError):
                raise served
            if isinstance(served, WorkerLostError):
                raise WorkerError(f"{worker.name} {served} while it opened the model{served.advice}") from served
            if isinstance(served, BaseException):
                raise WorkerError(f"{worker.name} cannot be started: {one_line(served)}") from served
        return found

    def _collect(self, call: _Call, done: OnChunk) -> None:
        """Reads chunks, and between them takes in what workers tell, until every chunk is complete."""
        while True:
            was_read = call.feed.read()
            if not call.feed.has_work:
                return
            if was_read and not call.threads:
                self._start(call)
            try:
                told = call.told.get(block=not was_read)
            except queue.Empty:
                continue
            self._take_in(call, told, done)

    def _start(self, call: _Call) -> None:
        """All of them, however little there is to do: those that begin may be lost, or not come up."""
        for worker in self.workers:
            thread = threading.Thread(target=self._work, args=(worker, call), name=worker.name, daemon=True)
            call.threads.append(thread)
        for thread in call.threads:
            thread.start()

    def _take_in(self, call: _Call, told: Told, done: OnChunk) -> None:
        """What a worker tells of a piece; of none where it cannot be opened again."""
        worker, piece, outcome = told
        if piece is None:
            assert isinstance(outcome, BaseException)
            logger.warning("%s", outcome)
            call.num_gone += 1
            if call.num_gone == len(call.threads):
                raise outcome
            return
        results: Sequence[Result | Lost]
        if isinstance(outcome, WorkerLostError):
            self._retire_counters(worker)
            results = self._again(call, piece, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            self._latest[f"{worker.name} {call.which}"] = Counters(**outcome.counters)
            self._executions[f"{worker.name} {call.which}"] = outcome.execution
            results = outcome.results
        if results and (complete := call.feed.complete(piece, results)) is not None:
            done(piece.chunk, complete)

    def _again(self, call: _Call, piece: Piece, error: WorkerLostError) -> Sequence[Lost]:
        """Puts back what a lost worker held: whole the first time, halved from then on. Of one request alone nothing is
        left to try."""
        self.num_lost += 1
        if not piece.num_kills:
            logger.warning("a worker %s; its %d requests are run again", error, len(piece.places))
            call.feed.put_back(replace(piece, num_kills=1))
            return ()
        if len(piece.places) == 1:
            logger.error("a request is given up: each worker that ran it %s", error)
            return (Lost(f"each worker that ran it {error}"),)
        logger.warning("another worker %s; its %d requests are run in halves", error, len(piece.places))
        call.feed.put_back(*piece.halves())
        return ()

    def _work(self, worker: Worker, call: _Call) -> None:
        """A worker's thread: one piece after the other; a worker that was lost is opened anew. Whatever ends it is
        told."""
        piece: Piece | None = None
        try:
            if worker.name in self._closed:
                self._reopen(worker, call)
            while (taken := call.feed.take()) is not None:
                piece, requests = taken
                try:
                    reply = worker.run(call.which, [to_send(request) for request in requests])
                except WorkerLostError as error:
                    self._closed.add(worker.name)
                    call.told.put((worker, piece, error))
                    piece = None
                    self._reopen(worker, call)
                else:
                    call.told.put((worker, piece, reply))
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the call
            call.told.put((worker, piece, error))
        except BaseException as error:  # noqa: BLE001 - as that, where it would end this thread alone
            call.told.put((worker, piece, RunError(f"{worker.name}: {one_line(error)}")))

    def _reopen(self, worker: Worker, call: _Call) -> None:
        """Opens a lost worker. Raises `WorkerError` where that fails again and again."""
        problem: object = "it was stopped"
        for pause in self._pauses_s:
            if call.is_over.wait(pause):
                break
            try:
                self._compare(worker, worker.open())
            except (OliveExtError, WorkerLostError) as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - of the machine, which may have room again
                problem = one_line(error)
            else:
                self._closed.discard(worker.name)
                logger.warning("%s is open again", worker.name)
                return
        raise WorkerError(f"{worker.name} cannot be started again: {problem}")

    @contextmanager
    def _noting_loss(self, worker: Worker) -> Iterator[None]:
        try:
            yield
        except WorkerLostError as error:
            self._closed.add(worker.name)
            self._retire_counters(worker)
            logger.warning("%s %s", worker.name, error)

    def _compare(self, worker: Worker, served: Served) -> None:
        """Notes a worker that is open again, on another node or with less memory, and does not work as the first."""
        self.unlike.pop(worker.name, None)
        for which, first in self.served.models.items():
            if (own := served.models[which]).num_slots != first.num_slots:
                self.unlike[worker.name] = f"room for {own.num_slots} sequences, at first {first.num_slots}"
                logger.warning(
                    "%s has %s, so that its numbers may differ by rounding: set 'engine.num_slots'",
                    worker.name,
                    self.unlike[worker.name],
                )

    def _retire_counters(self, worker: Worker) -> None:
        """Keeps what a worker has counted: it begins anew where it is opened again."""
        for name in [name for name in self._latest if name.startswith(f"{worker.name} ")]:
            self._counted = _sum([self._counted, self._latest.pop(name)])


def _sum(counters: Sequence[Counters]) -> Counters:
    return Counters(**{name: sum(getattr(item, name) for item in counters) for name in vars(Counters())})
