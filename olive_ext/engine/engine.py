"""Opens a resolved model with the library that its runtime names, and runs requests, whose results come as they become
complete. An `Engine` has one or two `StepLoop`s. Each runs a scheduler's steps on a runner, lets a tap note them, and
splits a step for which memory does not suffice. Knows no text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial, reduce
from itertools import islice
from operator import is_not, itemgetter
from typing import Any

from olive_ext.engine.forms.tree import TreeSteps
from olive_ext.engine.reference import Tap
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Lost, Request, Result
from olive_ext.engine.runners.runner import OpenedRunner, Runner, ScoringRule, Traits
from olive_ext.engine.scheduling.planned_step import ReadAhead, StepThread
from olive_ext.engine.scheduling.prefix_tree import MediaIds, Plan, make_plan, plan_in_parts
from olive_ext.engine.scheduling.scheduler import Planning, Scheduler
from olive_ext.engine.scheduling.sequences import PendingResult
from olive_ext.engine.step import UNLIMITED, Capacity, Step, StepOutput
from olive_ext.errors import LostItemError, LostRequestsError, MemoryShortageError, ModelError, OliveExtError, RunError
from olive_ext.media.items import ItemLimit
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import trim_host_memory
from olive_ext.model.runtimes import failures_named, refuse_settings

logger = logging.getLogger(__name__)

WINDOW_PER_SLOT = 16
"""Requests that `run_continuous` plans together, for each slot: enough to share prefixes, few enough to stream."""


class Engine:
    """Runs requests on one runner. Not thread-safe: one call at a time.

    With a tap, requests that are only scored run as the tap allows, and are noted. Generation runs on the runner alone,
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
        reports_non_finite: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """`chunk_size`: the most tokens of a prompt in one step. `reports_non_finite` is as in `StepLoop`. `facts` of
        the opening are described beside those of the execution."""
        self._facts = facts or {}
        self.counters = Counters()
        self.runner = runner
        self._tap = tap or Tap()
        self._runners = (runner, *self._tap.runners)
        new_loop = partial(StepLoop, runner, chunk_size, self.counters, reports_non_finite)
        self._scoring = new_loop(rule or ScoringRule(), self._tap)
        self._generating = self._scoring if tap is None else new_loop(ScoringRule(), Tap())
        self._loops = dict.fromkeys((self._scoring, self._generating))
        self._is_closed = False

    @property
    def context_length(self) -> int:
        """The most positions that a scored sequence may occupy."""
        return self._scoring.traits.context_length

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Results in the order of `requests`. Raises `LostRequestsError` where an encoder fails on an item of some."""
        results = sorted(self.run_slices([list(enumerate(requests))]), key=itemgetter(0))
        if lost := {place: result.reason for place, result in results if isinstance(result, Lost)}:
            raise LostRequestsError(lost)
        return [result for _, result in results if isinstance(result, Result)]

    def run_slices(self, slices: Iterable[Sequence[KeyedRequest]]) -> Iterator[KeyedResult]:
        """`(key, result)` of every request as it becomes complete. The requests of a slice, each under its own key, are
        planned together. A slice is read when the one before it is complete, or while a device computes that one. The
        result is `Lost` where an encoder fails on a picture or a sound of the request."""
        ahead = ReadAhead(part for items in slices for part in self._scoring.planned(items))
        for items in filter(None, ahead):
            yield from self._run(items, ahead.read)

    @property
    def num_slots(self) -> int:
        """The most sequences that are decoded together."""
        return self.runner.capacity.num_slots

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[tuple[int, list[Result | Lost]]]:
        """The number of each chunk and its results, in the order of its requests. Each chunk runs by itself, from an
        empty cache; an empty one is complete at once."""
        ahead = ReadAhead(chunks)
        for number, items in enumerate(ahead):
            if items:
                self.reset()
            results = dict(self._run(items, ahead.read))
            yield number, [results[key] for key, _ in items]

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """`(key, result)` pairs in the order in which they complete, without the tap. `items` is read as far ahead as
        one plan needs.

        A None among them means that no more is there for now: the requests so far run, and `items` is read again when
        all of them have a slot.
        """
        loop, source = self._generating, iter(items)
        window = WINDOW_PER_SLOT * self.num_slots
        with self._running():
            self._enter(loop)
            batch: list[KeyedRequest] | None = []
            while batch is not None or loop.has_work:
                if batch == [] and loop.scheduler.num_waiting == 0:
                    batch = _read(source, window)
                if batch and loop.has_room([request for _, request in batch]):
                    loop.admit(batch)
                    batch = []
                yield from loop.advance() if loop.has_work else ()

    def reset(self) -> None:
        """Drops all resident sequences and those in progress; the model stays open."""
        for loop in self._loops:
            loop.reset()

    def release_memory(self) -> None:
        """As `reset`, and frees what has grown with use; the next run allocates it anew."""
        for runner in self._runners:
            runner.release_memory()
        self.reset()
        trim_host_memory()

    def close(self) -> None:
        """Releases the model, and the tap's. Calling it again does nothing."""
        if not self._is_closed:
            for loop in self._loops:
                loop.thread.close()  # nothing may run on what is about to be released
            self._is_closed = True
            for runner in self._runners:
                runner.close()

    def describe(self) -> dict[str, Any]:
        """Facts of the execution, under stable names."""
        counters = {**asdict(self.counters), "host_bytes": self.runner.host_bytes + self._tap.host_bytes}
        return {
            **self._scoring.describe(),
            **self.runner.describe(),
            **({"lengths": list(lengths)} if (lengths := self.runner.traits.lengths) else {}),
            **self._tap.describe(),
            **self._facts,
            "counters": counters,
        }

    def _run(self, items: Sequence[KeyedRequest], work: Callable[[], bool]) -> Iterator[KeyedResult]:
        """The results of `items`. The host does `work`, part by part, while it would wait."""
        has_two = self._generating is not self._scoring
        generated = [item for item in items if item[1].generation is not None] if has_two else []
        scored = [item for item in items if item[1].generation is None] if has_two else items
        with self._running():
            yield from self._score(scored, work)
            yield from self._drive(self._generating, generated, work)

    def _score(self, items: Sequence[KeyedRequest], work: Callable[[], bool]) -> Iterator[KeyedResult]:
        """Runs what the tap does not know already. Complete results are kept, however the run ends."""
        known, rest = self._tap.prepare(items)
        yield from known.items()
        try:
            for key, result in self._drive(self._scoring, rest, work):
                yield key, result if isinstance(result, Lost) else self._tap.finish(key, result)
        finally:
            self._tap.flush()

    def _drive(self, loop: StepLoop, items: Sequence[KeyedRequest], work: Callable[[], bool]) -> Iterator[KeyedResult]:
        """Runs requests until none is left."""
        if items:
            self._enter(loop)
            loop.admit(items)
            while loop.has_work:
                yield from loop.advance(work)

    def _enter(self, loop: StepLoop) -> None:
        """Gives the runner's slots to `loop`, which drops what was resident where another loop has run since."""
        if not self.runner.residency.claim(loop):
            loop.reset()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Leaves the engine usable after an interruption: drops what is resident and in progress."""
        if self._is_closed:
            raise RunError("this model is closed; open it again")
        for loop in self._loops:
            loop.thread.settle()  # where an interruption was itself interrupted
        try:
            yield
        except BaseException:
            self.reset()
            raise


def _read(source: Iterator[KeyedRequest | None], count: int) -> list[KeyedRequest] | None:
    """The next items, at most `count`, up to the first None; None where there are no more."""
    items: list[KeyedRequest] = []
    for item in islice(source, count):
        if item is None:
            return items
        items.append(item)
    return items or None


class StepLoop:
    """One scheduler with its runner: which sequences are resident, and how long a step may be.

    After a step that failed, nothing is resident. Where memory did not suffice for it, all requests without a result
    begin anew, in shorter steps. Where an encoder failed on an item, requests that have it are lost first.
    """

    def __init__(
        self,
        runner: Runner,
        chunk_size: int,
        counters: Counters,
        reports_non_finite: bool,
        rule: ScoringRule,
        tap: Tap,
    ) -> None:
        """`reports_non_finite`: requests whose output is not finite are counted instead of raising `NonFiniteError`."""
        self._runner, self._runners = runner, (runner, *tap.runners)
        self._reports_non_finite = reports_non_finite
        self._tap = tap
        self._chunk_size = min(chunk_size, tap.longest_step)
        self._counters = counters
        is_tree = self.traits.tree_batches
        self._steps = TreeSteps(self._chunk_size, rule) if is_tree else self.traits.form.scored_steps(rule)
        self._limit = UNLIMITED
        self._positions = self._cells = 0
        self._media_ids = MediaIds()
        self._plan: tuple[Sequence[Request], Plan | None] = (), None
        self._unfinished: dict[Any, Request] = {}
        """The requests without a result."""

        self._lost: list[KeyedResult] = []
        self.scheduler = self._new_scheduler()
        self.thread = StepThread(runner.run)

    @property
    def traits(self) -> Traits:
        """The traits that both the runner and the tap have."""
        return self._tap.traits(self._runner)

    @property
    def capacity(self) -> Capacity:
        """The memory that both the runner and the tap have."""
        return reduce(Capacity.both, [runner.capacity for runner in self._runners])

    @property
    def has_work(self) -> bool:
        """Whether a result is missing."""
        return bool(self._lost) or self.scheduler.has_work

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Whether `requests` may be admitted now: memory can only be reserved while nothing runs."""
        positions, cells = self._needed(*_longest(requests))
        capacity, in_use = self.capacity, self._in_use
        has_slots = in_use.for_sequences(positions) == in_use
        is_reserved = positions <= capacity.positions and cells <= in_use.cells and has_slots
        return is_reserved or not self.scheduler.has_work

    def admit(self, items: Sequence[KeyedRequest]) -> None:
        """Plans `(key, request)` pairs together. Raises `OliveExtError` for one that the model cannot take."""
        self._unfinished |= dict(items)
        self._counters.requests += len(items)
        self._begin(items)

    def _begin(self, items: Sequence[KeyedRequest]) -> None:
        while items:
            try:
                self._admit(items)
                return
            except LostItemError as error:  # noqa: PERF203 - the rest is begun anew for each item that is lost
                self._lose(error)
                items = self._forgotten()

    def _admit(self, items: Sequence[KeyedRequest]) -> None:
        requests = [request for _, request in items]
        scored, generated = _longest(requests)
        most = self.traits.context_length
        if max(scored, generated) > most:
            key, needed = next((key, request.num_positions) for key, request in items if request.num_positions > most)
            raise OliveExtError(f"request {key!r} needs {needed} positions; the model has {most} (max_length)")
        self._check(requests)
        if [True for request in requests if request.media]:
            items = [(key, self._media_ids.put(request)) for key, request in items]
            for request in requests:
                self._runner.expect_media(request.media)
                for other in self._tap.runners:
                    other.expect_media(self._tap.own_media(request.media))
        (planned, plan), self._plan = self._plan, ((), None)
        if plan is None or len(planned) != len(items) or any(map(is_not, planned, requests)):
            plan = make_plan(items, self.traits.chunked_prefill, self.traits.side)
        if not self.scheduler.has_work:
            self._steps.choose(plan.sequences, self.capacity)
        positions, cells = self._needed(scored, generated)
        for runner in self._runners:
            runner.reserve(positions, cells)
        self._positions, self._cells = max(self._positions, positions), max(self._cells, cells)
        self._check_beams(items)
        in_use = self._in_use
        has_work = self.scheduler.has_work
        renewed = [not has_work and runner.renew(in_use.num_slots, self._positions) for runner in self._runners]
        if any(renewed) or self.scheduler.key != (in_use, *self._steps.sizes):
            self.scheduler = self._new_scheduler()
        self._counters.tokens_naive += plan.tokens_naive
        self._counters.tokens_distinct += plan.tokens_distinct
        self.scheduler.add(plan.sequences)

    def planned(self, items: Sequence[KeyedRequest]) -> Iterator[Sequence[KeyedRequest]]:
        """Yields `items`; before them, where a device is busy meanwhile, an empty slice for each part of their
        planning. `admit` then uses that plan, if it gets these very items."""
        requests = [request for _, request in items]
        if self.traits.overlaps_steps and requests and not any(request.media for request in requests):
            for part in plan_in_parts(items, self.traits.chunked_prefill, self.traits.side):
                self._plan = requests, part
                yield []
        yield items

    def advance(self, work: Callable[[], bool] = lambda: False) -> list[KeyedResult]:
        """Takes in one step and begins the next where it is known. Returns the results that are complete now. The host
        does `work`, part by part, while it would wait."""
        completed: list[PendingResult] = []
        try:
            if (scheduler := self.scheduler).has_work:
                scheduler.schedule()
                if (overlapped := scheduler.schedule_overlapped()) is not None:
                    if not self.thread.num_begun:
                        self.thread.begin(scheduler.present.step)
                    self.thread.begin(overlapped)
                    self.thread.wait(work)
                output = self.thread.take() if self.thread.num_begun else self.run(scheduler.present.step)
                completed = scheduler.update(output)
        except (MemoryShortageError, LostItemError) as error:
            if isinstance(error, LostItemError):
                self._lose(error)
            else:
                self._cut_steps(self.scheduler.present.step, error)
            self._begin(self._forgotten())
        lost, self._lost = self._lost, []
        for result in completed:
            del self._unfinished[result.key]
        return [*lost, *((result.key, result.finished()) for result in completed)]

    def run(self, step: Step) -> StepOutput:
        """The step's output with the tap's notes, in place of the logits rows, which only the tap reads."""
        output = self._runner.run(step)
        notes_T = self._tap.note(step, output)
        return output if notes_T is None else replace(output, logits_RV=None, notes_T=notes_T)

    def reset(self) -> None:
        """Drops what is resident and what is in progress."""
        self._positions = self._cells = 0
        self.scheduler = self._new_scheduler()
        self._media_ids = MediaIds()
        self._unfinished, self._lost = {}, []
        self.thread.settle()

    def describe(self) -> dict[str, Any]:
        """The sizes of steps, and the reasons for them."""
        facts = {"chunk_size": self._chunk_size, **self._steps.describe()}
        return {**facts, "step_limit": self._limit} if self._limit < UNLIMITED else facts

    def _check(self, requests: Sequence[Request]) -> None:
        """Raises `OliveExtError` for a source, a picture or a sound that the model cannot take."""
        for source in dict.fromkeys([request.source for request in requests]):
            for runner in self._runners:
                runner.check_source(source)
        for media in [request.media for request in requests if request.media]:
            self._runner.check_media(media)
            for other in self._tap.runners:
                other.check_media(self._tap.own_media(media))
            for run in media:
                self.traits.item_limit.check(run.item)

    def _check_beams(self, items: Sequence[KeyedRequest]) -> None:
        """Raises `OliveExtError` for a search whose beams have no slot each, do not fit in the KV cache together, or
        would pass a length beyond which the model computes texts otherwise."""
        capacity = self.capacity
        for key, request in items:
            if request.generation is None or request.generation.beams is None:
                continue
            beams, begin, most = request.generation.num_slots, len(request.tokens), request.num_positions
            if beams > (num_slots := self._runner.capacity.num_slots):
                why = self._runner.describe().get("num_slots_origin", "engine.num_slots")
                slots = f"the session has {num_slots} ({why})"
                raise OliveExtError(f"'num_beams' = {beams} needs a slot for each beam; {slots}", "num_beams")
            if (last := self.traits.side(begin).last) < most:
                text = f"of {begin} tokens to {most} would pass {last}, where this model computes texts otherwise"
                raise OliveExtError(f"a beam search from a prompt {text}: give a smaller 'max_new_tokens', or one beam")
            number, size = capacity.blocks
            if beams * -(-most // size) > number if number else beams > self._in_use.num_slots:
                shown = f"'num_beams' = {beams}, of up to {most} positions each"
                held = number * size or capacity.most_positions
                raise OliveExtError(f"request {key!r}: {shown}, is beyond the KV cache's {held} positions")

    def _needed(self, scored: int, generated: int) -> tuple[int, int]:
        traits = self.traits
        return self._steps.memory(scored, generated, traits.context_length, traits.row_group)

    def _cut_steps(self, step: Step, error: MemoryShortageError) -> None:
        """Halves the most tokens of a step. Raises the error where `step` cannot be shorter."""
        most, is_beyond = step.num_tokens // 2, step.num_tokens > self._limit
        if len(step.rows) == 1 and is_beyond:
            shown = f"{error}; the {step.num_tokens} tokens of a picture or a sound are fed in one step"
            raise MemoryShortageError(shown) from error
        if not most or is_beyond:
            raise error
        self._counters.steps_halved += 1
        self._limit = most
        logger.warning("%s; steps are cut to %d tokens", error, self._limit)

    def _lose(self, error: LostItemError) -> None:
        """Loses the requests that have the item on which an encoder failed."""
        media = {key: {run.item.key for run in request.media} for key, request in self._unfinished.items()}
        lost = [key for key, items in media.items() if error.key in items]
        if not lost:
            raise error
        for key in lost:
            del self._unfinished[key]
        self._lost += [(key, Lost(str(error))) for key in lost]

    def _forgotten(self) -> list[KeyedRequest]:
        """Returns all requests without a result, none of which is resident any more."""
        unfinished, lost = self._unfinished, self._lost
        self.reset()
        self._unfinished, self._lost = unfinished, lost
        return [*unfinished.items()]

    @property
    def _in_use(self) -> Capacity:
        """The capacity with the cells and slots that were needed since the last reset. Earlier requests may have left
        more, but steps depend on the present requests alone, and so do the last bits of their numbers."""
        capacity = self.capacity.for_sequences(self._positions)
        return capacity._replace(cells=min(self._cells, capacity.cells))

    def _new_scheduler(self) -> Scheduler:
        """Makes a new scheduler: one knows a single capacity, and a single way in which scored texts share steps."""
        runner = self.traits, self._in_use, self._counters
        return Scheduler(Planning(*runner, self._chunk_size, self._steps, self._limit, self._reports_non_finite))


def _longest(requests: Sequence[Request]) -> tuple[int, int]:
    scored = [request.num_positions for request in requests if request.generation is None]
    generated = [request.num_positions for request in requests if request.generation is not None]
    return max(scored, default=0), max(generated, default=0)


def open_runner(model: ResolvedModel) -> OpenedRunner:
    """Opens a runner of the decoder of `model`, which takes pictures and sounds of as many tokens as its steps may
    have. Raises `ModelError` for a model that cannot be scored or run, `ProviderError` for a provider that does not
    come up, and `ConfigError` for settings that the runtime cannot keep."""
    runtime = model.runtime
    for sentence in refuse_settings(model):
        logger.warning("%s", sentence)
    with failures_named(runtime, "open"):
        opened = runtime.open(model)
    if not isinstance(opened, OpenedRunner):
        raise ModelError(f"'engine.runtime' = '{runtime.name}' opened {type(opened).__name__}: give an OpenedRunner")
    limit = item_limit(model, opened.chunk_size, opened.runner.traits.form.longest_step)
    opened.runner.traits = replace(opened.runner.traits, item_limit=limit)
    return opened


def item_limit(model: ResolvedModel, chunk_size: int, longest_step: int = UNLIMITED) -> ItemLimit:
    """The most tokens of a picture or a sound, where steps of the model have up to `chunk_size` tokens: as many, where
    a setting or the device says so, else `longest_step`. A decoder that is fed whole requests has no chunks."""
    engine, is_graph = model.settings.engine, model.runtime.runs_graph
    if is_graph and model.spec.alone:
        return ItemLimit()
    if engine.chunk_size != "auto" and chunk_size == engine.chunk_size:
        why = f"'engine.chunk_size' = {chunk_size} allows fewer"
        return ItemLimit(chunk_size, why, is_strict=engine.strict_shapes)
    if is_graph and chunk_size < model.chunk_size[0]:
        return ItemLimit(chunk_size, f"steps of this model are cut to {chunk_size} tokens on this device")
    if is_graph and engine.strict_shapes:
        why = f"'engine.strict_shapes' = true, and steps of up to {chunk_size} tokens are run beforehand"
        return ItemLimit(chunk_size, f"{why}: give a larger 'engine.chunk_size'", is_strict=True)
    if longest_step < UNLIMITED:
        why = f"steps of this form have at most {longest_step} on this device, because longer ones may crash"
        return ItemLimit(longest_step, why if model.spec.is_paged else f"{why}: give 'engine.scoring' = \"rows\"")
    return ItemLimit()


def engine_on(opened: OpenedRunner, model: ResolvedModel, tap: Tap | None = None) -> Engine:
    """The engine of an opened model, which closing it releases. Without a tap, only a graph's steps follow the rule."""
    settings, rule = model.settings, ScoringRule()
    if model.runtime.runs_graph or tap is not None:  # by cost, where neither the form nor the chunk size is named
        is_open = settings.engine.scoring != "tree" and settings.engine.chunk_size == "auto"
        rule = ScoringRule(is_open, "engine.scoring")
    return Engine(
        *opened,
        rule,
        tap,
        reports_non_finite=settings.non_finite == "report",
        facts={"deterministic": settings.deterministic is True},
    )


def open_engine(model: ResolvedModel, tap: Tap | None = None) -> Engine:
    """An engine on a runner of its own; errors as in `open_runner`."""
    return engine_on(open_runner(model), model, tap)
