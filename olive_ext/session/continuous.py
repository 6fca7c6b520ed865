"""The requests of generations that are read as they become complete."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator

from olive_ext.engine.requests import Request, Result
from olive_ext.errors import TaskError
from olive_ext.session import calls
from olive_ext.session.executor import OpenModel
from olive_ext.text.conversion import Converted
from olive_ext.text.requests import GenerationOutput

logger = logging.getLogger(__name__)


class ContinuousRequests:
    """The requests of a `generate_continuous`, converted as they are read, until their results come."""

    def __init__(self, session: OpenModel) -> None:
        self._session = session
        self._in_flight: dict[Hashable, tuple[Hashable, Converted[GenerationOutput]]] = {}

    def feed(
        self, items: Iterable[tuple[Hashable, calls.ToGenerate] | None]
    ) -> Iterator[tuple[Hashable, Request] | None]:
        """The engine's requests under numbers of their own. Raises `TaskError` for a sound of several windows."""
        for number, item in enumerate(items):
            if item is None:
                yield None
                continue
            key, request = item
            with calls.naming(f"request {key!r}"):
                converted = calls.to_generation(self._session, request)
            if converted.is_truncated:
                logger.warning("request %r was cut on the left to fit", key)
            if len(converted.requests) > 1:
                raise TaskError(f"request {key!r}: its sound has {len(converted.requests)} windows: use `generate`")
            self._in_flight[number] = (key, converted)
            yield number, converted.requests[0]

    def take(self, number: Hashable, result: Result) -> tuple[Hashable, GenerationOutput]:
        """The key and the output of a request whose result is there."""
        key, converted = self._in_flight.pop(number)
        return key, converted.output([result])
