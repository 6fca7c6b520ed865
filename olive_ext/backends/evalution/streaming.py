"""Requests that arrive while others run, on Evalution's two queues and two threads. Knows no session.

The caller's iterable is read in one thread, the model works in another, and results go to the caller's thread. So the
model never waits for the caller between two results, and no lock of the session is held while the caller has one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any

from evalution.engines.continuous import RequestQueue, stream_request_results

Item = tuple[Any, Any]
"""The caller's key, and a request of Evalution."""

Put = Callable[[Any, Any], None]

LINGER_S = 0.05
"""How long an idle model waits for one more request: neighbours in one batch share prefixes."""

BATCH = 2048
"""Requests that are scored together at most, and that are read ahead of the model."""


class Arrivals:
    """The requests of one stream, as they come in. Methods raise `_Closed` once the caller has closed the stream."""

    def __init__(self, queue: RequestQueue, stop: threading.Event) -> None:
        self._queue = queue
        self._stop = stop

    def check(self) -> None:
        """Raises where nobody waits for results any more."""
        if self._stop.is_set():
            raise _Closed

    def batches(self) -> Iterator[list[Item]]:
        """Up to `BATCH` requests each; fewer where no other came for `LINGER_S`."""
        batch: list[Item] = []
        while batch or not self._queue.closed:
            self.check()
            item = self._queue.get(timeout_s=LINGER_S) if not self._queue.closed else None
            if item is not None:
                batch.append(item)
            if batch and (item is None or len(batch) == BATCH):
                yield batch
                batch = []

    def one_by_one(self, running: Sized) -> Iterator[Item | None]:
        """Every request as soon as it is there, and None where there is none while others are `running`; ends when all
        have been answered. An idle model waits for those that come within `LINGER_S` of each other."""
        gathers = True
        while running or not self._queue.closed:
            self.check()
            gathers = (gathers or not running) and not self._queue.closed
            item = self._queue.get(timeout_s=LINGER_S) if gathers else self._queue.get_nowait()
            if item is not None:
                yield item
            elif running:
                gathers = False
                yield None


def stream(name: str, requests: Iterable[Item], process: Callable[[Arrivals, Put], None]) -> Iterator[Item]:
    """`(key, output)` in the order in which `process` puts them. Nothing runs before the caller takes the first; what
    the iterable or `process` raises is raised to the caller. Closing the iterator waits for the model's next result."""

    def consume(stop: threading.Event, queue: RequestQueue, put: Put) -> None:
        with suppress(_Closed):
            process(Arrivals(queue, stop), put)

    results: Iterator[Item] = stream_request_results(
        requests,
        producer_name=f"olive_ext {name} requests",
        consumer_name=f"olive_ext {name}",
        process_requests=consume,
        request_queue_max_size=BATCH,
    )
    return results


class _Closed(Exception):
    """The caller has closed the stream."""
