"""How requests are gathered from Evalution's queue, without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from evalution.engines.continuous import RequestQueue

from olive_ext.plugins.suites.evalution import BATCH, Arrivals, Item, stream

pytestmark = pytest.mark.other_env


def arrivals_of(*keys: int) -> tuple[Arrivals, RequestQueue, threading.Event]:
    queue, stop = RequestQueue(), threading.Event()
    for key in keys:
        queue.put_request(key, None)  # type: ignore[arg-type]
    return Arrivals(queue, stop), queue, stop


def test_batches_hold_what_has_come_and_end_with_the_queue() -> None:
    arrivals, queue, _ = arrivals_of(*range(BATCH + 3))
    batches = arrivals.batches()
    assert [key for key, _ in next(batches)] == list(range(BATCH))
    assert len(next(batches)) == 3
    queue.put_request(7, None)  # type: ignore[arg-type]
    assert next(batches) == [(7, None)]
    queue.close()
    assert list(batches) == []


def test_no_request_for_now_is_none_only_while_others_run() -> None:
    arrivals, queue, _ = arrivals_of(1, 2)
    running: set[int] = set()
    items = arrivals.one_by_one(running)
    assert next(items) == (1, None)
    running.add(1)
    assert [next(items) for _ in range(3)] == [(2, None), None, None]
    queue.put_request(3, None)  # type: ignore[arg-type]
    assert next(items) == (3, None)
    queue.close()
    assert next(items) is None
    running.clear()
    assert list(items) == []


def test_closed_stream_raises_inside_and_ends_outside() -> None:
    seen: list[object] = []

    def process(arrivals: Arrivals) -> Iterator[Item]:
        for key, _ in filter(None, arrivals.one_by_one([None])):
            seen.append(key)
            yield key, "output"

    def endless() -> Iterator[Item]:
        number = 0
        while True:
            yield number, None
            number += 1

    results = stream("test", endless(), process)
    assert next(results) == (0, "output")
    results.close()  # type: ignore[attr-defined]
    assert list(results) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "olive_ext test"]
