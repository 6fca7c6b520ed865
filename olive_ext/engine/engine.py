"""Requests in, results out as they become complete. Knows no text, and no step: a `StepLoop` runs those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

from olive_ext.engine.forms.base import ScoringRule
from olive_ext.engine.reference.tap import NoTap, Tap
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Lost, Request, Result
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step_loop import StepLoop
from olive_ext.errors import LostItemError, LostRequestsError, RunError
from olive_ext.model.providers.devices import trim_host_memory

WINDOW_PER_SLOT = 16
"""Requests that `run_continuous` plans together, for each slot: enough to share prefixes, few enough to stream."""


class Engine:
    """Runs requests on one runner. Not thread-safe: one call at a time.

    With a tap, requests that are scored only run as the tap allows, and are noted. Generation runs on the runner alone,
    with all its slots. Engines whose runners share a `Residency` may be used in turns.
    """

    at_work = ""

    def __init__(
        self,
        runner: Runner,
        chunk_size: int,
        rule: ScoringRule | None = None,
        tap: Tap | None = None,
        *,
        is_deterministic: bool = False,
        reports_non_finite: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`chunk_size`: most tokens of a prompt in one step. `is_deterministic`: what earlier calls have left resident
        is forgotten, so that results depend on a call's own requests only. `reports_non_finite` as in `StepLoop`.
        `facts` of the opening are described beside those of the execution."""
        self._facts = facts or {}
        self.counters = Counters()
        self.runner = runner
        self._is_deterministic = is_deterministic
        self._tap = tap or NoTap()
        self._runners = (runner, *self._tap.runners)
        shared: dict[str, Any] = {"counters": self.counters, "reports_non_finite": reports_non_finite}
        self._scoring = StepLoop(runner, self._tap, chunk_size, rule or ScoringRule(), **shared)
        self._generating = self._scoring
        if tap is not None:
            self._generating = StepLoop(runner, NoTap(), chunk_size, ScoringRule(), **shared)
        self._loops = (self._scoring,) if tap is None else (self._scoring, self._generating)
        self._is_closed = False

    @property
    def context_length(self) -> int:
        """Positions that a scored sequence may occupy at most."""
        return self._scoring.traits.context_length

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Results in the order of `requests`. Raises `LostRequestsError` where an encoder fails on a picture or a sound
        of some."""
        answers, lost = dict[int, Result](), dict[int, str]()
        for place, answer in self.run_slices([list(enumerate(requests))]):
            if isinstance(answer, Lost):
                lost[place] = answer.reason
            else:
                answers[place] = answer
        if lost:
            raise LostRequestsError(lost)
        return [answers[place] for place in range(len(requests))]

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """`(key, result)` of every request as it becomes complete. The requests of a slice, each under a key of its
        own, are planned together; a slice is read when the one before it is complete. A request is `Lost` where an
        encoder fails on a picture or a sound of it."""
        for items in slices:
            if self._is_deterministic:
                self.reset()
            yield from self._run(items)

    @property
    def num_slots(self) -> int:
        """Sequences that are decoded together at most."""
        return self.runner.capacity.num_slots

    def run_chunks(self, chunks: Iterable[Sequence[Request]]) -> Iterator[tuple[int, list[Result | Lost]]]:
        """The number of each chunk and its results, in the order of its requests. Each runs by itself, from an empty
        cache; an empty one is complete at once."""
        for number, requests in enumerate(chunks):
            if requests:
                self.reset()
            answers = dict(self._run(list(enumerate(requests))))
            yield number, [answers[place] for place in range(len(requests))]

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """`(key, result)` pairs in the order in which they complete, without the tap. `items` is read as far ahead as
        one plan needs.

        None among them means that no more is there for now: what has been read runs, and `items` is read again when all
        of it has a slot.
        """
        loop, source = self._generating, iter(items)
        window = WINDOW_PER_SLOT * self.num_slots
        with self._running():
            self._enter(loop)
            batch: list[KeyedRequest] | None = []
            while batch is not None or loop.has_work:
                if batch == [] and loop.num_waiting == 0:
                    batch = _read(source, window)
                if batch and loop.has_room([request for _, request in batch]):
                    loop.admit(batch)
                    batch = []
                for answer in loop.advance() if loop.has_work else ():
                    yield answer.key, answer.result()

    def reset(self) -> None:
        """Forgets what is resident and what is in flight; the model stays open."""
        for loop in self._loops:
            loop.reset()

    def release_memory(self) -> None:
        """`reset`, and frees what has grown with use; the next run allocates it anew."""
        for runner in self._runners:
            runner.release_memory()
        self.reset()
        trim_host_memory()

    def close(self) -> None:
        """Releases the model, and the tap's. Calling it again does nothing."""
        if not self._is_closed:
            for loop in self._loops:
                loop.close()
            self._is_closed = True
            for runner in self._runners:
                runner.close()

    def describe(self) -> dict[str, Any]:
        """Facts of the execution, stable in name."""
        counters = {**asdict(self.counters), "host_bytes": self.runner.host_bytes + self._tap.host_bytes}
        return {
            "deterministic": self._is_deterministic,
            **self._scoring.describe(),
            **self.runner.describe(),
            **({"lengths": list(lengths)} if (lengths := self.runner.traits.lengths) else {}),
            **self._tap.describe(),
            **self._facts,
            "counters": counters,
        }

    def _run(self, items: Sequence[KeyedRequest]) -> Iterator[KeyedResult]:
        has_two = self._generating is not self._scoring
        generated = [item for item in items if item[1].generation is not None] if has_two else []
        scored = [item for item in items if item[1].generation is None] if has_two else items
        with self._running():
            yield from self._score(scored)
            yield from self._drive(self._generating, generated)

    def _score(self, items: Sequence[KeyedRequest]) -> Iterator[KeyedResult]:
        """Runs what the tap does not know already. What is complete is kept, however this ends."""
        known, rest = self._tap.prepare(items)
        yield from known.items()
        try:
            for key, result in self._drive(self._scoring, rest):
                yield key, result if isinstance(result, Lost) else self._tap.finish(key, result)
        finally:
            self._tap.flush()

    def _drive(self, loop: StepLoop, items: Sequence[KeyedRequest]) -> Iterator[KeyedResult]:
        """Runs requests until none is left. Where an encoder fails on an item, requests that have it are lost, and all
        others without an answer are begun anew: a step that failed leaves nothing to go on from."""
        waiting = dict(items)
        while waiting:
            self._enter(loop)
            begun, num_before = len(waiting), self.counters.requests
            try:
                loop.admit(list(waiting.items()))
                while loop.has_work:
                    for answer in loop.advance():
                        del waiting[answer.key]
                        yield answer.key, answer.result()
            except LostItemError as error:
                lost = [key for key, request in waiting.items() if error.key in {run.item.key for run in request.media}]
                if not lost:
                    raise
                loop.reset()
                for key in lost:
                    del waiting[key]
                self.counters.requests = num_before + begun - len(waiting)  # the rest is admitted once more
                yield from ((key, Lost(str(error))) for key in lost)

    def _enter(self, loop: StepLoop) -> None:
        """Gives the runner's slots to `loop`, which forgets what was resident where another one has run since."""
        if not self.runner.residency.claim(loop):
            loop.reset()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Leaves the engine usable after an interruption, which drops what is in flight and what is resident."""
        if self._is_closed:
            raise RunError("this model is closed; open it again")
        for loop in self._loops:
            loop.settle()  # where an interruption was itself interrupted
        try:
            yield
        except BaseException:
            self.reset()
            raise


def _read(source: Iterator[KeyedRequest | None], count: int) -> list[KeyedRequest] | None:
    """The next items, `count` at most, up to the first None; None where there are no more."""
    found: list[KeyedRequest] = []
    for item in islice(source, count):
        if item is None:
            return found
        found.append(item)
    return found or None
