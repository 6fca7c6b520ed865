"""A worker's side: opens the model of a `WorkerJob`, runs chunks on it, and tells how far it is.

Knows no transport: a process of its own and a Ray actor both hold one `Respondent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from olive_ext.config import ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.requests import Lost, Pulse, Request, Result
from olive_ext.model import resolve
from olive_ext.records import Records
from olive_ext.session.local import open_local
from olive_ext.session.session import Session
from olive_ext.session.workers.worker import (
    OWN,
    REFERENCE,
    Envelope,
    ModelFacts,
    Reply,
    Served,
    WorkerJob,
    error_envelope,
)
from olive_ext.text.generation_bounds import StopChecker


class ServedModel:
    """The model of `job`, open in this process."""

    def __init__(self, job: WorkerJob) -> None:
        model = resolve(ModelSettings.parse(job.settings), handed_over=job.handed_over)
        reference: Any = None
        if job.reference is not None:
            reference = resolve(ModelSettings.parse(job.reference))
        elif job.reference_records is not None:
            reference = Records.read(Path(job.reference_records))
        own = open_local(model, reference, job.record_to)
        self._sessions = {OWN: own, **({} if own.reference is None else {REFERENCE: own.reference})}

    @property
    def facts(self) -> Served:
        """Facts of the models, for the parent."""
        models = {name: _facts(_engine(session)) for name, session in self._sessions.items()}
        records = self._sessions[OWN].records
        return Served(models, None if records is None else str(records.folder))

    @property
    def pulse(self) -> Pulse:
        """The pulse of the models together. To be read from any thread."""
        pulses = {name: _engine(session).pulse for name, session in self._sessions.items()}
        name, running = max(pulses.items(), key=lambda item: item[1].size)
        largest = {f"{which}, {kind}": size for which, one in pulses.items() for kind, size in one.largest.items()}
        return Pulse(sum(one.num_steps for one in pulses.values()), f"{name}, {running.kind}", running.size, largest)

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        """Runs one chunk on the worker's own model, or on its resident reference."""
        session = self._sessions[which]
        results: list[Result | Lost] = []
        chunk = [_received(request, session) for request in requests]
        session.executor.run_chunks([chunk], lambda _, of_chunk: results.extend(of_chunk))
        return Reply(results, asdict(session.counters), session.executor.describe())

    def call(self, which: str, name: str) -> Any:
        """Calls `describe`, `reset` or `release_memory` of one of the executors."""
        return getattr(self._sessions[which].executor, name)()

    def close(self) -> None:
        """Releases the models."""
        self._sessions[OWN].close()


class Respondent:
    """A `ServedModel` behind messages. Errors are answers, so that no transport has to carry or wrap an exception."""

    def __init__(self, open_served: Callable[[WorkerJob], Any] = ServedModel) -> None:
        """`open_served` makes what answers from the job of the first message."""
        self._open_served = open_served
        self._served: Any = None

    def answer(self, name: str, *arguments: Any) -> Envelope:
        """Answers "open" with the `Served` of a job, "pulse", and the methods of `ServedModel`."""
        try:
            if name == "open":
                self._served = self._open_served(*arguments)
                return None, self._served.facts
            return None, self.pulse() if name == "pulse" else getattr(self._served, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised in the parent, whatever it is
            return error_envelope(error)

    def pulse(self) -> Pulse | None:
        """How far the model is; None before it is open."""
        pulse: Pulse | None = None if self._served is None else self._served.pulse
        return pulse

    def close(self) -> None:
        """Releases the model."""
        if self._served is not None:
            self._served.close()


def to_send(request: Request) -> Request:
    """The request as it travels: a worker makes its own search for stops from their texts."""
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


def _engine(session: Session) -> Engine:
    assert isinstance(session.executor, Engine)
    return session.executor


def _facts(engine: Engine) -> ModelFacts:
    return ModelFacts(engine.context_length, engine.num_slots, engine.runner.traits, engine.describe())
