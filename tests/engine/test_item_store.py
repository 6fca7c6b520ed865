"""What is kept within a budget of bytes, against a list of what was used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from olive_ext.media.items import ItemStore

BUDGET = 20


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 25), st.booleans())))
def test_values_used_last_are_kept_within_the_budget(calls: list[tuple[int, int, bool]]) -> None:
    kept: ItemStore[bytes] = ItemStore(BUDGET, len)
    used: list[tuple[str, bytes]] = []
    for number, size, is_put in calls:
        key, value = str(number), bytes(size)
        known = dict(used)
        if is_put:
            others = [pair for pair in used if pair[0] != key]
            used = [*others, (key, value)]
            while len(used) > 1 and sum(len(held) for _, held in used) > BUDGET:
                del used[0]
            assert kept.put(key, value) == len(others) + 1 - len(used)
        else:
            assert kept.get(key) == known.get(key)
            used = [pair for pair in used if pair[0] != key] + [pair for pair in used if pair[0] == key]
        assert kept.num_bytes == sum(len(held) for _, held in used)
        assert [name in kept for name in map(str, range(8))] == [name in dict(used) for name in map(str, range(8))]
    kept.clear()
    assert kept.num_bytes == 0
    assert kept.get("0") is None
