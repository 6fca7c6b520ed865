"""Opens a resolved model with the library that its runtime names, and makes the engine. Knows no text."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from olive_ext.engine.capacity import UNLIMITED
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.base import ScoringRule
from olive_ext.engine.reference.tap import Tap
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ModelError
from olive_ext.media.items import ItemLimit
from olive_ext.model import ResolvedModel
from olive_ext.model.runtimes import failures_named, refuse_settings

logger = logging.getLogger(__name__)


def open_runner(model: ResolvedModel, profile_prefix: Path | None = None) -> OpenedRunner:
    """Opens a runner of the decoder of `model`, which takes pictures and sounds of as many tokens as its steps may
    have.

    Raises `ModelError` for a model that cannot be scored or run, `ProviderError` for a provider that does not come up,
    and `ConfigError` for settings that the runtime cannot keep. `profile_prefix` makes ONNX Runtime write a profile.
    """
    runtime = model.runtime
    for sentence in refuse_settings(model):
        logger.warning("%s", sentence)
    with failures_named(runtime, "open"):
        opened = runtime.open(model, profile_prefix)
    if not isinstance(opened, OpenedRunner):
        raise ModelError(f"'engine.runtime' = '{runtime.name}' opened {type(opened).__name__}: give an OpenedRunner")
    limit = item_limit(model, opened.chunk_size, opened.runner.traits.form.longest_step)
    opened.runner.traits = replace(opened.runner.traits, item_limit=limit)
    return opened


def item_limit(model: ResolvedModel, chunk_size: int, longest_step: int = UNLIMITED) -> ItemLimit:
    """The most tokens of a picture or a sound, where steps of the model have up to `chunk_size` tokens: as many, where
    a setting or the device says so, else `longest_step`. A decoder that is fed whole requests has no chunks."""
    engine, is_graph = model.settings.engine, model.runtime.runs_graph
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
    if longest_step < UNLIMITED:
        why = f"steps of this form have at most {longest_step} on this device, because longer ones may crash"
        return ItemLimit(longest_step, why if model.spec.is_paged else f"{why}: give 'engine.scoring' = \"rows\"")
    return ItemLimit()


def engine_on(opened: OpenedRunner, model: ResolvedModel, tap: Tap | None = None) -> Engine:
    """The engine of an opened model, which closing it releases. Without a tap, only a graph's steps follow the rule."""
    has_rule = model.runtime.runs_graph or tap is not None
    settings = model.settings
    return Engine(
        *opened,
        ScoringRule.of(settings) if has_rule else ScoringRule(),
        tap,
        reports_non_finite=settings.non_finite == "report",
        facts={"deterministic": settings.deterministic is True},
    )


def open_engine(model: ResolvedModel, tap: Tap | None = None, *, profile_prefix: Path | None = None) -> Engine:
    """An engine on a runner of its own; errors as in `open_runner`."""
    return engine_on(open_runner(model, profile_prefix), model, tap)
