"""Chunks are read as there is room, and handed out so that old ones are complete first and the workers end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.requests import Lost, Request
from olive_ext.session.workers.crew import AHEAD, HELD_TOKENS, ChunkFeed


def chunk(size: int, length: int = 4) -> list[Request]:
    return [Request(tuple(range(number, number + length)), 1) for number in range(size)]


def taken(feed: ChunkFeed) -> int:
    found = feed.take()
    assert found is not None
    return found[0]


def test_chunks_come_in_order_while_more_follow_and_then_the_largest_first() -> None:
    feed = ChunkFeed(map(chunk, [7, 5, 3, 9, 4, 6]), 1)
    while feed.read():
        pass
    assert feed.num_waiting == AHEAD
    assert [taken(feed) for _ in range(2)] == [0, 1]
    assert [feed.read() is not None for _ in range(3)] == [True, True, False]
    assert taken(feed) == 2
    assert not feed.read()  # there are no more
    assert feed.put_back(0)
    assert [taken(feed) for _ in range(4)] == [3, 5, 4, 0]
    assert feed.put_back(0)
    parts = [taken(feed) for _ in range(2)]
    assert [feed.put_back(part) for part in parts] == [False, False]
    feed.end()
    assert feed.take() is None


def test_no_more_tokens_are_held_than_there_is_room_for() -> None:
    long = HELD_TOKENS // 3 - 200
    read: list[int] = []

    def chunks() -> Iterator[Sequence[Request]]:
        for number in range(8):
            read.append(number)
            yield [Request(range(long), 1)]  # type: ignore[arg-type]  # as long as a tuple, without its memory

    feed = ChunkFeed(chunks(), 100)
    while feed.read():
        pass
    assert read == [0, 1, 2, 3]  # the fourth goes beyond the bound
    assert feed.complete(taken(feed), []) == (0, [])
    assert feed.complete(taken(feed), []) == (1, [])
    while feed.read():
        pass
    assert read == [0, 1, 2, 3, 4, 5]


@given(sizes=st.lists(st.integers(1, 7), max_size=20), num_workers=st.integers(1, 3), data=st.data())
def test_every_chunk_is_complete_once_whatever_is_put_back(
    sizes: list[int], num_workers: int, data: st.DataObject
) -> None:
    feed, found = ChunkFeed(map(chunk, sizes), num_workers), {}
    while feed.has_work:
        if not feed.read() and feed.num_waiting:
            number = taken(feed)
            if not (data.draw(st.booleans()) and feed.put_back(number)):
                size = 1 if number < 0 else sizes[number]
                if (complete := feed.complete(number, [Lost("")] * size)) is not None:
                    assert complete[0] not in found
                    found[complete[0]] = len(complete[1])
    assert found == dict(enumerate(sizes))
