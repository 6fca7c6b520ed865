"""Opens a session: from what a user wrote, resolved, to tokenizer and engine; with a reference also the engine's tap.

The reference is resident, or its records are read, or the model is one and writes them. Knows no step and no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from olive_ext.config import EngineConfig, ModelSettings, Strict
from olive_ext.config.model import ProviderOptions, ProviderRequest
from olive_ext.engine.opening import engine_on, open_runner
from olive_ext.engine.reference.kernels import Divergence, refuse_other_vocabulary, vocab_size_of
from olive_ext.engine.reference.recorded import ReadingTap, WritingTap
from olive_ext.engine.reference.tap import ResidentTap, Tap
from olive_ext.engine.requests import NUMBERS
from olive_ext.engine.runners.runner import OpenedRunner, Traits
from olive_ext.errors import ConfigError
from olive_ext.media import MediaProcessor
from olive_ext.media.sound import tell_other_features
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.hub import asked_where_it_answers
from olive_ext.records import Form, Records
from olive_ext.session.executor import Executor, RecordsElsewhere
from olive_ext.session.session import Session
from olive_ext.session.warm_up import warm_up
from olive_ext.session.workers.opening import open_crew
from olive_ext.session.workers.pool import WorkerPool
from olive_ext.session.workers.served_model import OWN, REFERENCE
from olive_ext.text.encoder_decoder import Encoding, read_encoding
from olive_ext.text.generation_bounds import read_stop_ids
from olive_ext.text.placeholders import MediaText, read_markers
from olive_ext.text.token_ids import Rows, refuse_smaller_vocabulary
from olive_ext.text.tokenizer import Tokenizer, load_tokenizer, refuse_other_tokenizer, tokenizer_traits

_DECIDING = ("runtime", "runtime_version", "dtype", "providers", "adapters")
"""Facts of an execution that change a model's numbers."""

Reference = str | Path | Mapping[str, Any] | ResolvedModel | Records
"""A model to compare with: its path or settings, the resolved model, or the records of its distributions."""


class RecordSettings(Strict):
    """Where and how a session's distributions are recorded, for candidates to be compared with them."""

    folder: Annotated[str, BeforeValidator(str)]
    """Root of the records; each reference has a folder of its own in it."""

    top: int | None = None
    """Most probable tokens of a position that are kept. None takes 64, fewer of small vocabularies."""

    drawn: int | None = None
    """Tokens drawn from the rest. None takes 32, fewer of small vocabularies."""

    seed: int = Field(default=0, ge=0)


def open(
    model: str | Path,
    *,
    kind: str = "auto",
    dtype: str = "float32",
    device: str | None = None,
    execution_provider: ProviderRequest | None = None,
    provider_options: ProviderOptions | list[ProviderOptions] | None = None,
    provider_libraries: Mapping[str, str] | None = None,
    allow_cpu_fallback: bool = False,
    max_length: int | None = None,
    batch_size: int | str = "auto",
    non_finite: str = "error",
    deterministic: bool | str = "auto",
    trust_remote_code: bool = False,
    tokenizer: str | Path | None = None,
    onnx_file_name: str | None = None,
    components: Mapping[str, str] | None = None,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    language: str | None = None,
    speech_task: str | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    isolation: str = "none",
    step_timeout: int | str = "auto",
    workers: int | Mapping[str, Any] | None = None,
    reference: str | Path | Mapping[str, Any] | Records | None = None,
    record_to: str | Path | Mapping[str, Any] | None = None,
) -> Session:
    """Opens the model at `model`: an ONNX file or folder, a genai package, Olive's output folder, or a Hugging Face
    model, which runs on transformers in `dtype` on `device`; `kind` "onnx" or "hf" chooses where a folder has both.

    Arguments mean what the keys of the same name mean in a recipe; `add_bos_token` and `prefix_token_id` are those of
    `Tokenizer`. Raises `ConfigError`, `ModelError` or `ProviderError`.

    With a `reference` every score has in `compared` how far the two models' distributions are apart. `reference` is a
    path, a mapping of arguments of this function (what it leaves out of providers, threads and lengths is taken from
    this call), or the `Records` of a reference. `record_to`, a folder or a mapping ("folder", "top", "drawn", "seed"),
    makes this model a reference: its distributions are kept on disk, and candidates are opened with `Session.records`.
    """
    settings = ModelSettings.of({name: value for name, value in locals().items() if name in ModelSettings.model_fields})
    _refuse_both(reference, record_to)
    resolved = resolve(settings)
    with asked_where_it_answers((resolved.settings.model, str(resolved.files.tokenizer))):
        return open_model(resolved, reference, record_to)


