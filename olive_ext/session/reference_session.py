"""Opens sessions that compare: beside an open reference, against the records of one, or making these records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from olive_ext.config import EngineConfig, Strict
from olive_ext.engine.engine import Engine
from olive_ext.engine.reference.kernels import refuse_other_vocabulary
from olive_ext.engine.reference.placement import divergence_of, vocab_size_of
from olive_ext.engine.reference.recorded import RecordedRunner, RecordingRunner
from olive_ext.engine.reference.resident import PairRunner
from olive_ext.engine.reference.scorers import ComparingEngine, RecordedScorer, RecordingScorer, SharingEngine, Turns
from olive_ext.engine.scheduling.scoring_form import ScoringSteps, pinned_size
from olive_ext.engine.step import Runner
from olive_ext.model import ResolvedModel
from olive_ext.records import Form, Records
from olive_ext.session.opening import Parts, open_parts
from olive_ext.session.session import Session
from olive_ext.text.tokenizer_traits import refuse_other_tokenizer, tokenizer_traits

_DECIDING = ("runtime", "runtime_version", "dtype", "providers", "adapters")
"""Facts of an execution that change a model's numbers."""


class RecordSettings(Strict):
    """Where and how a session's distributions are recorded, for candidates to be compared with them."""

    folder: str
    """Root of the records; each reference has a folder of its own in it."""

    top: int | None = None
    """Most probable tokens of a position that are kept. None takes 64, fewer of small vocabularies."""

    drawn: int | None = None
    """Tokens drawn from the rest. None takes 32, fewer of small vocabularies."""

    seed: int = Field(default=0, ge=0)

    @classmethod
    def of(cls, record_to: str | Path | Mapping[str, Any]) -> RecordSettings:
        """From a folder, or the keys."""
        given = dict(record_to) if isinstance(record_to, Mapping) else {"folder": str(record_to)}
        return cls.parse({**given, "folder": str(given.get("folder"))}, where="record_to")


def open_beside(model: ResolvedModel, reference_model: ResolvedModel) -> Session:
    """Both models resident. Closing the session closes both, and `Session.reference`."""
    reference = _open(reference_model)
    try:
        own = _open(model)
    except BaseException:
        reference.engine.close()
        raise
    try:
        refuse_other_tokenizer(
            tokenizer_traits(reference.tokenizer), tokenizer_traits(own.tokenizer), reference.name, own.name
        )
        refuse_other_vocabulary(vocab_size_of(reference.engine), vocab_size_of(own.engine))
        pair = PairRunner(own.engine.runner, reference.engine.runner, divergence_of(own.engine.runner))
    except BaseException:
        own.engine.close()
        reference.engine.close()
        raise
    turns = Turns()
    chunk_size = min(own.engine.chunk_size, reference.engine.chunk_size)
    compared = _beside(own, pair, turns, chunk_size, model.settings.engine)
    session = own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, compared))
    session.reference = reference.session(SharingEngine(reference.engine, turns), beside=session)
    return session


def open_recording(model: ResolvedModel, record_to: str | Path | Mapping[str, Any]) -> Session:
    """The model is a reference: what it says of what is scored is recorded in `record_to`, a folder or the keys of
    `RecordSettings`."""
    wanted = RecordSettings.of(record_to)
    own = _open(model)
    try:
        runner = own.engine.runner
        form = Form.choose(vocab_size_of(own.engine), wanted.top, wanted.drawn, wanted.seed)
        records = Records.write(wanted.folder, form, facts_of(own))
    except BaseException:
        own.engine.close()
        raise
    turns = Turns()
    recording = RecordingRunner(runner, records, divergence_of(runner))
    compared = _beside(own, recording, turns, own.engine.chunk_size, model.settings.engine)
    scorer = RecordingScorer(compared, records)
    return own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, scorer), records=records)


def open_recorded(model: ResolvedModel, records: Records) -> Session:
    """The model is a candidate for the reference that `records` are of."""
    own = _open(model)
    try:
        traits = tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(records.facts.get("tokenizer", {}), traits, str(records.folder), own.name)
        refuse_other_vocabulary(records.form.vocab_size, vocab_size_of(own.engine))
        runner = RecordedRunner(own.engine.runner, records, divergence_of(own.engine.runner))
    except BaseException:
        own.engine.close()
        raise
    turns = Turns()
    compared = _beside(own, runner, turns, own.engine.chunk_size, model.settings.engine)
    return own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, RecordedScorer(compared, records)))


def _open(model: ResolvedModel) -> Parts:
    """The model's parts; its rows of logits stay where they are computed."""
    return open_parts(model.with_reference())


def facts_of(parts: Parts) -> dict[str, Any]:
    """What decides a model's numbers, JSON-ready: records are found by it."""
    execution = parts.engine.describe()
    deciding = {name: execution[name] for name in _DECIDING if name in execution}
    digest = parts.model.digest or "{model}@{revision}".format_map(execution)
    return {"model": digest, "tokenizer": tokenizer_traits(parts.tokenizer), **deciding}


def _beside(own: Parts, runner: Runner, turns: Turns, chunk_size: int, config: EngineConfig) -> SharingEngine:
    """An engine over `runner` that counts for `own`'s, too."""
    steps = ScoringSteps(runner, pinned_size(config, chunk_size))
    return SharingEngine(Engine(runner, chunk_size, steps, own.engine.counters), turns)
