"""Opens a resolved model in this process: its texts (tokenizer, stop ids, an encoder-decoder's source, pictures and
sounds), its runner, and with a reference the tap that compares them.

The reference is resident, or its records are read, or the model is one and writes them. Knows no step and no graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from olive_ext.config import StrictModel
from olive_ext.engine.engine import engine_on, open_runner
from olive_ext.engine.reference import (
    DivergenceKernels,
    ReadingTap,
    ResidentTap,
    Tap,
    WritingTap,
    comparable_tokens,
    key_of,
    known_result,
    vocab_size_of,
)
from olive_ext.engine.requests import NUMBERS, Counters, KeyedRequest, Request, Result
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ModelError, RecordsError
from olive_ext.media.items import ItemLimit, Source
from olive_ext.media.processor import MediaProcessor, are_other_features
from olive_ext.model import ResolvedModel
from olive_ext.records import Form, Records
from olive_ext.records.journal import Journal
from olive_ext.session.answer_journal import ChunkResults, Executor
from olive_ext.session.generation_bounds import StopIds, read_stop_ids
from olive_ext.session.placeholders import Encoding, MediaText, read_encoding, read_markers
from olive_ext.session.session import Session
from olive_ext.session.tokenizer import Rows, Tokenizer, load_tokenizer
from olive_ext.session.tokenizer_fit import (
    hold_to_files,
    refuse_other_tokenizer,
    refuse_smaller_vocabulary,
    tokenizer_traits,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """How requests of texts become requests of tokens for one model."""

    model: ResolvedModel
    tokenizer: Tokenizer
    stops: StopIds
    """Tokens that end every generation."""

    encoding: Encoding | None
    """How an encoder-decoder's requests are converted; None for a decoder."""

    def media(self, limit: ItemLimit) -> MediaText | None:
        """How pictures and sounds of at most `limit` tokens are put into prompts; None for a model without them."""
        if self.model.media is None:
            return None
        files = self.model.processor_files
        processor = MediaProcessor(self.model.media, files, self.model.settings.engine.threads)
        return read_markers(processor, files, self.tokenizer, limit)

    def for_worker(self) -> Tokenizer | None:
        """A tokenizer for a worker, which only decodes; None where a worker also encodes (sources, pictures, sound)."""
        if self.encoding is not None or self.model.media is not None:
            return None
        return self.tokenizer.for_worker(tokenizer_traits(self.tokenizer))

    def session(self, executor: Executor, media: MediaText | None, beside: Session | None = None) -> Session:
        """A session whose requests `executor` runs."""
        facts = {"model": self.model.name, "tokenizer": self.tokenizer.where, **self.stops.facts}
        if self.tokenizer.note:
            facts["tokenizer_note"] = self.tokenizer.note
        return Session(
            executor,
            self.tokenizer,
            stop_ids=self.stops.ids,
            facts=facts,
            encoding=self.encoding,
            model=self.model,
            media=media,
            beside=beside,
        )


def read_texts(model: ResolvedModel, tokenizer: Tokenizer | None = None) -> Texts:
    """Tokenizer (or the one that is open already), stop ids and encoding. Raises `ModelError` and `ConfigError` for
    what cannot be opened in the tokenizer and in the configurations of generation."""
    tokenizer = tokenizer or open_tokenizer(model)
    encoding = read_encoding(tokenizer, model)
    start = () if encoding is None else encoding.start
    return Texts(model, tokenizer, read_stop_ids(model.processor_files, tokenizer.eos_token_id, start), encoding)


def open_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer. Raises `ModelError` where it has tokens that the model lacks, and where transformers encodes
    otherwise than its files say."""
    settings = model.settings
    tokenizer = load_tokenizer(
        model.files.tokenizer,
        add_bos_token=settings.add_bos_token,
        prefix_token_id=settings.prefix_token_id,
        trust_remote_code=settings.trust_remote_code,
    )
    tokenizer.rows = Rows.of(model)
    if model.runtime.runs_graph:
        refuse_smaller_vocabulary(tokenizer, model.spec.vocab_size, str(model.files.decoder))
    tokenizer.note = hold_to_files(tokenizer, settings.add_bos_token)
    if tokenizer.note:
        logger.warning("%s", tokenizer.note)
    return tokenizer


RecordTo = str | Path | Mapping[str, Any]
"""Where a session's distributions are recorded: a folder, or the keys of `RecordSettings`."""