def open_model(
    model: ResolvedModel,
    reference: Reference | None = None,
    record_to: str | Path | Mapping[str, Any] | None = None,
) -> Session:
    """A session on a resolved model; `reference` and `record_to` as in `open`."""
    _refuse_both(reference, record_to)
    if reference is not None and not isinstance(reference, ResolvedModel | Records):
        reference = resolve(model.settings.of_reference(reference))
    if model.settings.workers is not None or model.settings.isolation == "process":
        return _open_elsewhere(model, reference, record_to)
    if reference is None and record_to is None:
        return open_parts(model).with_engine()
    if record_to is not None:
        return _open_recording(model, record_to)
    if isinstance(reference, Records):
        return _open_recorded(model, reference)
    assert reference is not None
    return _open_resident(model, reference)


def _refuse_both(reference: object, record_to: object) -> None:
    if reference is not None and record_to is not None:
        raise ConfigError("'reference' and 'record_to' were both given: a model is a candidate or a reference")


@dataclass(frozen=True)
class TextParts:
    """What a session has of a model besides its weights: how texts become tokens, and what else a request may hold."""

    model: ResolvedModel
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    encoding: Encoding | None
    media: MediaText | None

    @property
    def name(self) -> str:
        """The model as the user named it, for errors."""
        return self.model.settings.model

    def session(
        self,
        executor: Executor,
        *,
        records: Records | RecordsElsewhere | None = None,
        beside: Session | None = None,
    ) -> Session:
        """A session whose requests `executor` runs."""
        facts = {"model": self.model.name, "tokenizer": self.tokenizer.where, "stop_ids": sorted(self.stop_ids)}
        return Session(
            executor,
            self.tokenizer,
            stop_ids=self.stop_ids,
            facts=facts,
            encoding=self.encoding,
            records=records,
            model=self.model,
            media=self.media,
            beside=beside,
        )


@dataclass(frozen=True)
class Parts(TextParts):
    """An open model, not yet a session."""

    opened: OpenedRunner

    def with_engine(
        self, tap: Tap | None = None, *, records: Records | None = None, beside: Session | None = None
    ) -> Session:
        """A session with an engine in this process; `tap` notes what is scored."""
        return self.session(engine_on(self.opened, self.model, tap), records=records, beside=beside)


def _open_elsewhere(model: ResolvedModel, reference: ResolvedModel | Records | None, record_to: Any) -> Session:
    """A session on workers; the texts stay in this process."""
    crew = open_crew(model, reference, record_to)
    served = crew.served

    def session(opened: ResolvedModel, which: str, **given: Any) -> Session:
        text = _text_parts(opened, open_tokenizer(opened), served.models[which].traits)
        return text.session(WorkerPool(crew, which), **given)

    records = None if served.records is None else RecordsElsewhere(Path(served.records))
    own = session(model, OWN, records=records)
    if isinstance(reference, ResolvedModel):
        own.reference = session(reference, REFERENCE, beside=own)
    return own


def open_parts(model: ResolvedModel) -> Parts:
    """Tokenizer, stop tokens and runner of a model. Raises `ModelError`, `ProviderError` or `ConfigError`."""
    tokenizer = open_tokenizer(model)
    if model.runtime[0] == "onnxruntime":  # a mistake in a configuration costs no opening
        read_stop_ids(tokenizer, model.files)
        read_encoding(tokenizer, model, model.source or (None, None))
    opened = open_runner(model)
    parts = Parts(**vars(_text_parts(model, tokenizer, opened.runner.traits)), opened=opened)
    if model.warms_encoders:
        warm_up(parts.opened, parts.media, parts.encoding, is_strict=model.settings.engine.strict_shapes)
    return parts


