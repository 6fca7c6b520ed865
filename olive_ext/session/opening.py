"""Opens a session: from what a user wrote, validated, to files, providers, tokenizer and engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olive_ext.config import EngineConfig
from olive_ext.config.evaluation import ProviderOptions, ProviderRequest
from olive_ext.errors import ConfigError
from olive_ext.records import Records
from olive_ext.session.session import Session
from olive_ext.session.settings import RecordSettings, Settings


def open(
    model: str | Path,
    *,
    kind: str = "onnx",
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
    """Opens the model at `model` (an ONNX file or folder, a genai package, Olive's output folder; with `kind` "hf" or
    "auto" also a Hugging Face model, which runs on transformers in `dtype` on `device`).

    Arguments mean what the keys of the same name mean in a recipe; `add_bos_token` and `prefix_token_id` are those of
    `Tokenizer`. Raises `ConfigError`, `ModelError` or `ProviderError`.

    With a `reference` every score says in `compared` how far the two models' distributions are apart. It is a path, a
    mapping of arguments of this function (what it leaves out of providers, threads and lengths is taken from here), or
    the `Records` of one. `record_to`, a folder or a mapping ("folder", "top", "drawn", "seed"), makes this model one:
    what it says is kept on disk, and `Session.records` is what candidates are opened with.
    """
    settings = Settings.of({name: value for name, value in locals().items() if name in Settings.model_fields})
    if reference is not None and record_to is not None:
        raise ConfigError("'reference' and 'record_to' were both given: a model is a candidate or a reference")
    # Imported here: these bring ONNX Runtime along, and importing this package must stay quick.
    from olive_ext.session import reference_session
    from olive_ext.session.parts import open_parts

    if record_to is not None:
        return reference_session.open_recording(settings, RecordSettings.of(record_to))
    if isinstance(reference, Records):
        return reference_session.open_recorded(settings, reference)
    if reference is not None:
        return reference_session.open_beside(settings, settings.of_reference(reference))
    return open_parts(settings).session()
