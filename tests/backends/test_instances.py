"""Slices come in sorted order, each item once, and are encoded ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.backends.lm_eval.instances import encoded_slices


@given(items=st.lists(st.text("ab", max_size=4), max_size=20), size=st.integers(1, 6))
def test_every_item_comes_once_and_neighbours_are_alike(items: list[str], size: int) -> None:
    places, encoded = [], []
    for at, upper in encoded_slices(items, str, lambda texts: [text.upper() for text in texts], size):
        assert len(at) <= size
        places += at
        encoded += upper
    assert sorted(places) == list(range(len(items)))
    assert encoded == [items[place].upper() for place in places] == sorted(encoded)


def test_the_next_slice_is_encoded_while_one_is_scored() -> None:
    begun = [threading.Event() for _ in range(3)]

    def encode(numbers: Sequence[int]) -> int:
        begun[numbers[0]].set()
        return numbers[0]

    for places, number in encoded_slices(range(3), str, encode, size=1):
        assert places == [number]
        if number < 2:
            assert begun[number + 1].wait(5)


def test_what_encoding_raises_is_raised_to_the_caller() -> None:
    def encode(numbers: Sequence[int]) -> None:
        raise ValueError(f"planted at {numbers[0]}")

    with pytest.raises(ValueError, match="planted at 0"):
        list(encoded_slices(range(3), str, encode, size=2))
