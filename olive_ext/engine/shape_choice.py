"""Decides whether steps are given few shapes, and tries it on the opened model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olive_ext.config import EngineConfig
from olive_ext.engine.probe import disagreement
from olive_ext.engine.shapes import ShapedRunner
from olive_ext.engine.step import FloatArray, HeadRow, Row, Runner, Step
from olive_ext.errors import ConfigError, RunError
from olive_ext.model.types import DecoderSpec, Provider

TOKENS = 5
TARGETS = ((0, 0), (0, 1), (0, 2), (0, 3))


@dataclass(frozen=True)
class Wanted:
    """Whether steps are to have few shapes, and whether nothing else will do."""

    is_wanted: bool
    is_strict: bool = False

    @classmethod
    def of(cls, config: EngineConfig, provider: Provider, *, exposes_rows: bool) -> Wanted:
        """Raises `ConfigError` where shapes that are to be kept cannot be."""
        if config.shapes == "any" and config.strict_shapes:
            raise ConfigError("'engine.strict_shapes' = true needs 'engine.shapes' = \"bucketed\"; it is \"any\"")
        if exposes_rows and config.strict_shapes:
            raise ConfigError("'engine.strict_shapes' = true: beside a reference, steps have any shape")
        is_pinned = config.shapes == "bucketed" or config.strict_shapes
        if is_pinned and config.scoring == "branches":
            raise ConfigError("'engine.scoring' = \"branches\" needs 'engine.shapes' = \"any\"")
        is_auto = config.shapes == "auto" and provider.plans_shapes and config.scoring != "branches"
        return cls((is_pinned or is_auto) and not exposes_rows, config.strict_shapes)


def with_shapes(runner: Runner, spec: DecoderSpec, chunk_size: int, wanted: Wanted, notes: list[str]) -> Runner:
    """`runner`, or one around it that gives its steps few shapes. Adds to `notes` why not where that was wanted.

    Raises `ConfigError` where nothing else will do."""
    if not wanted.is_wanted:
        return runner
    shaped = ShapedRunner(runner, chunk_size, is_strict=wanted.is_strict)
    problem = _against(spec) or _check(runner, shaped, spec.vocab_size)
    if problem is None:
        return shaped
    if wanted.is_strict:
        raise ConfigError(f"'engine.strict_shapes' = true: {problem}")
    notes.append(f"steps have any shape: {problem}")
    return runner


def _against(spec: DecoderSpec) -> str | None:
    """Why a graph's steps cannot be filled up with tokens that nobody reads."""
    if not spec.is_splittable:
        return "a token's numbers depend on all tokens of its step"
    if not spec.is_kv_in_place or spec.states or spec.is_paged or spec.cross:
        return "only caches that are written in place can forget what a step was filled up with"
    return None


def _check(runner: Runner, shaped: ShapedRunner, vocab_size: int) -> str | None:
    """Why steps of few shapes must not be used on this model and device; None where they score what others do."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, vocab_size, (2, TOKENS)).tolist()
    runner.reserve(TOKENS)
    try:
        expected = [_score(runner, text, None) for text in texts]
        found = [_score(runner, text, shaped) for text in texts]
        again = [_score(runner, text[:end], None, end - 1) for text in texts[1:] for end in range(1, TOKENS + 1)]
    except RunError as error:
        return f"a step that was filled up fails: {error}"
    problem = disagreement(expected, found, again[-1])
    return None if problem is None else f"steps that were filled up score {problem}"


def _score(runner: Runner, text: list[int], shaped: ShapedRunner | None, past: int = 0) -> FloatArray:
    """Log-probabilities behind `text`, of which `past` tokens are resident; with `shaped` in its last two steps."""
    if shaped is not None and past == 0:
        _run(runner, Step((Row(0, 0, tuple(text[:-2])),)), shaped)
        past = len(text) - 2
    return _run(runner, Step((Row(0, past, tuple(text[past:])),), (HeadRow(0, len(text) - past - 1),), TARGETS), shaped)


def _run(runner: Runner, step: Step, shaped: ShapedRunner | None) -> FloatArray:
    run = step if shaped is None else shaped.padded(step)
    assert run is not None
    return runner.run(run).target_logprobs[: len(step.targets)]
