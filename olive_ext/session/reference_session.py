"""Opens sessions with a reference: a resident one, the records of one, or a model whose distributions are recorded.

Chooses the engine's tap. Knows no step and no graph.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from olive_ext.config import EngineConfig
from olive_ext.engine.engine import Engine
from olive_ext.engine.reference.kernels import Divergence, refuse_other_vocabulary, vocab_size_of
from olive_ext.engine.reference.recorded import ReadingTap, WritingTap
from olive_ext.engine.reference.tap import ResidentTap, Tap
from olive_ext.engine.scheduling.scoring_form import ScoringForm
from olive_ext.records import Form, Records
from olive_ext.session.parts import Parts, open_parts
from olive_ext.session.session import Session
from olive_ext.session.settings import RecordSettings, Settings
from olive_ext.text.same import refuse_other_tokenizer, tokenizer_traits

_DECIDING = ("runtime", "runtime_version", "dtype", "providers", "adapters")
"""Facts of an execution that change a model's numbers."""


def open_beside(settings: Settings, of_reference: Settings) -> Session:
    """Both models resident. Closing the session closes both, and `Session.reference`."""
    with ExitStack() as on_failure:
        reference = _open(of_reference, on_failure)
        own = _open(settings, on_failure)
        traits = tokenizer_traits(reference.tokenizer), tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(*traits, reference.name, own.name)
        runners = own.engine.runner, reference.engine.runner
        refuse_other_vocabulary(vocab_size_of(runners[1]), vocab_size_of(runners[0]))
        tap = ResidentTap(*runners, Divergence.at(runners[0]), reference.engine.chunk_size)
        on_failure.pop_all()
    session = own.session(_tapped(own, tap, settings.engine))
    session.reference = reference.session(beside=session)
    return session


def open_recording(settings: Settings, wanted: RecordSettings) -> Session:
    """The model is a reference: the distributions that targets are scored with are recorded under `wanted.folder`."""
    with ExitStack() as on_failure:
        own = _open(settings, on_failure)
        form = Form.choose(vocab_size_of(own.engine.runner), wanted.top, wanted.drawn, wanted.seed)
        records = Records.write(wanted.folder, form, facts_of(own))
        on_failure.pop_all()
    tap = WritingTap(records, Divergence.at(own.engine.runner))
    return own.session(_tapped(own, tap, settings.engine), records=records)


def open_recorded(settings: Settings, records: Records) -> Session:
    """The model is a candidate for the reference that `records` are of."""
    with ExitStack() as on_failure:
        own = _open(settings, on_failure)
        traits = tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(records.facts.get("tokenizer", {}), traits, str(records.folder), own.name)
        refuse_other_vocabulary(records.form.vocab_size, vocab_size_of(own.engine.runner))
        tap = ReadingTap(records, Divergence.at(own.engine.runner))
        on_failure.pop_all()
    return own.session(_tapped(own, tap, settings.engine))


def facts_of(parts: Parts) -> dict[str, Any]:
    """What decides a model's numbers, JSON-ready: records are found by it."""
    execution = parts.engine.describe()
    deciding = {name: execution[name] for name in _DECIDING if name in execution}
    return {"model": parts.content_hash(), "tokenizer": tokenizer_traits(parts.tokenizer), **deciding}


def _open(settings: Settings, on_failure: ExitStack) -> Parts:
    parts = open_parts(settings, exposes_rows=True)
    on_failure.callback(parts.engine.close)
    return parts


def _tapped(own: Parts, tap: Tap, config: EngineConfig) -> Engine:
    return Engine(own.engine.runner, own.engine.chunk_size, ScoringForm.of(config), tap)
