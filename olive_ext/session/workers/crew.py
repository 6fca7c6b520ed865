"""Reads chunks ahead of open workers and drives these: each gets the next chunk when it is free, and what a lost worker
held runs again. A chunk that costs two workers runs request by request, and those that cost one more are named.

Knows no text, and not where the workers are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from olive_ext.engine.requests import Counters, Lost, Request, Result
from olive_ext.engine.scheduling.prefix_tree import predicted_tokens
from olive_ext.errors import OliveExtError, RunError, WorkerError, counted, one_line
from olive_ext.session.answer_journal import ChunkResults
from olive_ext.session.workers.worker import Reply, Served, Worker, WorkerLostError, to_send

logger = logging.getLogger(__name__)

AHEAD = 4
"""Chunks that wait for each worker at most: at the end of a call the largest of those that wait begin first."""

HELD_TOKENS = 1 << 24
"""Tokens of requests that are under way at most, about: some 300 MB. One chunk is read whatever it has."""

MOST_GUILTY = 4
"""Requests of one chunk that cost a worker alone; then the rest is given up, too: each opening takes its time."""

_OVERHEAD_TOKENS = 128
"""As many tokens take the memory that a request takes besides its own."""


class ChunkFeed:
    """The chunks of one call. They are taken by the workers' threads; all else is for the thread that called.

    They are handed out in their order, so that early ones are complete first, and forgotten; once no more follow, the
    largest first, so that the workers end together. A chunk that cost a worker comes last; one that cost two is split
    into single requests, parts with numbers below zero.
    """

    def __init__(self, chunks: Iterable[Sequence[Request]], num_workers: int) -> None:
        self._source = enumerate(chunks)
        self._num_ahead = AHEAD * num_workers
        self._chunks: dict[int, Sequence[Request]] = {}
        self._num_tokens = 0
        self._has_more = True
        self._has_ended = False
        self._waiting: list[int] = []
        self._costly: set[int] = set()
        self._parts: dict[int, tuple[int, int]] = {}  # to the chunk and the place in it
        self._results: dict[int, dict[int, Result | Lost]] = {}  # of chunks that were split, by place
        self._changed = threading.Condition()

    @property
    def has_work(self) -> bool:
        """Whether a chunk is not complete yet."""
        return self._has_more or bool(self._chunks)

    @property
    def num_waiting(self) -> int:
        """Chunks that nobody has taken yet."""
        return len(self._waiting)

    def read(self) -> tuple[int, Sequence[Request]] | None:
        """Reads the next chunk, which is to be computed unless it is empty; None where there is no room for it, or none
        left."""
        is_full = self.num_waiting >= self._num_ahead or (self._chunks and self._num_tokens >= HELD_TOKENS)
        if not self._has_more or is_full:
            return None
        number, requests = next(self._source, (0, None))
        if requests is None:
            self._has_more = False
            return None
        if requests:
            self._chunks[number] = requests
            self._num_tokens += _held_tokens(requests)
            self._put(number)
        return number, requests

    def take(self) -> tuple[int, Sequence[Request]] | None:
        """Waits for a chunk, and gives its number and its requests; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            if self._has_ended:
                return None
            number = min(self._waiting, key=self._order)
            self._waiting.remove(number)
            return number, self._chunks[number]

    def put_back(self, number: int) -> bool:
        """Lets a chunk that cost a worker be taken once more, after all others, the second time request by request;
        False where a single request has cost a worker before."""
        if number in self._costly and len(self._chunks[number]) == 1:
            return False
        if number in self._costly:
            for place, request in enumerate(self._chunks.pop(number)):
                part = -1 - len(self._costly)
                self._parts[part], self._chunks[part] = (number, place), [request]
                self._costly.add(part)
                self._put(part)
            return True
        self._costly.add(number)
        self._put(number)
        return True

    def give_up(self, number: int) -> list[int]:
        """The numbers of what is given up with a single request: it alone, or all that nobody has taken of its chunk
        where `MOST_GUILTY` requests of that have cost a worker."""
        whole = self._parts.get(number, (number, 0))[0]
        num_guilty = 1 + sum(isinstance(result, Lost) for result in self._results.get(whole, {}).values())
        with self._changed:
            rest = [item for item in self._waiting if self._parts.get(item, (item, 0))[0] == whole]
            rest = rest if num_guilty >= MOST_GUILTY else []
            self._waiting = [item for item in self._waiting if item not in rest]
        return [number, *rest]

    def complete(self, number: int, results: Sequence[Result | Lost]) -> tuple[int, Sequence[Result | Lost]] | None:
        """Forgets a chunk; its number and results, of one that was split once all its parts are complete."""
        self._num_tokens -= _held_tokens(self._chunks.pop(number))
        if number not in self._parts:
            return number, results
        whole, place = self._parts.pop(number)
        self._results.setdefault(whole, {})[place] = results[0]
        if any(chunk == whole for chunk, _ in self._parts.values()):
            return None
        return whole, [result for _, result in sorted(self._results.pop(whole).items(), key=itemgetter(0))]

    def end(self) -> None:
        """Lets `take` return None from now on."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _put(self, number: int) -> None:
        with self._changed:
            self._waiting.append(number)
            self._changed.notify()

    def _order(self, number: int) -> tuple[bool, int, int]:
        first = 0 if self._has_more else -predicted_tokens(self._chunks[number])
        return number in self._costly, first, number


def _held_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.tokens) + _OVERHEAD_TOKENS for request in requests)


PAUSES_S = (0.0, 1.0, 4.0)
"""Before each opening of a lost worker, which is given up after the last: what a killed process held is not free at
once, and no other can be started until it is."""

_JOIN_S = 0.5

Outcome = tuple[Worker, int | None, Reply | BaseException]
"""What a worker's thread reports: the reply to a chunk, or what was raised instead; without a chunk what ended it."""


