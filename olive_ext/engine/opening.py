"""Opens a resolved model with the library that its runtime names, and makes the engine. Knows no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from olive_ext.engine.engine import Engine
from olive_ext.engine.media import ItemLimit
from olive_ext.engine.reference.tap import Tap
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.engine.scheduling.tree_batch import ScoringForm
from olive_ext.model import ResolvedModel


def open_runner(model: ResolvedModel, profile_prefix: Path | None = None) -> OpenedRunner:
    """A runner of the decoder of `model`, which takes items of as many tokens as its steps may have.

    Each library is imported where it is needed. Raises `ModelError` for a model that cannot be scored or run,
    `ProviderError` for a provider that does not come up, and `ConfigError` for settings that the runtime cannot keep.
    `profile_prefix` makes ONNX Runtime write a profile.
    """
    opened = _open_runner(model, profile_prefix)
    limit = item_limit(model, opened.chunk_size)
    opened.runner.traits = replace(opened.runner.traits, item_limit=limit)
    return opened


def item_limit(model: ResolvedModel, chunk_size: int) -> ItemLimit:
    """The most tokens of a picture or a sound, where steps of the model have up to `chunk_size` tokens: as many, where
    a setting or the device says so. A decoder that is fed whole requests has no chunks."""
    engine, (runtime, _) = model.settings.engine, model.runtime
    is_graph = runtime == "onnxruntime"
    if is_graph and not model.spec.is_splittable:
        return ItemLimit()
    if engine.chunk_size != "auto" and chunk_size == engine.chunk_size:
        why = f"'engine.chunk_size' = {chunk_size} allows fewer"
        return ItemLimit(chunk_size, why, is_strict=engine.strict_shapes)
    if is_graph and chunk_size < model.chunk_size[0]:
        return ItemLimit(chunk_size, f"steps of this model are cut to {chunk_size} tokens on this device")
    if is_graph and engine.strict_shapes:
        why = f"'engine.strict_shapes' = true, and steps of up to {chunk_size} tokens are run beforehand"
        return ItemLimit(chunk_size, f"{why}: give a larger 'engine.chunk_size'", is_strict=True)
    return ItemLimit()


def _open_runner(model: ResolvedModel, profile_prefix: Path | None) -> OpenedRunner:
    runtime, _ = model.runtime
    if runtime == "transformers":
        from olive_ext.engine.runners.hf.hf_runner import open_hf_runner

        return open_hf_runner(model)
    if runtime == "genai":
        from olive_ext.engine.runners.genai.genai_runner import open_genai_runner

        return open_genai_runner(model, profile_prefix)
    from olive_ext.engine.runners.ort.opening import open_ort_runner

    return open_ort_runner(model, profile_prefix)


def engine_on(opened: OpenedRunner, model: ResolvedModel, tap: Tap | None = None) -> Engine:
    """The engine of an opened model, which closing it releases. Where steps of its own runtime are scored alone, only
    ONNX Runtime's are worth a measurement."""
    is_measurable = model.runtime[0] == "onnxruntime" or tap is not None
    settings = model.settings
    return Engine(
        *opened,
        ScoringForm.of(settings) if is_measurable else ScoringForm(),
        tap,
        is_deterministic=settings.deterministic is True,
        reports_non_finite=settings.non_finite == "report",
    )


def open_engine(model: ResolvedModel, *, profile_prefix: Path | None = None) -> Engine:
    """An engine without a tap; errors as in `open_runner`."""
    return engine_on(open_runner(model, profile_prefix), model)