_DECIDING = ("runtime", "runtime_version", "dtype", "providers", "adapters")
"""Facts of an execution that change a model's numbers."""


class RecordSettings(StrictModel):
    """Where and how a session's distributions are recorded, for candidates to be compared with them."""

    folder: Annotated[str, BeforeValidator(str)]
    """Root of the records; each reference has a folder of its own in it."""

    top: int | None = None
    """Most probable tokens of a position that are kept. None takes 64, fewer of small vocabularies."""

    drawn: int | None = None
    """Tokens drawn from the rest. None takes 32, fewer of small vocabularies."""

    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class LocalModel:
    """A model that is open in this process, before a session has been made of it."""

    texts: Texts
    opened: OpenedRunner
    media: MediaText | None

    def session(self, tap: Tap | None = None, beside: Session | None = None) -> Session:
        """A session with an engine in this process; `tap` notes what is scored."""
        return self.texts.session(engine_on(self.opened, self.texts.model, tap), self.media, beside)


def open_local(
    model: ResolvedModel,
    reference: ResolvedModel | Records | None = None,
    record_to: RecordTo | None = None,
    tokenizers: Sequence[Tokenizer | None] = (None, None),
) -> Session:
    """A session on `model` in this process; closing it closes a resident reference, too. `tokenizers` are those of
    both models that are open already.

    Raises `ModelError`, `ProviderError` or `ConfigError`; nothing is open then.
    """
    is_compared = reference is not None or record_to is not None
    with ExitStack() as on_failure:
        other = _open(reference, on_failure, tokenizers[1]) if isinstance(reference, ResolvedModel) else None
        own = _open(model, on_failure, tokenizers[0], is_compared=is_compared)
        records = None if record_to is None else new_records(own, record_to)
        tap: Tap | None = None
        if other is not None:
            tap = _resident_tap(own, other)
        elif isinstance(reference, Records):
            known = reference.facts.get("tokenizer", {}), reference.form.vocab_size
            tap = ReadingTap(reference, _kernels(own, str(reference.folder), *known))
        elif records is not None:
            tap = WritingTap(records, DivergenceKernels.at(own.opened.runner))
        on_failure.pop_all()
    session = own.session(tap)
    session.records = records
    session.reference = None if other is None else other.session(beside=session)
    return session


def _open(
    model: ResolvedModel, on_failure: ExitStack, tokenizer: Tokenizer | None, *, is_compared: bool = True
) -> LocalModel:
    """Opens tokenizer, runner and processors of a model, which `on_failure` closes. A mistake in a configuration is
    reported before the weights are read. Where models are compared, logits rows stay where they are computed."""
    model = replace(model, is_compared=True) if is_compared else model
    texts = read_texts(model, tokenizer)
    opened = open_runner(model)
    on_failure.callback(opened.runner.close)
    local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
    if model.warms_encoders:
        _warm_up(local, is_strict=model.settings.engine.strict_shapes)
    return local


def _warm_up(local: LocalModel, *, is_strict: bool) -> None:
    """Runs a model's encoders beforehand, on blank items. `ModelError` where that fails and `is_strict`."""
    (runner, chunk_size), media, encoding = local.opened, local.media, local.texts.encoding
    if media is not None:
        longest = min(media.limit.tokens or runner.traits.context_length, runner.traits.context_length)
        runner.warm_up(media.processor.dummies(longest), max(longest, chunk_size))
    if encoding is not None and encoding.sound is not None:
        # Without an extractor's file users give features of their own, of shapes that they choose.
        with nullcontext() if is_strict else suppress(ModelError):
            runner.encoder.warm_up(Source(encoding.sound.silence()))


