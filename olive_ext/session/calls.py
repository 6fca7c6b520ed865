"""One call of a session: its turn at the engine, from whatever thread, and its results put together.

A call from another thread waits; a call from the thread whose own call is still open could wait forever, so it is
refused. Knows no engine and no text.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from olive_ext.engine.requests import Request, Result
from olive_ext.errors import LostRequestsError, OliveExtError, SessionError, UnreadableError
from olive_ext.text.conversion import Converted

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked")
Output = TypeVar("Output")


class Turns:
    """Hands out turns until closed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._call = ""
        self._is_closed = False

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Waits for the turn of `call`. Raises `SessionError` on a closed session, or inside another call."""
        me = threading.get_ident()
        with self._condition:
            if self._owner == me and not self._is_closed:
                raise SessionError(f"{call} inside {self._call}: let that finish, or close its iterator, first")
            self._condition.wait_for(lambda: self._owner is None or self._is_closed)
            self.check_open()
            self._owner, self._call = me, call
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()

    def advance(self) -> None:
        """An iterator that holds the turn goes on, perhaps in another thread than the one that began it."""
        self.check_open()
        self._owner = threading.get_ident()

    def check_open(self) -> None:
        if self._is_closed:
            raise SessionError("the session is closed: open the model again")

    def close(self) -> bool:
        """No more turns; those who wait for one get the error. False where it was closed before."""
        with self._condition:
            was_open, self._is_closed = not self._is_closed, True
            self._condition.notify_all()
            return was_open


class Batch(Generic[Output]):
    """`requests` go to the engine, their results to `take`; `outputs` are by place in `converted`."""

    def __init__(
        self,
        asked: Iterable[Asked],
        convert: Callable[[Asked], Converted[Output]],
        on_result: Callable[[int, Output], None] | None = None,
    ) -> None:
        self._on_result = on_result
        self._lost: dict[int, str] = {}
        """Requests whose pictures or sound cannot be read, with the reasons: they cost no other its answer."""
        self._converted: dict[int, Converted[Output]] = {}
        for index, request in enumerate(asked):
            with self._noting_unreadable(index), naming(f"request {index}"):
                self._converted[index] = convert(request)
        pieces = self._converted.items()
        self._places = [(index, part) for index, item in pieces for part in range(len(item.requests))]
        self.requests: list[Request] = [self._converted[index].requests[part] for index, part in self._places]
        self._parts: dict[int, dict[int, Result]] = {index: {} for index in self._converted}
        self.outputs: dict[int, Output] = {}
        for index, item in pieces:
            if not item.requests:
                self._complete(index)

    @contextmanager
    def _noting_unreadable(self, index: int) -> Iterator[None]:
        try:
            yield
        except UnreadableError as error:
            self._lost[index] = str(error.__cause__)

    @property
    def are_cut(self) -> dict[int, bool]:
        """By place, whether a request's text was cut on the left to fit."""
        return {index: item.is_truncated for index, item in self._converted.items()}

    def take(self, number: int, result: Result) -> None:
        """`result` is that of `requests[number]`."""
        index, part = self._places[number]
        self._parts[index][part] = result
        if len(self._parts[index]) == len(self._converted[index].requests):
            self._complete(index)

    @contextmanager
    def own_places(self) -> Iterator[None]:
        """Names requests without a result by the outputs that they are parts of, and those that cannot be read."""
        lost = dict(self._lost)
        try:
            yield
        except LostRequestsError as error:
            lost |= {self._places[number][0]: why for number, why in error.lost.items()}
        if lost:
            raise LostRequestsError(lost)

    def _complete(self, index: int) -> None:
        parts = self._parts[index]
        output = self._converted[index].output([parts[part] for part in range(len(parts))])
        self.outputs[index] = output
        if self._on_result is not None:
            self._on_result(index, output)


def warn_of_cuts(are_cut: Mapping[int, bool], length: int, names: Sequence[str]) -> None:
    """Warns where requests lost their beginning to fit into `length` tokens; `names`, where given, say whose."""
    if any(are_cut.values()):
        whose = Counter(names[index] for index, is_cut in are_cut.items() if is_cut and names)
        listed = f": {', '.join(f'{count} of {name}' for name, count in whose.items())}" if whose else ""
        text = "%d of %d requests were cut on the left to fit into %d tokens%s"
        logger.warning(text, sum(are_cut.values()), len(are_cut), length, listed)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Says which request a user's error is about."""
    try:
        yield
    except OliveExtError as error:
        raise type(error)(f"{what}: {error}") from error
