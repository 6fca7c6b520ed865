"""Decides whether steps are given few shapes, and tries it on the opened model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.base import Runner
from olive_ext.engine.runners.shape_buckets import DECODING, BucketedRunner, step_sizes
from olive_ext.engine.runners.trials import disagreement
from olive_ext.engine.step import FloatArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import ConfigError, RunError
from olive_ext.model.types import DecoderSpec, Provider

TOKENS = 5
TARGETS = ((0, 0), (0, 1), (0, 2), (0, 3))


@dataclass(frozen=True)
class Wanted:
    """Which steps are to have few shapes, whether nothing else will do, and whether decoding is to be captured."""

    steps: Literal["none", "decoding", "all"]
    is_strict: bool = False
    is_captured: bool = False
    note: str = ""
    """Why steps have any shape where they were to have few."""

    @classmethod
    def of(cls, config: EngineConfig, provider: Provider, spec: DecoderSpec, *, exposes_rows: bool) -> Wanted:
        """Raises `ConfigError` where the provider or the model cannot do what was asked for."""
        is_pinned = config.shapes == "bucketed" or config.strict_shapes
        is_auto = config.shapes == "auto" and provider.plans_shapes and config.scoring != "branches"
        if not (is_pinned or is_auto or config.graph_capture):
            return cls("none")
        wanted = cls("all" if is_pinned or is_auto else "decoding", config.strict_shapes, config.graph_capture)
        if config.graph_capture and provider.capture_option is None:
            raise ConfigError(f"'engine.graph_capture' = true: {provider.name} captures no steps; CUDA and WebGPU do")
        problem = "beside a reference, steps have any shape" if exposes_rows else against(spec)
        if config.graph_capture and spec.embeddings:
            problem = "the embeddings that the decoder takes lie elsewhere in each step"
        return wanted if problem is None else wanted.without(problem)

    def without(self, problem: str) -> Wanted:
        """Any shape, because of `problem`; raises `ConfigError` where nothing but few shapes will do."""
        if self.is_strict or self.is_captured:
            name = "strict_shapes" if self.is_strict else "graph_capture"
            raise ConfigError(f"'engine.{name}' = true: {problem}")
        return Wanted("none", note=f"steps have any shape: {problem}")


def with_buckets(runner: Runner, vocab_size: int, chunk_size: int, wanted: Wanted, notes: list[str]) -> Runner:
    """`runner`, or one around it that gives its steps few shapes. Adds to `notes` why not where that was wanted.

    Raises `ConfigError` where nothing else will do."""
    if wanted.steps == "none":
        return runner
    sizes = DECODING if wanted.steps == "decoding" else step_sizes(chunk_size)
    shaped = BucketedRunner(runner, sizes, is_strict=wanted.is_strict)
    problem = _check(runner, shaped, vocab_size)
    if problem is None and wanted.is_captured:
        problem = _check_replay(runner, shaped, vocab_size)
    if problem is None:
        return shaped
    notes.append(wanted.without(problem).note)
    return runner


def against(spec: DecoderSpec) -> str | None:
    """Why a graph's steps cannot be filled up with tokens that nobody reads."""
    if not spec.is_splittable:
        return "a token's numbers depend on all tokens of its step"
    if not spec.is_kv_in_place or spec.states or spec.is_paged or spec.cross:
        return "only caches that are written in place can forget what a step was filled up with"
    return None


def _check(runner: Runner, shaped: BucketedRunner, vocab_size: int) -> str | None:
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


def _check_replay(runner: Runner, shaped: BucketedRunner, vocab_size: int) -> str | None:
    """Why captured steps must not be used; None where a replay finds in other tokens what a plain step finds."""
    slots = range(runner.capacity.num_slots)
    heads = tuple(LogitsRow(slot, 0) for slot in slots)
    targets = tuple((slot, token) for slot in slots for _, token in TARGETS)
    expected, found = [], []
    try:
        for slot in slots:
            runner.run(Step((Row(slot, 0, (slot % vocab_size,)),), heads[:1]))
        for first in (0, vocab_size // 2):
            rows = tuple(Row(slot, 1, ((first + slot) % vocab_size,)) for slot in slots)
            step = Step(rows, heads, targets)
            expected.append(runner.run(step))
            found.append(_run(runner, step, shaped))
    except RunError as error:
        return f"a captured step fails: {error}"
    if any((a.greedy_ids != b.greedy_ids[: len(slots)]).any() for a, b in zip(expected, found, strict=True)):
        return "replays of a captured step find other tokens"
    plain, replayed = ([output.target_logprobs[: len(targets)] for output in outputs] for outputs in (expected, found))
    problem = disagreement(plain, replayed, plain[1])
    return None if problem is None else f"replays of a captured step score {problem}"


def _score(runner: Runner, text: list[int], shaped: BucketedRunner | None, past: int = 0) -> FloatArray:
    """Log-probabilities behind `text`, of which `past` tokens are resident; with `shaped` in its last two steps."""
    if shaped is not None and past == 0:
        _run(runner, Step((Row(0, 0, tuple(text[:-2])),)), shaped)
        past = len(text) - 2
    step = Step((Row(0, past, tuple(text[past:])),), (LogitsRow(0, len(text) - past - 1),), TARGETS)
    return _run(runner, step, shaped).target_logprobs[: len(TARGETS)]


def _run(runner: Runner, step: Step, shaped: BucketedRunner | None) -> StepOutput:
    run = step if shaped is None else shaped.padded(step)
    assert run is not None
    return runner.run(run)
