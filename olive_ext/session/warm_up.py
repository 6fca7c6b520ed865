"""Runs a model's encoders beforehand, on what their processors make of nothing. Knows no graph."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from olive_ext.engine.requests import Source
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ModelError
from olive_ext.text.encoder_decoder import Encoding
from olive_ext.text.placeholders import MediaText


def warm_up(opened: OpenedRunner, media: MediaText | None, encoding: Encoding | None, *, is_strict: bool) -> None:
    """Raises `ModelError` where that cannot be and `is_strict`."""
    runner, chunk_size = opened
    if media is not None:
        most = min(media.limit.tokens or runner.traits.context_length, runner.traits.context_length)
        runner.warm_up(media.processor.dummies(most), max(most, chunk_size))
    if encoding is not None and encoding.sound is not None:
        # Without an extractor's file users give features of their own, of shapes that they choose.
        with nullcontext() if is_strict else suppress(ModelError):
            runner.warm_up_source(Source(encoding.sound.silence()))
