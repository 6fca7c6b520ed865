"""Opens sessions that compare: beside an open reference, against the records of one, or making these records."""

from __future__ import annotations

from typing import Any

from olive_ext.config import EngineConfig
from olive_ext.engine.engine import Engine
from olive_ext.engine.reference.kernels import refuse_other_vocabulary
from olive_ext.engine.reference.placement import divergence_of, vocab_size_of
from olive_ext.engine.reference.recorded import RecordedRunner, RecordingRunner
from olive_ext.engine.reference.resident import PairRunner
from olive_ext.engine.reference.scorers import ComparingEngine, RecordedScorer, RecordingScorer, SharingEngine, Turns
from olive_ext.engine.scheduling.scoring_form import ScoringSteps, pinned_size
from olive_ext.engine.step import Runner
from olive_ext.records import Form, Records
from olive_ext.session.parts import Parts, open_parts
from olive_ext.session.session import Session
from olive_ext.session.settings import RecordSettings, Settings
from olive_ext.text.tokenizer_traits import refuse_other_tokenizer, tokenizer_traits

_DECIDING = ("runtime", "runtime_version", "dtype", "providers", "adapters")
"""Facts of an execution that change a model's numbers."""


def open_beside(settings: Settings, of_reference: Settings) -> Session:
    """Both models resident. Closing the session closes both, and `Session.reference`."""
    reference = open_parts(of_reference, exposes_rows=True)
    try:
        own = open_parts(settings, exposes_rows=True)
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
    compared = _beside(own, pair, turns, chunk_size, settings.engine)
    session = own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, compared))
    session.reference = reference.session(SharingEngine(reference.engine, turns), beside=session)
    return session


def open_recording(settings: Settings, wanted: RecordSettings) -> Session:
    """The model is a reference: what it says of what is scored is recorded under `wanted.folder`."""
    own = open_parts(settings, exposes_rows=True)
    try:
        runner = own.engine.runner
        form = Form.choose(vocab_size_of(own.engine), wanted.top, wanted.drawn, wanted.seed)
        records = Records.write(wanted.folder, form, facts_of(own))
    except BaseException:
        own.engine.close()
        raise
    turns = Turns()
    recording = RecordingRunner(runner, records, divergence_of(runner))
    compared = _beside(own, recording, turns, own.engine.chunk_size, settings.engine)
    scorer = RecordingScorer(compared, records)
    return own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, scorer), records=records)


def open_recorded(settings: Settings, records: Records) -> Session:
    """The model is a candidate for the reference that `records` are of."""
    own = open_parts(settings, exposes_rows=True)
    try:
        traits = tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(records.facts.get("tokenizer", {}), traits, str(records.folder), own.name)
        refuse_other_vocabulary(records.form.vocab_size, vocab_size_of(own.engine))
        runner = RecordedRunner(own.engine.runner, records, divergence_of(own.engine.runner))
    except BaseException:
        own.engine.close()
        raise
    turns = Turns()
    compared = _beside(own, runner, turns, own.engine.chunk_size, settings.engine)
    return own.session(ComparingEngine(SharingEngine(own.engine, turns), compared, RecordedScorer(compared, records)))


def facts_of(parts: Parts) -> dict[str, Any]:
    """What decides a model's numbers, JSON-ready: records are found by it."""
    execution = parts.engine.describe()
    deciding = {name: execution[name] for name in _DECIDING if name in execution}
    return {"model": parts.content_hash(), "tokenizer": tokenizer_traits(parts.tokenizer), **deciding}


def _beside(own: Parts, runner: Runner, turns: Turns, chunk_size: int, config: EngineConfig) -> SharingEngine:
    """An engine over `runner` that counts for `own`'s, too."""
    steps = ScoringSteps(runner, pinned_size(config, chunk_size))
    return SharingEngine(Engine(runner, chunk_size, steps, own.engine.counters), turns)
