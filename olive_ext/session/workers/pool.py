"""Workers as a session's executor: `WorkerPool` runs what an engine runs, in chunks. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from olive_ext.engine.requests import Counters, Lost, Request, Result
from olive_ext.errors import LostRequestsError
from olive_ext.session.answer_journal import run_in_chunks
from olive_ext.session.executor import OnChunk
from olive_ext.session.workers.crew import Crew
from olive_ext.session.workers.served_model import OWN

WINDOW_CHUNKS = 8
"""Requests of a stream that are planned together, in generations of all slots, for each worker."""

_COUNTS = ("s_encoded", "_cache_hits", "s_evicted", "encoder_runs", "_late")
"""How facts that count what a worker has done end: those of all workers are added."""


class WorkerPool:
    """One of the models that `crew` has open."""

    def __init__(self, crew: Crew, which: str = OWN) -> None:
        self._crew = crew
        self._which = which
        self._facts = crew.served.models[which]

    @property
    def context_length(self) -> int:
        """Positions that a scored sequence may occupy at most."""
        return self._facts.context_length

    @property
    def num_slots(self) -> int:
        """Sequences that one worker decodes together at most."""
        return self._facts.num_slots

    @property
    def counters(self) -> Counters:
        """The counters of all workers together."""
        return self._crew.counters

    needs_chunks = True

    @property
    def at_work(self) -> str:
        """See `Crew.at_work`."""
        return self._crew.at_work

    def run(self, requests: Sequence[Request], on_result: Callable[[int, Result], None]) -> None:
        """Runs all requests, in chunks. Raises `LostRequestsError` behind all others where some have no result."""
        lost: dict[int, str] = {}

        def take(place: int, result: Result | Lost) -> None:
            if isinstance(result, Lost):
                lost[place] = result.reason
            else:
                on_result(place, result)

        run_in_chunks(self, [(requests, take)], None)
        if lost:
            raise LostRequestsError(lost)

    def run_chunks(self, chunks: Iterable[Sequence[Request]], done: OnChunk) -> None:
        """Runs each chunk on whichever worker is free."""
        self._crew.run(self._which, chunks, done)

    def run_continuous(self, items: Iterable[tuple[Hashable, Request] | None]) -> Iterator[tuple[Hashable, Result]]:
        """Runs what is there, up to what the slots of all workers are filled with some times over; then reads on."""
        most = WINDOW_CHUNKS * self.num_slots * len(self._crew.workers)
        window: list[tuple[Hashable, Request]] = []
        for item in items:
            if item is not None:
                window.append(item)
            if window and (item is None or len(window) >= most):
                yield from self._answer(window)
                window = []
        yield from self._answer(window)

    def reset(self) -> None:
        """Nothing: a chunk begins from an empty cache."""

    def release_memory(self) -> None:
        """Frees what has grown with use, on every worker."""
        self._crew.call(self._which, "release_memory")

    def describe(self) -> dict[str, Any]:
        """The facts of a worker's execution, and how many workers there are."""
        names = [worker.name for worker in self._crew.workers]
        told = self._crew.executions(self._which)
        counts = {name: sum(one.get(name, 0) for one in told) for name in told[0] if name.endswith(_COUNTS)}
        own = [one.get("counters", {}) for one in told]
        others = own[0].keys() - vars(Counters()).keys()  # the engine's own are live: `counters`
        counters = {name: sum(one[name] for one in own) for name in others}
        unlike = {"unlike": dict(self._crew.unlike)} if self._crew.unlike else {}
        workers = {"names": names, "lost": self._crew.num_lost, **unlike}
        return {**told[0], **counts, "counters": counters, "workers": workers}

    def close(self) -> None:
        """Ends the workers."""
        self._crew.stop()

    def _answer(self, window: Sequence[tuple[Hashable, Request]]) -> Iterator[tuple[Hashable, Result]]:
        found: list[tuple[Hashable, Result]] = []
        self.run([request for _, request in window], lambda place, result: found.append((window[place][0], result)))
        yield from found