class _Call:
    """One call of `Crew.run`: its feed, and the outcomes of the workers' threads."""

    def __init__(self, which: str, feed: ChunkFeed) -> None:
        self.which = which
        self.feed = feed
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.is_over = threading.Event()
        """Set once no worker is to be opened for it any more."""

        self.threads: list[threading.Thread] = []
        self.num_gone = 0
        """Threads whose worker cannot be opened again."""


class Crew:
    """Open workers. One call at a time. Their threads drive them and report; the thread of the call counts."""

    def __init__(self, workers: Sequence[Worker], pauses_s: Sequence[float] = PAUSES_S) -> None:
        """Opens all of them together. Raises the first error of opening; those that were opened are ended then."""
        self.workers = list(workers)
        self._pauses_s = pauses_s
        self.num_lost = 0
        self._latest: dict[str, Counters] = {}
        self._executions: dict[str, Mapping[str, Any]] = {}
        self._retired = Counters()
        self._closed: set[str] = set()
        try:
            self.all_served = self._open_all()
        except BaseException:
            self.stop()
            raise

    @property
    def served(self) -> Served:
        """The facts of the first worker's models."""
        return self.all_served[0]

    @property
    def counters(self) -> Counters:
        """The counters of all workers together, those included that were lost."""
        return _sum([self._retired, *self._latest.values()])

    @property
    def at_work(self) -> str:
        """How many workers are open and, where any were, lost so far: "3 of 4 workers, 2 lost". Those that are back
        count among both. Nothing of a single worker, as long as it has not been lost."""
        count = len(self.workers)
        lost = f", {self.num_lost} lost" if self.num_lost else ""
        return f"{count - len(self._closed)} of {count} workers{lost}" if lost or count > 1 else ""

    def executions(self, which: str) -> list[Mapping[str, Any]]:
        """The workers' executions after their latest chunks; before any, the first worker's as it opened."""
        latest = [self._executions.get(f"{worker.name} {which}") for worker in self.workers]
        return [execution for execution in latest if execution] or [self.served.models[which].execution]

    def run(self, which: str, chunks: Iterable[Sequence[Request]]) -> Iterator[ChunkResults]:
        """Runs all chunks: the number and the results of each as it is complete. `chunks` is read in the thread that
        reads the results; where that stops early, all workers end. Raises what a model raises, and `RunError` where no
        worker is left."""
        call = _Call(which, ChunkFeed(chunks, len(self.workers)))
        try:
            yield from self._collect(call)
        except BaseException:
            call.is_over.set()
            self.stop()  # whatever a worker is doing
            raise
        finally:
            call.is_over.set()
            call.feed.end()
            for thread, worker in zip(call.threads, self.workers, strict=False):
                self._join(thread, worker)

    def call(self, which: str, name: str) -> list[Any]:
        """Calls the executor's method `name` on every open worker; a lost one is opened again by the next `run`."""
        answers: list[Any] = []
        for worker in [worker for worker in self.workers if worker.name not in self._closed]:
            try:
                answers.append(worker.call(which, name))
            except WorkerLostError as error:  # noqa: PERF203 - the other workers are asked all the same
                self._closed.add(worker.name)
                self._retire_counters(worker)
                logger.warning("%s %s", worker.name, error)
        return answers

    def stop(self) -> None:
        """Ends all workers; they are opened again where `run` follows."""
        for worker in self.workers:
            self._closed.add(worker.name)
            self._retire_counters(worker)
            worker.stop()

    def _open_all(self) -> list[Served]:
        """Opens all workers together."""
        opened: dict[str, Any] = {}

        def open_one(worker: Worker) -> None:
            try:
                opened[worker.name] = worker.open()
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                opened[worker.name] = error

        for thread in [_started(worker, open_one, worker) for worker in self.workers]:
            thread.join()
        for name, served in [(worker.name, opened[worker.name]) for worker in self.workers]:
            if isinstance(served, OliveExtError):
                raise served
            if isinstance(served, WorkerLostError):
                raise WorkerError(f"{name} {served} while it opened the model{served.advice}") from served
            if isinstance(served, BaseException):
                raise WorkerError(f"{name} cannot be started: {one_line(served)}") from served
        return [opened[worker.name] for worker in self.workers]

    def _collect(self, call: _Call) -> Iterator[ChunkResults]:
        """Reads chunks, and between them takes outcomes in, until every chunk is complete. All workers' threads start
        with the first chunk, however little there is to do: those that begin may be lost, or not come up."""
        while True:
            read = call.feed.read()
            if read is not None and not read[1]:
                yield read[0], []
                continue
            if not call.feed.has_work:
                return
            if read is not None and not call.threads:
                for worker in self.workers:
                    call.threads.append(_started(worker, self._work, worker, call))
            try:
                outcome = call.outcomes.get(block=read is None)
            except queue.Empty:
                continue
            yield from self._take_in(call, outcome)

    def _take_in(self, call: _Call, outcome: Outcome) -> Iterator[ChunkResults]:
        """Notes the outcome of a chunk, and gives the chunks that are complete now; of no chunk, that a worker cannot
        be opened again."""
        worker, number, reply = outcome
        if number is None:
            assert isinstance(reply, BaseException)
            logger.warning("%s", reply)
            call.num_gone += 1
            if call.num_gone == len(call.threads):
                raise reply
            return
        numbers, results = [number], list[Result | Lost]()
        if isinstance(reply, WorkerLostError):
            self._retire_counters(worker)
            self.num_lost += 1
            if call.feed.put_back(number):
                logger.warning("a worker %s; its chunk is run again", reply)
                return
            reason = f"each worker that ran it {reply}"
            numbers, results = call.feed.give_up(number), [Lost(reason)]
            logger.error("%s given up: %s", counted(len(numbers), "request is", "requests are"), reason)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            self._latest[f"{worker.name} {call.which}"] = Counters(**reply.counters)
            self._executions[f"{worker.name} {call.which}"] = reply.execution
            results = list(reply.results)
        for item in numbers:
            if (complete := call.feed.complete(item, results)) is not None:
                yield complete

    def _work(self, worker: Worker, call: _Call) -> None:
        """A worker's thread: chunk after chunk; a lost worker is opened anew. Whatever ends it is reported."""
        number: int | None = None
        try:
            if worker.name in self._closed:
                self._reopen(worker, call)
            while (taken := call.feed.take()) is not None:
                number, requests = taken
                try:
                    reply = worker.run(call.which, [to_send(request) for request in requests])
                except WorkerLostError as error:
                    self._closed.add(worker.name)
                    call.outcomes.put((worker, number, error))
                    number = None
                    self._reopen(worker, call)
                else:
                    call.outcomes.put((worker, number, reply))
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the call
            call.outcomes.put((worker, number, error))
        except BaseException as error:  # noqa: BLE001 - as that, where it would end this thread alone
            call.outcomes.put((worker, number, RunError(f"{worker.name}: {one_line(error)}")))

    def _reopen(self, worker: Worker, call: _Call) -> None:
        """Opens a lost worker. Raises `WorkerError` where that fails again and again."""
        problem: object = "it was stopped"
        for pause in self._pauses_s:
            if call.is_over.wait(pause):
                break
            try:
                worker.open()
            except (OliveExtError, WorkerLostError) as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - of the machine, which may have room again
                problem = one_line(error)
            else:
                self._closed.discard(worker.name)
                logger.warning("%s is open again", worker.name)
                return
        raise WorkerError(f"{worker.name} cannot be started again: {problem}")

    def _join(self, thread: threading.Thread, worker: Worker) -> None:
        """Waits for a worker's thread; one that is still being opened is ended, and opened by the next call."""
        was_stopped = False
        while thread.is_alive():
            if worker.name in self._closed:
                worker.stop()
                was_stopped = True
            thread.join(_JOIN_S)
        if was_stopped:  # however far it had come
            self._closed.add(worker.name)

    def _retire_counters(self, worker: Worker) -> None:
        """Keeps what a worker has counted: it begins anew where it is opened again."""
        for name in [name for name in self._latest if name.startswith(f"{worker.name} ")]:
            self._retired = _sum([self._retired, self._latest.pop(name)])


def _started(worker: Worker, target: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=worker.name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        why = f"the machine starts no thread ({error}): close other programs, or set fewer 'workers'"
        raise WorkerError(f"{worker.name} cannot be driven, because {why}") from error
    return thread


def _sum(counters: Sequence[Counters]) -> Counters:
    return Counters(**{name: sum(getattr(item, name) for item in counters) for name in vars(Counters())})