def open_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer. Raises `ModelError` where it has tokens that the model does not."""
    settings = model.settings
    tokenizer = load_tokenizer(
        model.files.tokenizer,
        add_bos_token=settings.add_bos_token,
        prefix_token_id=settings.prefix_token_id,
        trust_remote_code=settings.trust_remote_code,
    )
    tokenizer.rows = Rows.of(model)
    if model.runtime[0] == "onnxruntime":
        refuse_smaller_vocabulary(tokenizer, model.spec.vocab_size, str(model.files.decoder))
    return tokenizer


def _text_parts(model: ResolvedModel, tokenizer: Tokenizer, traits: Traits) -> TextParts:
    """Stop tokens and processors; `traits` are those of the model's runner, wherever that is."""
    files, num_threads = model.processor_files, model.settings.engine.threads
    stop_ids = read_stop_ids(tokenizer, files)
    encoding = read_encoding(tokenizer, model, (traits.source_kind, traits.source))
    media = None
    if model.media is not None:
        media = read_markers(MediaProcessor(model.media, files, num_threads), files, tokenizer, traits.item_limit)
    return TextParts(model, tokenizer, stop_ids, encoding, media)


def _open_resident(model: ResolvedModel, reference_model: ResolvedModel) -> Session:
    """Opens both models. Closing the session closes both models, and `Session.reference`."""
    with ExitStack() as on_failure:
        reference = _open(reference_model, on_failure)
        own = _open(model, on_failure)
        traits = tokenizer_traits(reference.tokenizer), tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(*traits, reference.name, own.name)
        refuse_other_vocabulary(vocab_size_of(reference.opened.runner), vocab_size_of(own.opened.runner))
        if reference.encoding is not None and own.encoding is not None:
            tell_other_features(reference.encoding.sound, own.encoding.sound)
        seen = {} if reference.media is None else {"own_item": reference.media.processor.own}
        tap = ResidentTap(own.opened.runner, reference.opened, Divergence.at(own.opened.runner), **seen)
        on_failure.pop_all()
    session = own.with_engine(tap)
    session.reference = reference.with_engine(beside=session)
    return session


def _open_recording(model: ResolvedModel, record_to: str | Path | Mapping[str, Any]) -> Session:
    """The model is a reference: the distributions that targets are scored with are recorded in `record_to`, a folder or
    the keys of `RecordSettings`."""
    given = record_to if isinstance(record_to, Mapping) else {"folder": record_to}
    wanted = RecordSettings.parse(given, where="record_to")
    with ExitStack() as on_failure:
        own = _open(model, on_failure)
        form = Form.choose(vocab_size_of(own.opened.runner), wanted.top, wanted.drawn, wanted.seed)
        records = Records.write(wanted.folder, form, facts_of(own))
        on_failure.pop_all()
    return own.with_engine(WritingTap(records, Divergence.at(own.opened.runner)), records=records)


def _open_recorded(model: ResolvedModel, records: Records) -> Session:
    """The model is a candidate for the reference that `records` are of."""
    with ExitStack() as on_failure:
        own = _open(model, on_failure)
        traits = tokenizer_traits(own.tokenizer)
        refuse_other_tokenizer(records.facts.get("tokenizer", {}), traits, str(records.folder), own.name)
        refuse_other_vocabulary(records.form.vocab_size, vocab_size_of(own.opened.runner))
        on_failure.pop_all()
    return own.with_engine(ReadingTap(records, Divergence.at(own.opened.runner)))


def facts_of(parts: Parts) -> dict[str, Any]:
    """The facts that decide a model's numbers, JSON-ready: the key by which records are found."""
    execution = parts.opened.runner.describe()
    deciding = {"numbers": NUMBERS, **{name: execution[name] for name in _DECIDING if name in execution}}
    digest = parts.model.digest or "{model}@{revision}".format_map(execution)
    is_deterministic = parts.model.settings.deterministic is True
    if lengths := parts.opened.runner.traits.lengths:
        deciding["lengths"] = list(lengths)
    tokenizer = tokenizer_traits(parts.tokenizer)
    return {"model": digest, "tokenizer": tokenizer, "deterministic": is_deterministic, **deciding}


def _open(model: ResolvedModel, on_failure: ExitStack) -> Parts:
    """The model's parts; its logits rows stay where they are computed. Closed where what follows fails."""
    parts = open_parts(replace(model, is_compared=True))
    on_failure.callback(parts.opened.runner.close)
    return parts
