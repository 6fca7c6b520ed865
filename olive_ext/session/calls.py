"""One call of a session: its turn at the engine, from whatever thread, and its results put together.

A call from another thread waits; a call from the thread whose own call is still open could wait forever, so it is
refused. Knows no engine and no text.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Generic, TypeAlias, TypeVar

from typing_extensions import TypeIs

from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.errors import ConfigError, LostRequestsError, MediaError, OliveExtError, SessionError, TaskError
from olive_ext.session.executor import Executor, OpenModel
from olive_ext.text.conversion import Converted, convert_generation, convert_rolling, convert_scoring
from olive_ext.text.prompts import Prompt, Text
from olive_ext.text.requests import (
    GenerationOutput,
    GenerationRequest,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
)
from olive_ext.text.tokenizer_fit import refuse_unknown

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked")
Output = TypeVar("Output")
OnOutput: TypeAlias = Callable[[int, Output], None]
OnLost: TypeAlias = Callable[[int, str], None]


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


class RequestBatch(Generic[Output]):
    """`requests` go to the engine, their results to `take`. `on_output` and `on_lost` are told of each of `converted`,
    by its number. What is complete is forgotten."""

    def __init__(
        self, converted: Mapping[int, Converted[Output]], on_output: OnOutput[Output], on_lost: OnLost
    ) -> None:
        self._converted = dict(converted)
        self._on_output = on_output
        self._on_lost = on_lost
        counts = {index: len(item.requests) for index, item in self._converted.items()}
        self._owners = [(index, part) for index, count in counts.items() for part in range(count)]
        self.requests: list[Request] = [self._converted[index].requests[part] for index, part in self._owners]
        self._parts: dict[int, dict[int, Result]] = {index: {} for index in self._converted}
        for index in [index for index, item in self._converted.items() if not item.requests]:
            self._complete(index)

    def run(self, executor: Executor) -> None:
        """Has the requests run together; those that have no result are lost."""
        try:
            executor.run(self.requests, self.take)
        except LostRequestsError as error:
            for number, reason in error.lost.items():
                self.take(number, Lost(reason))

    def take(self, number: int, result: Result | Lost) -> None:
        """Takes the result of `requests[number]`."""
        index, part = self._owners[number]
        if isinstance(result, Lost):
            self._on_lost(index, result.reason)
            return
        self._parts[index][part] = result
        if len(self._parts[index]) == len(self._converted[index].requests):
            self._complete(index)

    def _complete(self, index: int) -> None:
        parts = self._parts.pop(index)
        output = self._converted.pop(index).output([parts[part] for part in range(len(parts))])
        self._on_output(index, output)


def batches(
    slices: Iterable[Sequence[Asked]],
    convert: Callable[[Asked], Converted[Output]],
    on_output: OnOutput[Output],
    on_lost: OnLost,
    warn: Callable[[Mapping[int, bool]], None],
) -> Iterator[RequestBatch[Output]]:
    """A batch for each of `slices`, when it is asked for. Requests are numbered on from slice to slice. One whose
    picture or sound cannot be read is lost, and costs no other its answer; `warn` is told which were cut."""
    count = 0
    for requests in slices:
        converted: dict[int, Converted[Output]] = {}
        for index, request in enumerate(requests, count):
            with _noting_bad_media(on_lost, index), naming(f"request {index}", index):
                converted[index] = convert(request)
        warn({index: item.is_truncated for index, item in converted.items()})
        batch = RequestBatch(converted, on_output, on_lost)
        count += len(requests)
        if batch.requests:
            yield batch


@contextmanager
def _noting_bad_media(on_lost: OnLost, index: int) -> Iterator[None]:
    try:
        yield
    except MediaError as error:
        on_lost(index, str(error.__cause__))


def warn_of_cuts(length: int, whose: Callable[[int], str] | None, are_cut: Mapping[int, bool]) -> None:
    """Warns of requests that lost their beginning to fit into `length` tokens; `whose` tells a request's task."""
    if any(are_cut.values()):
        cut = [index for index, is_cut in are_cut.items() if is_cut]
        tasks = Counter(map(whose, cut)) if whose is not None else {}
        listed = f": {', '.join(f'{count} of {name}' for name, count in tasks.items())}" if tasks else ""
        text = "%d of %d requests were cut on the left to fit into %d tokens%s"
        logger.warning(text, len(cut), len(are_cut), length, listed)


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


def to_generation(
    session: OpenModel, item: ToGenerate, settings: Mapping[str, Any] | None = None
) -> Converted[GenerationOutput]:
    """A prompt alone is continued with `settings`, fields of a `GenerationRequest`, and the defaults of the others.
    Raises `ConfigError` for settings beside a whole request."""
    settings = settings or {}
    if settings and isinstance(item, GenerationRequest):
        raise ConfigError(f"'{next(iter(settings))}' beside a GenerationRequest, which has its own: give it there")
    request = item if isinstance(item, GenerationRequest) else GenerationRequest(item, **settings)
    about = session.stop_ids, session.max_length, session.encoding, session.media
    return _known(session, convert_generation(session.tokenizer, request, *about))


def to_scoring(session: OpenModel, item: ToScore) -> Converted[ScoringOutput]:
    """Raises `ConfigError` for what is neither a pair nor a request."""
    if not isinstance(item, ScoringRequest):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigError(f"{type(item).__name__}: a (context, target) pair or a ScoringRequest is expected")
        item = ScoringRequest(*item)
    about = session.max_length, session.encoding, session.media
    return _known(session, convert_scoring(session.tokenizer, item, *about))


def to_rolling(session: OpenModel, item: ToRoll) -> Converted[RollingOutput]:
    """Raises `TaskError` for an encoder-decoder."""
    if session.encoding is not None:
        raise TaskError("an encoder-decoder has no likelihood of a text alone: score a target behind a source")
    request = item if isinstance(item, RollingRequest) else RollingRequest(item)
    return _known(session, convert_rolling(session.tokenizer, request, session.max_length, session.media))


def _known(session: OpenModel, converted: Converted[Output]) -> Converted[Output]:
    """The same; raises `TaskError` for a token that the model has no row for."""
    for request in converted.requests if session.model is not None else ():  # else it is not known what it has
        refuse_unknown(request, session.tokenizer, () if session.media is None else session.media.placeholders)
    return converted


class ContinuousRequests:
    """The requests of a `generate_continuous`, converted as they are read, until their results come."""

    def __init__(self, session: OpenModel) -> None:
        self._session = session
        self._in_flight: dict[Hashable, tuple[Hashable, Converted[GenerationOutput]]] = {}

    def feed(self, items: Iterable[tuple[Hashable, ToGenerate] | None]) -> Iterator[tuple[Hashable, Request] | None]:
        """The engine's requests under numbers of their own. Raises `TaskError` for a sound of several windows."""
        for number, item in enumerate(items):
            if item is None:
                yield None
                continue
            key, request = item
            with naming(f"request {key!r}"):
                converted = to_generation(self._session, request)
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