def _kernels(candidate: LocalModel, name: str, traits: Mapping[str, Any], vocab_size: int) -> DivergenceKernels:
    """What compares `candidate` with the reference `name`, by the traits of its tokenizer and the number of its logits.
    Raises `ConfigError` where their distributions are over different tokens."""
    own, num_tokens = candidate.texts, candidate.texts.tokenizer.num_ids
    refuse_other_tokenizer(traits, tokenizer_traits(own.tokenizer), name, own.model.settings.model)
    comparable_tokens(vocab_size_of(candidate.opened.runner), vocab_size, num_tokens)
    return DivergenceKernels.at(candidate.opened.runner, num_tokens)


def _resident_tap(candidate: LocalModel, reference: LocalModel) -> Tap:
    name, traits = reference.texts.model.settings.model, tokenizer_traits(reference.texts.tokenizer)
    kernels = _kernels(candidate, name, traits, vocab_size_of(reference.opened.runner))
    sounds = [one.texts.encoding.sound for one in (reference, candidate) if one.texts.encoding is not None]
    both = [sound for sound in sounds if sound is not None]
    if len(both) == 2 and are_other_features(*both):
        logger.warning("the reference prepares sound otherwise than the model: both are given the model's features")
    own_item = {} if reference.media is None else {"own_item": reference.media.processor.own}
    return ResidentTap(candidate.opened, reference.opened, kernels, **own_item)


def new_records(model: LocalModel, record_to: RecordTo) -> Records:
    """The records of the distributions that score a reference's targets."""
    keys = record_to if isinstance(record_to, Mapping) else {"folder": record_to}
    settings = RecordSettings.parse(keys, where="record_to")
    form = Form.choose(vocab_size_of(model.opened.runner), settings.top, settings.drawn, settings.seed)
    return Records.write(settings.folder, form, _facts_of(model))


def _facts_of(local: LocalModel) -> dict[str, Any]:
    """The facts that decide a model's numbers, JSON-ready: the key by which records are found."""
    execution, model = local.opened.runner.describe(), local.texts.model
    deciding = {"numbers": NUMBERS, **{name: execution[name] for name in _DECIDING if name in execution}}
    digest = model.digest or "{model}@{revision}".format_map(execution)
    if lengths := local.opened.runner.traits.lengths:
        deciding["lengths"] = list(lengths)
    tokenizer = tokenizer_traits(local.texts.tokenizer)
    return {"model": digest, "tokenizer": tokenizer, "deterministic": model.settings.deterministic is True, **deciding}


class RecordedResults(Executor):
    """An executor that only answers from `records`: `RecordsError` for anything else."""

    context_length, num_slots, counters = 0, 1, Counters()

    def __init__(self, records: Records, context_length: int) -> None:
        self._records = records
        self.context_length = context_length

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[ChunkResults]:
        """Answers each chunk as it is read."""
        yield from ((number, [self._answer(request) for _, request in chunk]) for number, chunk in enumerate(chunks))

    def describe(self) -> dict[str, Any]:
        """The records' facts."""
        return {"records": self._records.describe()}

    def _answer(self, request: Request) -> Result:
        result = known_result(self._records, key_of(request)) if request.generation is None else None
        if result is None:
            what = "scores" if request.generation is None else "generated answer"
            raise RecordsError(
                f"the records in '{self._records.folder}' hold no {what} of a request: record the reference on the "
                "same tasks, with the same limit, template, gen_kwargs, seed and max_length"
            )
        return result


def replay_session(
    candidate: Session, records: Records, context_length: int, answers: Mapping[str, Any], stop_ids: Iterable[int]
) -> Session:
    """A session that answers as the recorded model did, beside that of the `candidate`, whose tokenizer is the same.
    `answers`: by the name of a journal in the records' folder, its facts. `stop_ids`: where that model ended them."""
    session = Session(
        RecordedResults(records, context_length),
        candidate.tokenizer,
        stop_ids=stop_ids,
        encoding=candidate.encoding,
        media=candidate.media,
        beside=candidate,
    )
    for name, facts in answers.items():
        session.journal = Journal(Path(records.folder, name), facts)
    return session
