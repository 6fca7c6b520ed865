"""What a crew and its workers agree on: what a worker opens, answers and raises. Also a worker's own side: it opens the
model of a `WorkerJob`, runs chunks on it, and reports its progress.

Knows no chunk's position in a call. A process of its own (`ProcessWorker`) and a Ray actor both hold a `ServedModel`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from typing_extensions import override

from olive_ext import errors
from olive_ext.config import ModelSettings
from olive_ext.engine.requests import Lost, Request, Result
from olive_ext.errors import ANY_FAILURE, MismatchError, OliveExtError, RunError, one_line
from olive_ext.media.items import ItemLimit
from olive_ext.model import ResolvedModel, resolve
from olive_ext.package_versions import runtimes
from olive_ext.python_processes import BEAT_S, ChildEndedError, ChildProcess, serve
from olive_ext.records import Records
from olive_ext.session.generation_bounds import StopChecker
from olive_ext.session.local import RecordTo, open_local
from olive_ext.session.session import Session
from olive_ext.session.tokenizer import Tokenizer

OWN, REFERENCE = "own", "reference"
"""Which of a worker's models runs a chunk."""


@dataclass(frozen=True)
class WorkerJob:
    """What a worker opens: settings as JSON, so that a worker on another machine reads them as they were written."""

    settings: Mapping[str, Any]
    reference: Mapping[str, Any] | str | None = None
    """Settings of a resident reference, or the folder of a recorded one."""

    record_to: RecordTo | None = None
    tokenizers: Sequence[Tokenizer | None] = (None, None)
    """The tokenizers of both models, where the parent passes them on."""

    digests: Sequence[str | None] = (None, None)
    """Digests of both models' files when the job was made: a worker that opens them later must find the same."""


@dataclass(frozen=True)
class ModelFacts:
    """What a session must know of a model that is open elsewhere."""

    context_length: int
    num_slots: int
    item_limit: ItemLimit
    execution: Mapping[str, Any]
    """`Engine.describe`."""

    @classmethod
    def of(cls, session: Session) -> ModelFacts:
        """Those of an open model."""
        executor, limit = session.executor, ItemLimit() if session.media is None else session.media.limit
        return cls(executor.context_length, executor.num_slots, limit, executor.describe())

    @property
    def room(self) -> str:
        """The facts that decide how many sequences share a step, where runs must repeat."""
        positions = self.execution.get("slot_positions") if self.execution.get("deterministic") else None
        return f"{self.num_slots} sequences" + (f" of {positions} positions in all" if positions else "")


@dataclass(frozen=True)
class Served:
    """Facts of a worker's models once they are open."""

    models: Mapping[str, ModelFacts]
    records: str | None
    """Folder of the records that it writes."""

    versions: Mapping[str, str] = field(default_factory=runtimes)
    """Those of the libraries that compute in its process."""

    def refuse_unlike(self, name: str, first: Served) -> None:
        """Raises `RunError` where the worker `name` has other room, or other libraries, than the first one."""
        rooms = [f"room for {one.models[OWN].room}" for one in (self, first)]
        libraries = [", ".join(map(" ".join, one.versions.items())) for one in (self, first)]
        for (own, other), advice in ((rooms, "set 'engine.num_slots'"), (libraries, "install the same everywhere")):
            if own != other:
                raise RunError(f"{name} has {own}, others {other}: {advice}")


@dataclass(frozen=True)
class Reply:
    """The results of a chunk, and what the engine counted while it ran."""

    results: Sequence[Result | Lost]
    counters: Mapping[str, int]
    execution: Mapping[str, Any] = field(default_factory=dict)
    """`Engine.describe` after the chunk."""


class WorkerLostError(Exception):
    """The worker has ended, or was ended because it hung. The message says how, as a clause: "ended by SIGSEGV"."""

    def __init__(self, how: str, advice: str = "") -> None:
        """`advice`: what may help where the worker ended before it could do anything, after ": "."""
        super().__init__(how)
        self.advice = advice


class Worker(Protocol):
    """One worker. Calls block; another thread may `stop` it meanwhile."""

    name: str
    """The worker's, for progress and messages."""

    def open(self) -> Served:
        """Starts the worker, also a lost one, and opens its model. Raises errors of opening, or `WorkerLostError`."""

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        """Runs a chunk. Raises `WorkerLostError`, and what the model raises."""

    def release_memory(self, which: str) -> None:
        """Frees what has grown with use. Raises as `run`."""

    def stop(self) -> None:
        """Ends it, at once where it is busy. May be called again."""


