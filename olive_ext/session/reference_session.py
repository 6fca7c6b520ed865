"""Opens sessions with a reference: a resident one, the records of one, or a model whose distributions are recorded.

Chooses the engine's tap. Knows no step and no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from olive_ext.config import Strict
from olive_ext.engine.reference.kernels import Divergence, refuse_other_vocabulary, vocab_size_of
from olive_ext.engine.reference.recorded import ReadingTap, WritingTap
from olive_ext.engine.reference.tap import ResidentTap
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
    with ExitStack() as on_failure:
        reference = _open(reference_model, on_failure)
        own = _open(model, on_failure)
        traits = tokenizer_traits(reference.tokenizer), tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(*traits, reference.name, own.name)
        refuse_other_vocabulary(vocab_size_of(reference.opened.runner), vocab_size_of(own.opened.runner))
        tap = ResidentTap(own.opened.runner, reference.opened, Divergence.at(own.opened.runner))
        on_failure.pop_all()
    session = own.session(tap)
    session.reference = reference.session(beside=session)
    return session


def open_recording(model: ResolvedModel, record_to: str | Path | Mapping[str, Any]) -> Session:
    """The model is a reference: the distributions that targets are scored with are recorded in `record_to`, a folder or
    the keys of `RecordSettings`."""
    wanted = RecordSettings.of(record_to)
    with ExitStack() as on_failure:
        own = _open(model, on_failure)
        form = Form.choose(vocab_size_of(own.opened.runner), wanted.top, wanted.drawn, wanted.seed)
        records = Records.write(wanted.folder, form, facts_of(own))
        on_failure.pop_all()
    return own.session(WritingTap(records, Divergence.at(own.opened.runner)), records=records)


def open_recorded(model: ResolvedModel, records: Records) -> Session:
    """The model is a candidate for the reference that `records` are of."""
    with ExitStack() as on_failure:
        own = _open(model, on_failure)
        traits = tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(records.facts.get("tokenizer", {}), traits, str(records.folder), own.name)
        refuse_other_vocabulary(records.form.vocab_size, vocab_size_of(own.opened.runner))
        on_failure.pop_all()
    return own.session(ReadingTap(records, Divergence.at(own.opened.runner)))


def facts_of(parts: Parts) -> dict[str, Any]:
    """What decides a model's numbers, JSON-ready: records are found by it."""
    execution = parts.opened.runner.describe()
    deciding = {name: execution[name] for name in _DECIDING if name in execution}
    digest = parts.model.digest or "{model}@{revision}".format_map(execution)
    return {"model": digest, "tokenizer": tokenizer_traits(parts.tokenizer), **deciding}


def _open(model: ResolvedModel, on_failure: ExitStack) -> Parts:
    """The model's parts; its logits rows stay where they are computed. Closed where what follows fails."""
    parts = open_parts(replace(model, is_compared=True))
    on_failure.callback(parts.opened.runner.close)
    return parts
