"""What a session is made of: an engine on a model, its tokenizer, and what its files say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from olive_ext.engine.engine import Engine
from olive_ext.engine.runners.ort.opening import open_engine
from olive_ext.engine.scheduling.scoring_form import longest_step
from olive_ext.model import (
    check_distributions,
    content_hash,
    locate,
    model_kind,
    register_libraries,
    resolve_providers,
)
from olive_ext.model.content import hf_content_hash
from olive_ext.model.types import ModelFiles, SourceKind
from olive_ext.session.session import Session, TokenEngine
from olive_ext.session.settings import Settings
from olive_ext.text.conversion import Encoding
from olive_ext.text.generation_bounds import read_start, read_stop_ids
from olive_ext.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Parts:
    """An open model, not yet a session."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    facts: dict[str, Any]
    encoding: Encoding | None
    content_hash: Callable[[], str]

    def session(self, engine: TokenEngine | None = None, **arguments: Any) -> Session:
        """A session over these parts, or over another engine that uses them."""
        return Session(
            engine or self.engine,
            self.tokenizer,
            stop_ids=self.stop_ids,
            facts=self.facts,
            encoding=self.encoding,
            **arguments,
        )


def open_parts(settings: Settings, *, exposes_rows: bool = False) -> Parts:
    """With `exposes_rows` the engine's runner leaves the rows of logits where they were computed."""
    kind = model_kind(settings.model) if settings.kind == "auto" else settings.kind
    return _open_hf(settings) if kind == "hf" else _open_onnx(settings, exposes_rows)


def _open_onnx(settings: Settings, exposes_rows: bool) -> Parts:
    check_distributions()
    files = locate(settings.model, onnx_file_name=settings.onnx_file_name, tokenizer=settings.tokenizer)
    register_libraries(settings.provider_libraries)
    providers = resolve_providers(
        settings.execution_provider,
        settings.provider_options,
        genai_config=files.genai_config,
        allow_cpu_fallback=settings.allow_cpu_fallback,
    )
    tokenizer = _tokenizer(settings, files.tokenizer)
    stop_ids = read_stop_ids(tokenizer, files.directory, files.genai_config)
    engine = open_engine(
        files,
        providers,
        settings.engine,
        max_length=settings.max_length,
        batch_size=settings.batch_size if isinstance(settings.batch_size, int) else None,
        allow_cpu_fallback=settings.allow_cpu_fallback,
        exposes_rows=exposes_rows,
    )
    facts = _facts(str(files.decoder), files.tokenizer, stop_ids)
    encoding = _encoding(engine, files)
    return Parts(settings.model, engine, tokenizer, stop_ids, facts, encoding, partial(content_hash, files))


def _open_hf(settings: Settings) -> Parts:
    from olive_ext.engine.runners.hf.hf_runner import (  # imported here: brings torch and transformers along
        HfRunner,
        load_model,
    )

    tokenizer = _tokenizer(settings, settings.tokenizer or settings.model)
    threads = settings.engine.num_threads
    model, loaded = load_model(
        settings.model, settings.dtype, settings.device, num_threads=threads if isinstance(threads, int) else None
    )
    engine = Engine(HfRunner(model, loaded, settings.max_length), longest_step(settings.engine))
    stop_ids = read_stop_ids(tokenizer, Path(settings.model), {})
    facts = _facts(settings.model, tokenizer.where, stop_ids)
    folder = Path(settings.model)
    digest = partial(hf_content_hash, folder) if folder.is_dir() else partial("{model}@{revision}".format_map, loaded)
    return Parts(settings.model, engine, tokenizer, stop_ids, facts, None, digest)


def _tokenizer(settings: Settings, where: str) -> Tokenizer:
    return load_tokenizer(where, add_bos_token=settings.add_bos_token, prefix_token_id=settings.prefix_token_id)


def _encoding(engine: Engine, files: ModelFiles) -> Encoding | None:
    if engine.source_kind is None:
        return None
    return Encoding(engine.source_kind is SourceKind.FEATURES, read_start(files.directory, files.genai_config))


def _facts(model: str, tokenizer: str, stop_ids: frozenset[int]) -> dict[str, Any]:
    return {"model": model, "tokenizer": tokenizer, "stop_ids": sorted(stop_ids)}