class Watchdog:
    """Whether a worker hangs: it has completed no step for `limit_s` seconds while a chunk runs. 0 means never."""

    most_s = 5.0
    """The most seconds that count between two checks: after more, the checking process itself stood still."""

    def __init__(self, limit_s: int = 0) -> None:
        self._limit_s = limit_s or math.inf
        self._num_steps: int | None = None
        self._looked = self._still_s = 0.0

    def begin(self, now: float) -> None:
        """A chunk begins at `now` (seconds)."""
        self._num_steps, self._looked, self._still_s = None, now, 0.0

    def is_hung(self, now: float, num_steps: int | None) -> bool:
        """Whether the worker hangs at `now` (seconds). `num_steps`: its completed steps, None where unknown."""
        self._still_s += min(now - self._looked, self.most_s)
        self._looked = now
        if num_steps is not None and num_steps != self._num_steps:
            self._num_steps, self._still_s = num_steps, 0.0
        return self._still_s > self._limit_s


def content_of(answer: Any) -> Any:
    """The content of a `ServedModel`'s answer; if it is an error, raises it."""
    if isinstance(answer, OliveExtError):
        raise answer
    return answer


class ServedModel:
    """A worker's side: opens the models of a job, and answers messages. Errors are answers, too, so that no transport
    has to wrap an exception."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def answer(self, name: str, *arguments: Any) -> Any:
        """What the method `name` returns, or the error that it raises."""
        try:
            return getattr(self, name)(*arguments)
        except OliveExtError as error:
            return error
        except ANY_FAILURE as error:
            return RunError(one_line(error))

    def open(self, job: WorkerJob) -> Served:
        """Opens the models of `job` in this process; their facts."""
        model = _resolved(job.settings, job.digests[0])
        reference: Any = job.reference
        if isinstance(reference, str):
            reference = Records.read(reference)
        elif reference is not None:
            reference = _resolved(reference, job.digests[1])
        own = open_local(model, reference, job.record_to, job.tokenizers)
        self._sessions = {OWN: own, **({} if own.reference is None else {REFERENCE: own.reference})}
        models = {name: ModelFacts.of(session) for name, session in self._sessions.items()}
        return Served(models, None if own.records is None else str(own.records.folder))

    def num_steps(self) -> int | None:
        """Steps that the models have completed together; None before they are open. To be called from any thread."""
        return sum(session.executor.counters.steps for session in self._sessions.values()) if self._sessions else None

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        """Runs one chunk on the worker's own model, or on its resident reference."""
        session = self._sessions[which]
        chunk = [_received(request, session) for request in requests]
        before = asdict(session.counters)
        ((_, results),) = session.executor.run_chunks([list(enumerate(chunk))])
        counted = {name: count - before[name] for name, count in asdict(session.counters).items()}
        return Reply(results, counted, session.executor.describe())

    def release_memory(self, which: str) -> None:
        """Frees what has grown with use."""
        self._sessions[which].executor.release_memory()

    def close(self) -> None:
        """Releases the models."""
        for session in self._sessions.values():
            session.close()


def _resolved(settings: Mapping[str, Any], digest: str | None) -> ResolvedModel:
    model = resolve(ModelSettings.parse(settings))
    if model.digest != digest:
        raise MismatchError(f"files of '{model.name}' have changed since the run began: run again")
    return model


def to_send(request: Request) -> Request:
    """The request in the form that travels: a worker makes its own search for stops from their texts."""
    generation = request.generation
    if generation is None:
        return request
    thinking = generation.thinking and replace(generation.thinking, is_over=None)
    return replace(request, generation=replace(generation, is_finished=None, thinking=thinking))


def _received(request: Request, session: Session) -> Request:
    """The request with what does not travel: the processor of its pictures, and the search for its stops."""
    generation = request.generation
    if session.media is not None and request.media:
        adopt = session.media.processor.adopt
        request = replace(request, media=tuple(replace(run, item=adopt(run.item)) for run in request.media))
    if generation is None:
        return request
    thinking, stops = generation.thinking, generation.stops
    if thinking is not None and thinking.text:
        thinking = replace(thinking, is_over=StopChecker(session.tokenizer, (thinking.text,)))
    checker = StopChecker(session.tokenizer, stops) if stops else None
    return replace(request, generation=replace(generation, is_finished=checker, thinking=thinking))


_TAKE_LESS = ": close other programs, or take less ('engine.num_slots', 'max_length', 'workers', 'reference.mode')"
_SEE_ABOVE = ": what it printed is above"
_CHILD = "from olive_ext.session.workers.worker import serve_model; serve_model()"


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
        reply: Reply = self._answer("run", which, [*map(to_send, requests)], is_watched=True)
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
