"""Block tables against slots that each hold a list of their own, for random forks, rewinds and writes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.engine.scheduling.blocks import BlockTables
from olive_ext.engine.step import Columns, Copy, Row

SLOTS, CAPACITY, BLOCK = 4, 22, 4

OPERATIONS = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, CAPACITY), st.integers(1, 9)),
    max_size=40,
)
"""A fork from the first slot to the second up to a length, then as many tokens written behind that."""


class Model:
    """The tables with memory behind them, and what each slot should hold."""

    def __init__(self) -> None:
        self.tables = BlockTables(SLOTS, CAPACITY, BLOCK)
        self.memory = [[-1] * BLOCK for _ in range(self.tables.num_blocks)]
        self.expected: list[list[int]] = [[] for _ in range(SLOTS)]
        self.next_token = 0

    def fork(self, source: int, target: int, length: int) -> None:
        self.tables.fork(Copy(source, target, length))
        self.expected[target] = self.expected[source][:length]

    def write(self, slot: int, past: int, count: int) -> None:
        row, before = Columns.of([Row(slot, past, (0,) * count)]), self.tables.table(slot)
        is_due = self.tables.without_room(row) == [(slot, past, count)]
        copy = self.tables.make_room(slot, past, count)
        assert is_due or (copy is None and self.tables.table(slot) == before)
        if copy is not None:
            moved = slice(copy.num_positions)
            self.memory[copy.target][moved] = self.memory[copy.source][moved]
        assert self.tables.without_room(row) == []
        assert self.tables.make_room(slot, past, count) is None
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        table = self.tables.table(slot)
        for position, token in enumerate(tokens, start=past):
            self.memory[table[position // BLOCK]][position % BLOCK] = token
        self.expected[slot] = [*self.expected[slot][:past], *tokens]

    def check(self) -> None:
        for slot, expected in enumerate(self.expected):
            held = [token for block in self.tables.table(slot) for token in self.memory[block]]
            assert held[: len(expected)] == expected
        named = Counter(block for slot in range(SLOTS) for block in self.tables.table(slot))
        assert self.tables.num_blocks - self.tables.num_free == len(named)
        assert all(count == self.tables._num_users[block] for block, count in named.items())


@settings(max_examples=1000)
@given(OPERATIONS)
def test_slots_hold_what_was_written_however_they_share(operations: list[tuple[int, int, int, int]]) -> None:
    model = Model()
    for source, target, length, count in operations:
        length = min(length, len(model.expected[source]))
        if source != target:
            model.fork(source, target, length)
        past = min(length, CAPACITY - count)
        model.write(target, past, count)
        model.check()


def test_only_a_half_filled_block_is_copied_and_only_where_it_is_shared() -> None:
    tables = BlockTables(3, 16, BLOCK)
    tables.make_room(0, 0, 10)
    for target, length in ((1, 8), (2, 10)):
        tables.fork(Copy(0, target, length))
    assert tables.make_room(1, 8, 3) is None, "the prefix ends with a block"
    assert tables.make_room(2, 10, 1) is not None
    assert tables.make_room(0, 10, 1) is None, "nobody else names it now"
    assert tables.num_blocks - tables.num_free == 3 + 2
