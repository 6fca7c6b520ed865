"""Opens a session: from what a user wrote, validated, to files, providers, tokenizer and engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from olive_ext.config import EngineConfig, Strict
from olive_ext.config.base import PositiveInt
from olive_ext.config.evaluation import BatchSize, ProviderOptions, ProviderRequest
from olive_ext.session.session import Session
from olive_ext.text.source import Encoding, read_start
from olive_ext.text.stopping import read_stop_ids
from olive_ext.text.tokenizer import load_tokenizer


class _Settings(Strict):
    """What `open` takes; the keys are described in `EvaluationSettings` and `ModelConfig`."""

    model: str
    execution_provider: ProviderRequest | None
    provider_options: ProviderOptions | list[ProviderOptions] | None
    provider_libraries: dict[str, str]
    allow_cpu_fallback: bool
    max_length: PositiveInt | None
    batch_size: BatchSize
    tokenizer: str | None
    onnx_file_name: str | None
    add_bos_token: bool | None
    prefix_token_id: int | None = Field(ge=0)
    engine: EngineConfig


def open(
    model: str | Path,
    *,
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
) -> Session:
    """Opens the ONNX model at `model` (a file, a folder, a genai package, Olive's output folder).

    Arguments mean what the keys of the same name mean in a recipe; `add_bos_token` and `prefix_token_id` are those of
    `Tokenizer`. Raises `ConfigError`, `ModelError` or `ProviderError`.
    """
    settings = _Settings.parse(
        {
            "model": str(model),
            "execution_provider": execution_provider,
            "provider_options": provider_options,
            "provider_libraries": dict(provider_libraries or {}),
            "allow_cpu_fallback": allow_cpu_fallback,
            "max_length": max_length,
            "batch_size": batch_size,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "onnx_file_name": onnx_file_name,
            "add_bos_token": add_bos_token,
            "prefix_token_id": prefix_token_id,
            "engine": engine or {},
        }
    )
    return _open(settings)


def _open(settings: _Settings) -> Session:
    # Imported here: these bring ONNX Runtime along, and importing this package must stay quick.
    from olive_ext.engine.open import open_engine
    from olive_ext.model import check_distributions, locate, register_libraries, resolve_providers
    from olive_ext.model.types import SourceKind

    check_distributions()
    files = locate(settings.model, onnx_file_name=settings.onnx_file_name, tokenizer=settings.tokenizer)
    register_libraries(settings.provider_libraries)
    providers = resolve_providers(
        settings.execution_provider,
        settings.provider_options,
        genai_config=files.genai_config,
        allow_cpu_fallback=settings.allow_cpu_fallback,
    )
    tokenizer = load_tokenizer(
        files.tokenizer, add_bos_token=settings.add_bos_token, prefix_token_id=settings.prefix_token_id
    )
    stop_ids = read_stop_ids(tokenizer, files.directory, files.genai_config)
    engine = open_engine(
        files,
        providers,
        settings.engine,
        max_length=settings.max_length,
        batch_size=settings.batch_size if isinstance(settings.batch_size, int) else None,
        allow_cpu_fallback=settings.allow_cpu_fallback,
    )
    encoding = None
    if engine.source_kind is not None:
        start = read_start(files.directory, files.genai_config)
        encoding = Encoding(engine.source_kind is SourceKind.FEATURES, start)
    facts = {
        "model": str(files.decoder),
        "tokenizer": files.tokenizer,
        "stop_ids": sorted(stop_ids),
    }
    return Session(engine, tokenizer, stop_ids=stop_ids, facts=facts, encoding=encoding)
