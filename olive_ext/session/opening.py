"""Opens a session: from what a user wrote, resolved, to tokenizer and engine. Knows no library that runs a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.config.model import ProviderOptions, ProviderRequest
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.types import SourceKind
from olive_ext.records import Records
from olive_ext.session.session import Session
from olive_ext.text.conversion import Encoding
from olive_ext.text.generation_bounds import read_start, read_stop_ids
from olive_ext.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from olive_ext.engine.reference.tap import Tap
    from olive_ext.engine.runners.base import OpenedRunner

Reference = str | Path | Mapping[str, Any] | ResolvedModel | Records
"""A model to compare with: its path or settings, itself, or the records of what it said."""


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
    tokenizer: str | Path | None = None,
    onnx_file_name: str | None = None,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    reference: str | Path | Mapping[str, Any] | Records | None = None,
    record_to: str | Path | Mapping[str, Any] | None = None,
) -> Session:
    """Opens the model at `model`: an ONNX file or folder, a genai package, Olive's output folder, or a Hugging Face
    model, which runs on transformers in `dtype` on `device`; `kind` "onnx" or "hf" settles which where both lie there.

    Arguments mean what the keys of the same name mean in a recipe; `add_bos_token` and `prefix_token_id` are those of
    `Tokenizer`. Raises `ConfigError`, `ModelError` or `ProviderError`.

    With a `reference` every score says in `compared` how far the two models' distributions are apart. It is a path, a
    mapping of arguments of this function (what it leaves out of providers, threads and lengths is taken from here), or
    the `Records` of one. `record_to`, a folder or a mapping ("folder", "top", "drawn", "seed"), makes this model one:
    what it says is kept on disk, and `Session.records` is what candidates are opened with.
    """
    settings = ModelSettings.of({name: value for name, value in locals().items() if name in ModelSettings.model_fields})
    _refuse_both(reference, record_to)
    return open_model(resolve(settings), reference, record_to)


def open_model(
    model: ResolvedModel,
    reference: Reference | None = None,
    record_to: str | Path | Mapping[str, Any] | None = None,
) -> Session:
    """A session on a resolved model; `reference` and `record_to` as in `open`."""
    _refuse_both(reference, record_to)
    if reference is None and record_to is None:
        return open_parts(model).session()
    # Imported here: these bring ONNX Runtime along, and importing this package must stay quick.
    from olive_ext.session import reference_session

    if record_to is not None:
        return reference_session.open_recording(model, record_to)
    if isinstance(reference, Records):
        return reference_session.open_recorded(model, reference)
    if not isinstance(reference, ResolvedModel):
        assert reference is not None
        reference = resolve(model.settings.of_reference(reference))
    return reference_session.open_beside(model, reference)


def _refuse_both(reference: object, record_to: object) -> None:
    if reference is not None and record_to is not None:
        raise ConfigError("'reference' and 'record_to' were both given: a model is a candidate or a reference")


@dataclass(frozen=True)
class Parts:
    """An open model, not yet a session."""

    model: ResolvedModel
    opened: OpenedRunner
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    encoding: Encoding | None

    @property
    def name(self) -> str:
        """The model as the user named it, for errors."""
        return self.model.settings.model

    def session(self, tap: Tap | None = None, **arguments: Any) -> Session:
        """A session over these parts; `tap` notes what is scored."""
        from olive_ext.engine.opening import engine_on

        facts = {"model": self.model.name, "tokenizer": self.tokenizer.where, "stop_ids": sorted(self.stop_ids)}
        return Session(
            engine_on(self.opened, self.model, tap),
            self.tokenizer,
            stop_ids=self.stop_ids,
            facts=facts,
            encoding=self.encoding,
            model=self.model,
            **arguments,
        )


def open_parts(model: ResolvedModel) -> Parts:
    """Tokenizer, stop tokens and runner of a model. Raises `ModelError`, `ProviderError` or `ConfigError`."""
    from olive_ext.engine.opening import open_runner

    files, settings = model.files, model.settings
    tokenizer = load_tokenizer(
        files.tokenizer, add_bos_token=settings.add_bos_token, prefix_token_id=settings.prefix_token_id
    )
    stop_ids = read_stop_ids(tokenizer, files.directory, files.genai_config)
    opened = open_runner(model)
    kind = opened.runner.traits.source_kind
    start = read_start(files.directory, files.genai_config) if kind is not None else None
    encoding = Encoding(kind is SourceKind.FEATURES, start) if start is not None else None
    return Parts(model, opened, tokenizer, stop_ids, encoding)
