"""Collects the engine's results of one call into outputs, each as soon as its last part is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from olive_ext.engine.requests import Request, Result
from olive_ext.text.conversion import Converted

Output = TypeVar("Output")


class Batch(Generic[Output]):
    """`requests` go to the engine, their results to `take`; `outputs` come back in the order of `converted`."""

    def __init__(
        self, converted: Sequence[Converted[Output]], on_result: Callable[[int, Output], None] | None = None
    ) -> None:
        self.requests: list[Request] = [request for item in converted for request in item.requests]
        self._converted = converted
        self._on_result = on_result
        self._places = [(index, part) for index, item in enumerate(converted) for part in range(len(item.requests))]
        self._parts: list[dict[int, Result]] = [{} for _ in converted]
        self._outputs: dict[int, Output] = {}
        for index, item in enumerate(converted):
            if not item.requests:
                self._complete(index)

    def take(self, number: int, result: Result) -> None:
        """`result` is that of `requests[number]`."""
        index, part = self._places[number]
        self._parts[index][part] = result
        if len(self._parts[index]) == len(self._converted[index].requests):
            self._complete(index)

    def outputs(self) -> list[Output]:
        return [self._outputs[index] for index in range(len(self._converted))]

    def _complete(self, index: int) -> None:
        parts = self._parts[index]
        output = self._converted[index].output([parts[part] for part in range(len(parts))])
        self._outputs[index] = output
        if self._on_result is not None:
            self._on_result(index, output)
