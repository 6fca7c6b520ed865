"""A worker's side: opens the model that a job names, runs chunks on it, and says how far it is.

Knows no transport: a process of its own and a Ray actor both hold one `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext import errors
from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Lost, Pulse, Request, Result
from olive_ext.engine.runners.runner import Traits
from olive_ext.errors import OliveExtError, RunError, one_line
from olive_ext.model import resolve
from olive_ext.records import Records
from olive_ext.text.generation_bounds import StopChecker

if TYPE_CHECKING:
    from olive_ext.session.session import Session

OWN, REFERENCE = "own", "reference"
"""Which of a worker's models runs a chunk."""


@dataclass(frozen=True)
class Job:
    """What a worker opens: settings as JSON, so that a worker on another machine reads them as they were written."""

    settings: Mapping[str, Any]
    handed_over: Any = None
    """The provider that Olive's accelerator names."""

    reference: Mapping[str, Any] | None = None
    """Settings of a resident reference."""

    reference_records: str | None = None
    """Folder of a recorded one."""

    record_to: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What a session has to know of a model that is open elsewhere."""

    context_length: int
    num_slots: int
    traits: Traits
    execution: Mapping[str, Any]
    """`Engine.describe`."""


@dataclass(frozen=True)
class Served:
    """Facts of a worker's models once they are open."""

    models: Mapping[str, ModelFacts]
    records: str | None
    """Folder of the records that it writes."""


@dataclass(frozen=True)
class Reply:
    """The results of a chunk, and the counters of the worker since it began."""

    results: Sequence[Result | Lost]
    counters: Mapping[str, int]
    execution: Mapping[str, Any] = field(default_factory=dict)
    """`Engine.describe` behind the chunk."""


class ServedModel:
    """The model of `job`, open in this process."""

    def __init__(self, job: Job) -> None:
        from olive_ext.session.opening import open_model

        model = resolve(ModelSettings.parse(job.settings), handed_over=job.handed_over)
        reference: Any = None
        if job.reference is not None:
            reference = resolve(ModelSettings.parse(job.reference))
        elif job.reference_records is not None:
            reference = Records.read(Path(job.reference_records))
        self._session = open_model(model, reference, job.record_to)
        self._sessions = {OWN: self._session, REFERENCE: self._session.reference}

    @property
    def facts(self) -> Served:
        """What the parent is told once the model is open."""
        models = {name: _facts(session) for name, session in self._sessions.items() if session is not None}
        records = self._session.records
        return Served(models, None if records is None else str(records.folder))

    @property
    def pulse(self) -> Pulse:
        """That of the models together. To be read from any thread."""
        found = {name: _engine(session).pulse for name, session in self._sessions.items() if session is not None}
        name, running = max(found.items(), key=lambda item: item[1].size)
        largest = {f"{which}, {kind}": size for which, one in found.items() for kind, size in one.largest.items()}
        return Pulse(sum(one.num_steps for one in found.values()), f"{name}, {running.kind}", running.size, largest)

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        """Runs one chunk on the worker's own model, or on its resident reference."""
        session = self._sessions[which]
        assert session is not None
        found: list[Result | Lost] = []
        asked = [_received(request, session) for request in requests]
        session.executor.run_chunks([asked], lambda _, results: found.extend(results))
        return Reply(found, asdict(session.counters), session.executor.describe())

    def call(self, which: str, name: str) -> Any:
        """`describe`, `reset` or `release_memory` of one of the executors."""
        session = self._sessions[which]
        assert session is not None
        return getattr(session.executor, name)()

    def close(self) -> None:
        """Releases the models."""
        self._session.close()


def told_error(error: Exception) -> tuple[str, str]:
    """An error as it travels: our own by its name, others as a `RunError`."""
    is_ours = isinstance(error, OliveExtError)
    return type(error).__name__ if is_ours else "RunError", str(error) if is_ours else one_line(error)


def read_error(told: tuple[str, str]) -> OliveExtError:
    """The error that `told_error` was made from."""
    kind, message = told
    try:
        error: OliveExtError = getattr(errors, kind)(message)
    except (AttributeError, TypeError):  # made from more than a message
        return RunError(message)
    return error


def to_send(request: Request) -> Request:
    """The request as it travels: a worker makes its own search for stops from their texts."""
    generation = request.generation
    return request if generation is None else replace(request, generation=replace(generation, is_finished=None))


def _received(request: Request, session: Session) -> Request:
    """The request with what does not travel: the processor of its pictures, and the search for its stops."""
    generation = request.generation
    if session.media is not None and request.media:
        adopt = session.media.processor.adopt
        request = replace(request, media=tuple(replace(run, item=adopt(run.item)) for run in request.media))
    if generation is None or not generation.stops:
        return request
    checker = StopChecker(session.tokenizer, generation.stops)
    return replace(request, generation=replace(generation, is_finished=checker))


def _engine(session: Session) -> Engine:
    assert isinstance(session.executor, Engine)
    return session.executor


def _facts(session: Session) -> ModelFacts:
    engine = _engine(session)
    return ModelFacts(engine.context_length, engine.num_slots, engine.runner.traits, engine.describe())
