"""Values that are kept by their keys while their bytes are within a budget. Knows no picture and no device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The values used last, up to `budget` bytes, or one that has more. Their bytes are counted as they come and go, so
    that a value costs as much with thousands beside it as alone."""

    def __init__(self, budget: int, nbytes: Callable[[Value], int]) -> None:
        self.budget = budget
        self.num_bytes = 0
        self._nbytes = nbytes
        self._values: OrderedDict[str, Value] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Value | None:
        """The value, which is now the one used last."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: str, value: Value) -> int:
        """Keeps `value` as the one used last; returns how many others went for it."""
        if key in self._values:
            self.num_bytes -= self._nbytes(self._values.pop(key))
        self._values[key] = value
        self.num_bytes += self._nbytes(value)
        before = len(self._values)
        while len(self._values) > 1 and self.num_bytes > self.budget:
            self.num_bytes -= self._nbytes(self._values.popitem(last=False)[1])
        return before - len(self._values)

    def clear(self) -> None:
        self._values.clear()
        self.num_bytes = 0
