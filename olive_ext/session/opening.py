"""Opens a session: from what a user wrote to settings, to the resolved model, to a session here or on workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext.config import ModelSettings
from olive_ext.config.base import takes
from olive_ext.errors import ContradictionError, suggest
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.records import Records
from olive_ext.session.answer_journal import RecordsElsewhere
from olive_ext.session.local import RecordTo, Texts, open_local, read_texts
from olive_ext.session.session import Session
from olive_ext.session.workers.crew import WorkerPool, open_crew
from olive_ext.session.workers.worker import OWN, REFERENCE

Reference = str | Path | Mapping[str, Any] | ResolvedModel | Records | RecordsElsewhere
"""A model to compare with: its path or settings, the resolved model, or the records of its distributions."""


@takes(ModelSettings)
def open(
    model: str | Path | ModelSettings,
    *,
    reference: Reference | None = None,
    record_to: RecordTo | None = None,
    **settings: Any,
) -> Session:
    """Opens the model at `model`: an ONNX file or folder, a genai package, Olive's output folder, or a Hugging Face
    model, which runs on transformers in `dtype` on `device`; `kind` "onnx" or "hf" chooses where a folder has both.

    `settings` mean what the keys of the same name mean in a recipe: the fields of `ModelSettings`, an object of which
    may take their place. Raises `ConfigError`, `ModelError` or `ProviderError`, and `TypeError` for an unknown name.

    With a `reference` every score has in `compared` how far the two models' distributions are apart. `reference` is a
    path, a mapping of arguments of this function (what it leaves out of providers, threads and lengths is taken from
    this call), or the `Records` of a reference. `record_to`, a folder or a mapping ("folder", "top", "drawn", "seed"),
    makes this model a reference: its distributions are kept on disk, and candidates are opened with `Session.records`.
    """
    resolved = resolve(_settings(model, {name: value for name, value in settings.items() if value is not None}))
    with offline_if_unreachable((resolved.settings.model, str(resolved.files.tokenizer))):
        return open_model(resolved, resolved_reference(resolved, reference), record_to)


def _settings(model: str | Path | ModelSettings, named: Mapping[str, Any]) -> ModelSettings:
    """The settings of opening `model`, a path, with those that were `named`; or `model` itself."""
    known = ModelSettings.model_fields.keys() - {"model"}
    if unknown := sorted(named.keys() - known):
        problem = f"open() got an unexpected keyword argument '{unknown[0]}'"
        raise TypeError(": ".join(filter(None, [problem, suggest(unknown[0], known)])))
    if not isinstance(model, ModelSettings):
        return ModelSettings.of({"model": model, **named})
    if named:
        raise ContradictionError("it was given beside a ModelSettings: put it into the settings", min(named))
    return model


def resolved_reference(model: ResolvedModel, reference: Reference | None) -> ResolvedModel | Records | None:
    """What `open_model` takes as the `reference` of `model`: a path and settings are resolved."""
    if reference is None or isinstance(reference, ResolvedModel | Records):
        return reference
    if isinstance(reference, RecordsElsewhere):
        return Records.read(reference.folder)
    return resolve(model.settings.of_reference(reference), key="reference")


def open_model(
    model: ResolvedModel, reference: ResolvedModel | Records | None = None, record_to: RecordTo | None = None
) -> Session:
    """A session on a resolved model; `reference` and `record_to` as in `open`."""
    if reference is not None and record_to is not None:
        raise ContradictionError("'record_to' is for references: leave one of the two out", "reference")
    if model.settings.workers is not None or model.settings.isolation == "process":
        return _open_elsewhere(model, reference, record_to)
    return open_local(model, reference, record_to)


def _open_elsewhere(
    model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: RecordTo | None
) -> Session:
    """A session on workers; the texts stay in this process, and mistakes in their files cost no worker."""
    own_texts = read_texts(model)
    other_texts = read_texts(reference) if isinstance(reference, ResolvedModel) else None
    tokenizers = [None if texts is None else texts.for_worker() for texts in (own_texts, other_texts)]
    crew = open_crew(model, reference, record_to, tokenizers)
    served = crew.served

    def session(texts: Texts, which: str, beside: Session | None = None) -> Session:
        media = texts.media(served.models[which].item_limit)
        return texts.session(WorkerPool(crew, which), media, beside)

    candidate = session(own_texts, OWN)
    candidate.records = None if served.records is None else RecordsElsewhere(Path(served.records))
    if other_texts is not None:
        candidate.reference = session(other_texts, REFERENCE, candidate)
    return candidate
