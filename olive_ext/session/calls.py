"""One call of a session: its turn at the engine, from whatever thread, and the requests under way.

A call from another thread waits; a call from the thread whose own call is still open could wait forever, so it is
refused. Knows no engine run and no text.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import TypeIs

from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.errors import ConfigError, MediaError, OliveExtError, SessionError
from olive_ext.session.conversion import OpenModel, SessionOutput, SessionRequest, convert, output_of
from olive_ext.session.prompts import Prompt, Text
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest

logger = logging.getLogger(__name__)


class Turns:
    """Hands out turns until closed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._call = ""
        self.is_closed = False

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Waits for the turn of `call`. Raises `SessionError` on a closed session, or inside another call."""
        me = threading.get_ident()
        with self._condition:
            self.refuse_inside(call)
            self._condition.wait_for(lambda: self._owner is None or self.is_closed)
            self.check_open()
            self._owner, self._call = me, call
        try:
            yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()

    def refuse_inside(self, call: str) -> None:
        """Raises `SessionError` inside another call of this thread, for which `call` would wait forever."""
        if self._owner == threading.get_ident() and not self.is_closed:
            raise SessionError(f"{call} inside {self._call}: let that finish, or close its iterator, first")

    def advance(self) -> None:
        """An iterator that holds the turn goes on, perhaps in another thread than the one that began it."""
        self.check_open()
        self._owner = threading.get_ident()

    def check_open(self) -> None:
        """Raises `SessionError` where no more turns are handed out."""
        if self.is_closed:
            raise SessionError("the session is closed: open the model again")

    def close(self) -> bool:
        """No more turns; those who wait for one get the error. False where it was closed before."""
        with self._condition:
            was_open, self.is_closed = not self.is_closed, True
            self._condition.notify_all()
            return was_open


class Window(NamedTuple):
    """The key of a request of the engine: part `part` of the call's request `number`."""

    number: int
    part: int

    def __repr__(self) -> str:
        return str(self.number)  # as errors of the engine name it


class Call:
    """The requests of one call that have no output yet: what each is for the engine, and its results so far."""

    def __init__(self, model: OpenModel, ask: Callable[[Any], SessionRequest]) -> None:
        """`ask` makes a session's request of what a caller gives for one."""
        self._model, self._ask = model, ask
        self._waiting: dict[int, tuple[SessionRequest, tuple[Request, ...]]] = {}
        self._results: dict[int, dict[int, Result]] = {}
        """Those of requests of several parts."""

        self.lost: dict[int, str] = {}
        """The reasons of those that will have no output, by their indices."""

    def put(self, index: int, item: Any) -> tuple[list[tuple[Window, Request]], bool]:
        """The engine's requests for one of the call, and whether its text was cut to fit."""
        request = self._ask(item)
        requests, is_cut = convert(self._model, request)
        self._waiting[index] = request, requests
        return [(Window(index, part), one) for part, one in enumerate(requests)], is_cut

    def take(self, key: Window, result: Result | Lost) -> SessionOutput | None:
        """The output of a request whose last result this is."""
        if isinstance(result, Lost):
            self.lost[key.number] = result.reason
            return None
        request, requests = self._waiting[key.number]
        results = {0: result} if len(requests) == 1 else self._results.setdefault(key.number, {})
        results[key.part] = result
        if len(results) < len(requests):
            return None
        del self._waiting[key.number]
        self._results.pop(key.number, None)
        return output_of(self._model, request, requests, [results[part] for part in range(len(requests))])

    def put_all(
        self, slices: Iterable[Sequence[Any]], whose: Callable[[int], str] | None
    ) -> Iterator[list[tuple[Window, Request]]]:
        """The engine's requests of each slice. A request whose picture or sound cannot be read is lost, and costs no
        other its answer. Warns of those that lost their beginning; `whose` names a request's task."""
        count = 0
        for items in slices:
            windows: list[tuple[Window, Request]] = []
            cut = []
            for index, item in enumerate(items, count):
                try:
                    with naming(f"request {index}", index):
                        more, is_cut = self.put(index, item)
                except MediaError as error:
                    self.lost[index] = str(error.__cause__)
                    continue
                windows += more
                cut += [index] if is_cut else []
            if cut:
                tasks = Counter(map(whose, cut)) if whose is not None else {}
                listed = f": {', '.join(f'{number} of {name}' for name, number in tasks.items())}" if tasks else ""
                text = "%d of %d requests were cut on the left to fit into %d tokens%s"
                logger.warning(text, len(cut), len(items), self._model.max_length, listed)
            count += len(items)
            if windows:
                yield windows

    def rest(self) -> Iterator[tuple[int, SessionOutput]]:
        """The outputs of those that took no request of the engine: of empty texts."""
        for index, (request, requests) in self._waiting.items():
            if not requests:
                yield index, output_of(self._model, request, (), ())


@contextmanager
def naming(what: str, index: int | None = None) -> Iterator[None]:
    """Says which request a user's error is about, which is at `index` of its call."""
    try:
        yield
    except OliveExtError as error:
        named = type(error)(f"{what}: {error}")
        named.request = index
        raise named from error


_SETTINGS = tuple(field.name for field in fields(GenerationRequest) if field.name != "prompt")
ToGenerate: TypeAlias = GenerationRequest | Prompt
ToScore: TypeAlias = ScoringRequest | tuple[Prompt, Text]
ToRoll: TypeAlias = RollingRequest | Text


def is_one(requests: object) -> TypeIs[ToGenerate]:
    """Whether it is one request, not a list of them: a text, messages, token ids, or a `GenerationRequest`."""
    is_listed = isinstance(requests, list | tuple) and bool(requests) and isinstance(requests[0], Mapping | int)
    return is_listed or isinstance(requests, str | GenerationRequest)


def refuse_unknown_settings(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a setting that is no field of a `GenerationRequest`."""
    if unknown := [name for name in settings if name not in _SETTINGS]:
        near = difflib.get_close_matches(unknown[0], _SETTINGS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(_SETTINGS)}"
        raise ConfigError(f"generate: unknown setting '{unknown[0]}': {hint}")


def to_generation(item: ToGenerate, settings: Mapping[str, Any] | None = None) -> GenerationRequest:
    """A prompt alone is continued with `settings`, fields of a `GenerationRequest`, and the defaults of the others.
    Raises `ConfigError` for settings beside a whole request."""
    if not isinstance(item, GenerationRequest):
        return GenerationRequest(item, **(settings or {}))
    if settings:
        raise ConfigError(f"'{next(iter(settings))}' beside a GenerationRequest, which has its own: give it there")
    return item


def to_scoring(item: ToScore) -> ScoringRequest:
    """Raises `ConfigError` for what is neither a pair nor a request."""
    if isinstance(item, ScoringRequest):
        return item
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ConfigError(f"{type(item).__name__}: a (context, target) pair or a ScoringRequest is expected")
    return ScoringRequest(*item)


def to_rolling(item: ToRoll) -> RollingRequest:
    """A text is scored after the prefix token."""
    return item if isinstance(item, RollingRequest) else RollingRequest(item)
