"""Rows of slots on ONNX Runtime: the form of graphs that write their caches in place, where no other one is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from typing_extensions import override

from olive_ext.engine.forms import agreement
from olive_ext.engine.forms.agreement import STEM, TARGETS, Text, disagreement, score, targets_of
from olive_ext.engine.forms.graph_form import GraphForm, OpenedDecoder
from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.forms.rows.buckets import DECODING, BucketedRunner, step_sizes
from olive_ext.engine.forms.rows.kv import StagedKv, ViewKv
from olive_ext.engine.forms.rows.steps import SlotRows
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import Copy, FloatArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import ConfigError, RunError
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import BucketPlan, Decision, against_buckets

TEXT_TOKENS = 5
"""Tokens of a text that is scored in padded steps."""


class RowsOnGraph(GraphForm):
    """Short answers share steps where that is cheaper ("answers"); other texts do not."""

    name = "rows"

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        return None

    @classmethod
    @override
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        is_demanded, problem = model.settings.engine.scoring == "answers", against_answers(model)
        if is_demanded and problem:
            raise ConfigError(f"'engine.scoring' = \"answers\": {problem}", "engine.scoring")
        if problem:
            return Decision("scoring", "rows", reason)
        why = "short answers share steps of one token each where that is cheaper by rule"
        told = "engine.scoring: if steps of short answers agree" if is_demanded else f"{reason}; {why}"
        return Decision("scoring", "answers", told, "tried")

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        return ViewKv(place) if place.device.has_pointers else StagedKv(place)

    @override
    def finish(self, decoder: OpenedDecoder) -> None:
        """Pads steps to shape buckets, then lets short answers share steps, as far as both are wanted and agree."""
        wanted, size = self.model.buckets, decoder.chunk_size
        decoder.runner = with_buckets(decoder.runner, decoder.spec.vocab_size, size, wanted, decoder.notes)
        if against_answers(self.model) or decoder.runner.capacity.num_slots == 1:
            return
        form = decoder.runner.traits.form
        problem = check_answer_steps(decoder.runner, decoder.spec.vocab_size)
        if problem is not None:
            decoder.notes.append(f"short answers share no steps: {problem}")
        elif isinstance(form, SlotRows):
            decoder.runner.traits = replace(decoder.runner.traits, form=replace(form, answers=True))


def against_answers(model: ResolvedModel) -> str | None:
    """Why short answers are not to be fed one token a step together; None where they may be."""
    if model.settings.engine.scoring == "rows":
        return "engine.scoring"
    if model.buckets.is_strict:
        return "a step of many answers may have more targets than any that was run beforehand"
    if model.device.kind != "cuda" and model.spec.rounds_rows:
        return "one token is computed otherwise than several, which the rounding of activations would show"
    return against_buckets(model.spec)


def check_answer_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why short answers must not be fed one token a step together; None where that scores what single rows score."""
    slots = runner.traits.form.slots_of([0, 1], runner.capacity.num_slots)
    idle = tuple(Row(slot, 0, (0,)) for slot in slots[2:])

    def together(stem: Text, *ends: Text) -> FloatArray:
        score(runner, stem)
        for depth, tokens in enumerate(zip(*ends, strict=True)):
            rows = tuple(Row(slot, STEM + depth, (token,)) for slot, token in enumerate(tokens))
            copies = () if depth else (Copy(0, 1, STEM),)
            step = Step((*rows, *idle), (LogitsRow(0, 0), LogitsRow(1, 0)), targets_of(2), copies=copies)
            logprobs_T = runner.run(step).target_logprobs
        return logprobs_T

    what = "a step of short answers", "short answers together"
    return agreement.two_ends_problem(runner, vocab_size, *what, together)


def with_buckets(runner: Runner, vocab_size: int, chunk_size: int, plan: BucketPlan, notes: list[str]) -> Runner:
    """`runner`, or one around it that gives its steps few shapes. Adds to `notes` why not where `plan` has
    buckets.

    Raises `ConfigError` where nothing else will do."""
    if plan.steps == "none":
        return runner
    sizes = DECODING if plan.steps == "decoding" else step_sizes(chunk_size)
    bucketed = BucketedRunner(runner, sizes, is_strict=plan.is_strict)
    problem = _check_buckets(runner, bucketed, vocab_size)
    if problem is None and plan.is_captured:
        problem = _check_replays(runner, bucketed, vocab_size)
    if problem is None:
        return bucketed
    notes.append(plan.without(problem).note)
    return runner


def _run_padded(bucketed: BucketedRunner, step: Step) -> StepOutput:
    padded = bucketed.padded(step)
    assert padded is not None
    return bucketed.inner.run(padded)


def _check_buckets(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why steps of few shapes must not be used on this model and device; None where they score what others do."""
    rng = np.random.default_rng(0)
    texts = [tuple(text) for text in rng.integers(0, vocab_size, (2, TEXT_TOKENS)).tolist()]
    runner.reserve(TEXT_TOKENS)
    given: list[FloatArray] = []
    try:
        expected = [score(runner, text) for text in texts]
        for text in texts:
            _run_padded(bucketed, Step((Row(0, 0, text[:-2]),)))
            read = _run_padded(bucketed, agreement.read_end(text, TEXT_TOKENS - 2))
            given.append(read.target_logprobs[: len(TARGETS)])
        again = agreement.score_one_by_one(runner, texts[1], 1)
    except RunError as error:
        return f"a step that was filled up fails: {error}"
    return disagreement("steps that were filled up", expected, given, again)


def _check_replays(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why captured steps must not be used; None where a replay finds in other tokens what a plain step finds."""
    slots = range(runner.capacity.num_slots)
    logits_rows = tuple(LogitsRow(slot, 0) for slot in slots)
    targets = targets_of(len(slots))
    expected, replayed = [], []
    try:
        for slot in slots:
            runner.run(Step((Row(slot, 0, (slot % vocab_size,)),), logits_rows[:1]))
        for first in (0, vocab_size // 2):
            rows = tuple(Row(slot, 1, ((first + slot) % vocab_size,)) for slot in slots)
            step = Step(rows, logits_rows, targets)
            expected.append(runner.run(step))
            replayed.append(_run_padded(bucketed, step))
    except RunError as error:
        return f"a captured step fails: {error}"
    if any((a.greedy_ids != b.greedy_ids[: len(slots)]).any() for a, b in zip(expected, replayed, strict=True)):
        return "replays of a captured step find other tokens"
    plain, again = ([one.target_logprobs[: len(targets)] for one in outputs] for outputs in (expected, replayed))
    return disagreement("replays of a captured step", plain, again, plain[1])
