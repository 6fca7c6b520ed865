"""Engines that answer beside a reference: what is scored is compared, recorded, or looked up; what is generated is not.

Knows no graph and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Request, Result
from olive_ext.engine.scheduling.counters import Counters
from olive_ext.engine.scheduling.prefix_tree import source_key
from olive_ext.errors import RecordsError
from olive_ext.model.types import SourceKind
from olive_ext.records import Records, ScoredTargets, request_key

OnResult = Callable[[int, Result], None]


class Scoring(Protocol):
    """Scores requests, in the order in which they are given."""

    def run(self, requests: Sequence[Request], on_result: OnResult | None = None) -> list[Result]: ...


class Turns:
    """Engines that share runners: what one of them makes resident, the others know nothing of."""

    def __init__(self) -> None:
        self._last: Engine | None = None

    def take(self, engine: Engine) -> Engine:
        """`engine`, which forgets what was resident where another one has run since."""
        if self._last is not engine:
            engine.reset()
        self._last = engine
        return engine


class SharingEngine:
    """An engine whose runner other engines use, too."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def source_kind(self) -> SourceKind | None:
        return self._engine.source_kind

    def run(self, requests: Sequence[Request], on_result: OnResult | None = None) -> list[Result]:
        return self._turns.take(self._engine).run(requests, on_result)

    def run_continuous(self, items: Iterable[tuple[Hashable, Request]]) -> Iterator[tuple[Hashable, Result]]:
        return self._turns.take(self._engine).run_continuous(items)

    def reset(self) -> None:
        self._engine.reset()

    def close(self) -> None:
        self._engine.close()

    def describe(self) -> dict[str, Any]:
        return self._engine.describe()


class ComparingEngine:
    """Generates with `alone` and scores with `scoring`, which belong to `compared`: an engine that closes both."""

    def __init__(self, alone: SharingEngine, compared: SharingEngine, scoring: Scoring) -> None:
        self._alone = alone
        self._compared = compared
        self._scoring = scoring

    @property
    def counters(self) -> Counters:
        return self._alone.counters

    @property
    def context_length(self) -> int:
        return self._compared.context_length

    @property
    def source_kind(self) -> SourceKind | None:
        return self._alone.source_kind

    def run(self, requests: Sequence[Request], on_result: OnResult | None = None) -> list[Result]:
        """Results in the order of `requests`; what is scored first, then what is generated."""
        results: dict[int, Result] = {}
        for engine, is_generated in ((self._scoring, False), (self._alone, True)):
            places = [place for place, asked in enumerate(requests) if (asked.generation is not None) is is_generated]
            if not places:
                continue
            keep = _Placed(places, results, on_result)
            engine.run([requests[place] for place in places], keep)
        return [results[place] for place in range(len(requests))]

    def run_continuous(self, items: Iterable[tuple[Hashable, Request]]) -> Iterator[tuple[Hashable, Result]]:
        return self._alone.run_continuous(items)

    def reset(self) -> None:
        self._alone.reset()
        self._compared.reset()

    def close(self) -> None:
        self._alone.close()
        self._compared.close()

    def describe(self) -> dict[str, Any]:
        return self._compared.describe()


class RecordingScorer:
    """Answers from `records` what these hold; `engine`, over a `RecordingRunner`, answers and records the rest."""

    def __init__(self, engine: Scoring, records: Records) -> None:
        self._engine = engine
        self._records = records

    def run(self, requests: Sequence[Request], on_result: OnResult | None = None) -> list[Result]:
        """What is complete is kept on disk, however this ends."""
        results: dict[int, Result] = {}
        keys = [key_of(request) for request in requests]
        known = {place: said for place, key in enumerate(keys) if (said := self._records.find(key)) is not None}
        missing = [place for place in range(len(requests)) if place not in known]
        tell = _Placed(list(range(len(requests))), results, on_result)
        for place, said in known.items():
            tell(place, Result(tuple(said.logprob.tolist()), tuple(said.is_greedy.tolist())))

        def keep(number: int, result: Result) -> None:
            assert result.notes is not None
            logprobs = np.array(result.logprobs, np.float32)
            said = ScoredTargets(result.notes["record"], logprobs, np.array(result.is_greedy, np.bool_))
            self._records.put(keys[missing[number]], said)
            tell(missing[number], replace(result, notes=None))

        try:
            if missing:
                self._engine.run([requests[place] for place in missing], keep)
        finally:
            self._records.flush()
        return [results[place] for place in range(len(requests))]


class RecordedScorer:
    """Adds to each request the numbers of its records, for `engine` over a `RecordedRunner`; and to each result what
    the records hold of its targets."""

    def __init__(self, engine: Scoring, records: Records) -> None:
        self._engine = engine
        self._records = records

    def run(self, requests: Sequence[Request], on_result: OnResult | None = None) -> list[Result]:
        """Raises `RecordsError` where the records hold nothing of a request."""
        found = [self._records.find(key_of(request)) for request in requests]
        said = [one for one in found if one is not None]
        if len(said) < len(found):
            raise RecordsError(
                f"the records in '{self._records.folder}' hold nothing of {len(found) - len(said)} of {len(found)} "
                "requests: record the reference on the same tasks, with the same limit, template and max_length"
            )
        results: dict[int, Result] = {}
        tell = _Placed(list(range(len(requests))), results, on_result)

        def keep(place: int, result: Result) -> None:
            assert result.notes is not None
            result.notes["reference_logprobs"] = said[place].logprob
            result.notes["reference_is_greedy"] = said[place].is_greedy
            tell(place, result)

        numbered = zip(requests, said, strict=True)
        self._engine.run([replace(request, records=tuple(one.record.tolist())) for request, one in numbered], keep)
        return [results[place] for place in range(len(requests))]


class _Placed:
    """Puts results at their places and tells of each."""

    def __init__(self, places: Sequence[int], results: dict[int, Result], on_result: OnResult | None) -> None:
        self._places = places
        self._results = results
        self._on_result = on_result

    def __call__(self, number: int, result: Result) -> None:
        place = self._places[number]
        self._results[place] = result
        if self._on_result is not None:
            self._on_result(place, result)


def key_of(request: Request) -> bytes:
    """What records know a request by."""
    return request_key(request.tokens, request.num_targets, source_key(request.source))
