"""Rows told by columns against the rows they stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.engine.requests import integers
from olive_ext.engine.step import Columns, PlainRows, Row, Step

NUMBERS = st.integers(0, 99)
PLAIN = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5)
TOKENS = st.lists(NUMBERS, min_size=1, max_size=4).map(tuple)
OTHERS = st.lists(st.tuples(NUMBERS, NUMBERS, TOKENS).map(lambda found: Row(*found)), max_size=3)


@given(PLAIN, OTHERS, st.slices(8))
def test_columns_stand_for_their_rows(plain: list[tuple[int, int, int]], others: list[Row], part: slice) -> None:
    """Each row, each slice and each column is that of the rows as objects."""
    rows = PlainRows(*(integers(column) for column in zip(*plain, strict=True)), tuple(others))
    expected = (*(Row(slot, past, (token,)) for slot, past, token in plain), *others)
    assert tuple(rows) == expected
    assert rows[part] == expected[part]
    assert rows[-1] == expected[-1]
    for one, other in zip(Columns.of(rows), Columns.of(expected), strict=True):
        assert one.tolist() == other.tolist()


def test_tokens_that_follow_take_the_places_of_those_not_known() -> None:
    """A row of several tokens keeps its own; the columns stay as they were."""
    step = Step((Row(0, 5, (0,)), Row(1, 0, (7, 8)), Row(2, 9, (0,))), follows=(1, -1, 0))
    assert step.columns.tokens_after(step.follows, np.array([40, 50])).tolist() == [50, 7, 8, 40]
    assert step.columns.tokens_N.tolist() == [0, 7, 8, 0]
