"""Workers as a session's executor: `open_crew` opens the workers of a resolved model, and `WorkerPool` runs on them in
chunks what an engine runs. Knows no text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from typing_extensions import override

from olive_ext import errors
from olive_ext.config import ModelSettings
from olive_ext.config.execution import WorkerSettings
from olive_ext.engine.requests import Counters, KeyedRequest, KeyedResult, Request
from olive_ext.model import ResolvedModel
from olive_ext.python_processes import BEAT_S, ChildEndedError, ChildProcess, serve, usable_processors
from olive_ext.records import Records
from olive_ext.registry import hook
from olive_ext.session.answer_journal import ChunkResults, Executor
from olive_ext.session.tokenizer import Tokenizer
from olive_ext.session.workers.crew import Crew
from olive_ext.session.workers.worker import (
    OWN,
    Reply,
    Served,
    ServedModel,
    Watchdog,
    Worker,
    WorkerJob,
    WorkerLostError,
    content_of,
)

WINDOW_CHUNKS = 8
"""Requests of a stream that are planned together, for each worker and in multiples of its slots."""

_COUNTS = ("s_encoded", "_cache_hits", "s_evicted", "encoder_runs", "_late")
"""The endings of facts that count a worker's work: those of all workers are added."""


class WorkerPool(Executor):
    """One of the models that `crew` has open."""

    context_length = num_slots = 0

    def __init__(self, crew: Crew, which: str = OWN) -> None:
        self._crew, self._which, facts = crew, which, crew.served.models[which]
        self.context_length, self.num_slots = facts.context_length, facts.num_slots

    @property
    def counters(self) -> Counters:
        """The counters of all workers together."""
        return self._crew.counters

    @property
    def at_work(self) -> str:
        """See `Crew.at_work`."""
        return self._crew.at_work

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[ChunkResults]:
        """Runs each chunk on whichever worker is free."""
        return self._crew.run(self._which, ([request for _, request in items] for items in chunks))

    def run_continuous(self, items: Iterable[KeyedRequest | None]) -> Iterator[KeyedResult]:
        """Runs the items that are there, up to a few times what the slots of all workers hold; then reads on."""
        most = WINDOW_CHUNKS * self.num_slots * len(self._crew.workers)
        window: list[KeyedRequest] = []
        for item in chain(items, [None]):
            if item is not None:
                window.append(item)
            if window and (item is None or len(window) >= most):
                yield from list(self.run_slices([window]))  # all of them: who stops reading ends no worker
                window = []

    def release_memory(self) -> None:
        """Frees what has grown with use, on every worker."""
        self._crew.release_memory(self._which)

    def describe(self) -> dict[str, Any]:
        """The facts of a worker's execution, of one whose trial failed if there is one, and the number of workers."""
        names = [worker.name for worker in self._crew.workers]
        executions = self._crew.executions(self._which)
        first = max(executions, key=lambda one: "parts_failure" in one)
        counts = {name: sum(one.get(name, 0) for one in executions) for name in first if name.endswith(_COUNTS)}
        counters = [execution.get("counters", {}) for execution in executions]
        others = counters[0].keys() - vars(Counters()).keys()  # the engine's own are live: `counters`
        summed = {name: sum(counter[name] for counter in counters) for name in others}
        workers = {"names": names, "lost": self._crew.num_lost}
        return {**first, **counts, "counters": summed, "workers": workers}

    def close(self) -> None:
        """Ends the workers."""
        self._crew.stop()


def open_crew(
    model: ResolvedModel,
    reference: ResolvedModel | Records | None,
    record_to: Any,
    tokenizers: Sequence[Tokenizer | None],
) -> Crew:
    """The open workers that the settings of `model` ask for. Records are written by one worker alone. `tokenizers` are
    for workers on this machine."""
    wanted, limit_s = model.settings.workers, model.settings.step_timeout
    if wanted is None:
        job = replace(_job_of(model, reference, record_to, 1), tokenizers=tokenizers)
        return Crew([ProcessWorker(job, Watchdog(limit_s))])
    count = 1 if record_to is not None else wanted.count
    job = _job_of(model, reference, record_to, count if wanted.address is None else 1)
    return Crew(hook("workers", "'workers'")(job, wanted, [Watchdog(limit_s) for _ in range(count)]))


def _job_of(model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: Any, share: int) -> WorkerJob:
    """The job of each of `share` workers on this machine: the model's settings, with the machine's threads divided.
    Their number decides how much memory each may take."""
    other: Mapping[str, Any] | str | None = None
    digests = [model.digest, None]
    if isinstance(reference, Records):
        other = str(reference.folder.resolve())
    elif reference is not None:
        other, digests[1] = _settings(reference, share), reference.digest
    keys = record_to if isinstance(record_to, Mapping) or record_to is None else {"folder": str(record_to)}
    return WorkerJob(_settings(model, share), other, keys, digests=digests)


def _settings(model: ResolvedModel, share: int) -> dict[str, Any]:
    engine = model.settings.engine
    if share > 1 and engine.num_threads == "auto":
        engine = engine.model_copy(update={"num_threads": max(1, (usable_processors() or 1) // share)})
    given = {
        "deterministic": model.settings.deterministic is not False,
        "isolation": "none",
        "workers": WorkerSettings(count=share) if share > 1 else None,
        "tokenizer": model.files.tokenizer,
        "engine": engine,
    }
    settings: ModelSettings = model.settings.model_copy(update=given)
    return settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)


_TAKE_LESS = ": close other programs, or take less ('engine.num_slots', 'max_length', 'workers', 'reference.mode')"
_SEE_ABOVE = ": what it printed is above"
_CHILD = "from olive_ext.session.workers.pool import serve_model; serve_model()"


class ProcessWorker(Worker):
    """A child process with the model of `job`."""

    def __init__(self, job: WorkerJob, watchdog: Watchdog, name: str = "worker", child: str = _CHILD) -> None:
        """`child`: the Python text that the child runs; it calls `serve_model`."""
        self.name = name
        self._program = child
        self._job = job
        self._watchdog = watchdog
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._child is None else self._child.pid

    @override
    def open(self) -> Served:
        self.stop()
        self._child = ChildProcess(self._program)  # another thread may stop it from here on
        served: Served = self._answer("open", self._job)
        return served

    @override
    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self._watchdog.begin(time.monotonic())
        reply: Reply = self._answer("run", which, requests, is_watched=True)
        return reply

    @override
    def release_memory(self, which: str) -> None:
        self._answer("release_memory", which)

    @override
    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _answer(self, *message: Any, is_watched: bool = False) -> Any:
        """The child's answer to the message, after its beats."""
        child = self._child
        if child is None:
            raise WorkerLostError("not running")
        try:
            child.send(message)
            while True:
                kind, content = child.receive(2 * BEAT_S)
                if kind == "answer":
                    return content_of(content)
                if is_watched and self._watchdog.is_hung(time.monotonic(), content):
                    self.stop()
                    raise WorkerLostError("ended because it hung")
        except ChildEndedError as error:
            self._child = None
            advice = _TAKE_LESS if error.was_killed else _SEE_ABOVE if str(error).startswith("ended ") else ""
            raise WorkerLostError(str(error), advice) from None


def serve_model(kind: type[ServedModel] = ServedModel) -> None:
    """The child: answers messages until there are no more."""
    for logger in (errors.logger, logging.getLogger("olive_ext.model")):
        logger.setLevel(logging.ERROR)  # the parent has logged what is ignored, and has resolved the same models
    served = kind()
    serve(lambda message: served.answer(*message), served.num_steps)
    served.close()
