"""Finds out by steps on an opened model what its graph does not show. Knows runners by their steps, and no files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.runners.shape_buckets import DECODING, BucketedRunner, step_sizes
from olive_ext.engine.step import (
    FIRST_CELL,
    SHARED_PREFIX,
    Batching,
    CellArray,
    Copy,
    FloatArray,
    LogitsRow,
    Row,
    Step,
    StepOutput,
)
from olive_ext.errors import ModelError, RunError
from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT, attention_graph
from olive_ext.model.decisions import SHORT_STEP, BucketPlan, is_attention_at_risk
from olive_ext.model.types import DecoderSpec, Device

logger = logging.getLogger(__name__)

TOLERANCE, MOST = 0.02, 0.3
"""Difference that passes, as a part of what another context makes for a difference: rounding is far below, a token that
sees wrong positions is far above. Where activations are rounded to few bits, three times the difference that feeding
the same tokens one by one makes, up to `MOST`."""

TARGETS = (0, 1, 2, 3)
"""Tokens whose log-probabilities are compared, behind each text."""

TEXT_TOKENS = 5
"""Tokens of a text that is scored in padded steps."""

STEM, SUFFIX = 5, 4
"""Tokens of the tree's stem, and of each of its two ends."""

ATTENDED_TOLERANCE = 0.05
"""Largest accepted error of attended values around 1: the wrong shader is off by 0.1 and more."""

NUM_HEADS = 1
HEAD_SIZE = 16
"""Small, because a software device compiles the shader of size 64 for minutes. The fault shows at every size."""

OpenGraph = Callable[[bytes], Any]
_FLOAT = 1
"""ONNX's element type."""


def fitting_chunk_size(chunk_size: int, runner: Runner, notes: list[str]) -> int:
    """`chunk_size`, or 1 and a note where the graph fails on several tokens behind resident positions.

    onnxruntime-genai's exports with MultiHeadAttention make their mask for a whole prompt or for one token only, and
    Mamba graphs that declare any number run with one.
    Raises `ModelError` where the model cannot run a token at all.
    """
    runner.reserve(3)
    try:
        runner.run(Step((Row(0, 0, (0,)),)))
    except RunError as error:
        raise ModelError(f"the model cannot run one token: {error}") from error
    if chunk_size == 1:
        return 1
    try:
        runner.run(Step((Row(0, 1, (0, 0)),)))
    except RunError as error:
        notes.append(f"steps are cut to 1 token, which is slow, because the graph takes no more behind a past: {error}")
        return 1
    return chunk_size


def disagreement(
    what: str, expected: Sequence[FloatArray], found: Sequence[FloatArray], again: FloatArray
) -> str | None:
    """How far `found`, which `what` score, is from `expected`, two contexts' log-probabilities; None where that is
    rounding. `again` is the second context's, fed one token a step."""
    difference = max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
    spread = float(np.abs(expected[0] - expected[1]).max())
    rounding = float(np.abs(expected[1] - again).max())
    if difference <= max(TOLERANCE * spread, min(3 * rounding, MOST * spread)):
        return None
    return f"{what} score {difference:.2g} nats off, where another context makes {spread:.2g}"


def check_tree_batches(runner: Runner, vocab_size: int) -> str | None:
    """Why tree batches must not be used on this model and device; None where they score what single rows score."""
    rng = np.random.default_rng(0)
    stem, left, right = (tuple(rng.integers(0, vocab_size, length).tolist()) for length in (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX, FIRST_CELL + STEM + 2 * SUFFIX)
    try:
        expected = [_score(runner, stem + suffix) for suffix in (left, right)]
        again = _score_one_by_one(runner, stem + right, STEM)
        found = _score_tree_batch(runner, stem, left, right)
    except RunError as error:
        return f"a step of branches fails: {error}"
    return disagreement("branches", expected, found, again)


def check_packed_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why packed steps must not be used on this model and device; None where they score what single rows score."""
    rng = np.random.default_rng(0)
    stem, left, right = (tuple(rng.integers(0, vocab_size, length).tolist()) for length in (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX)
    try:
        expected = [_score(runner, stem + suffix) for suffix in (left, right)]
        again = _score_one_by_one(runner, stem + right, STEM)
        runner.run(Step((Row(0, 0, stem + left[:2]),)))
        rows = (Row(0, STEM + 2, left[2:]), Row(1, STEM, right))
        logits_rows = (LogitsRow(0, SUFFIX - 3), LogitsRow(1, SUFFIX - 1))
        both = runner.run(Step(rows, logits_rows, _targets(2), copies=(Copy(0, 1, STEM),))).target_logprobs
    except RunError as error:
        return f"a packed step fails: {error}"
    return disagreement("packed steps", expected, [both[: len(TARGETS)], both[len(TARGETS) :]], again)


def check_answer_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why texts that are scored must not be fed one token a step together; None where that scores what single rows
    score."""
    rng = np.random.default_rng(0)
    stem, *ends = (tuple(rng.integers(0, vocab_size, length).tolist()) for length in (STEM, SUFFIX, SUFFIX))
    runner.reserve(STEM + SUFFIX)
    is_pool = runner.traits.batching is Batching.POOL
    idle = tuple(Row(slot, 0, (0,)) for slot in range(2, runner.capacity.num_slots if is_pool else 2))
    found = np.zeros(0, np.float32)
    try:
        expected = [_score(runner, stem + end) for end in ends]
        again = _score_one_by_one(runner, stem + ends[1], STEM)
        _score(runner, stem)
        for depth, tokens in enumerate(zip(*ends, strict=True)):
            rows = tuple(Row(slot, STEM + depth, (token,)) for slot, token in enumerate(tokens))
            copies = () if depth else (Copy(0, 1, STEM),)
            step = Step((*rows, *idle), (LogitsRow(0, 0), LogitsRow(1, 0)), _targets(2), copies=copies)
            found = runner.run(step).target_logprobs
    except RunError as error:
        return f"a step of short answers fails: {error}"
    return disagreement("short answers together", expected, [found[: len(TARGETS)], found[len(TARGETS) :]], again)


def _score(runner: Runner, tokens: tuple[int, ...], past: int = 0, padding: BucketedRunner | None = None) -> FloatArray:
    """Log-probabilities of `TARGETS` behind `tokens`, of which `past` are resident, in a step that is padded where
    `padding` is given."""
    step = Step((Row(0, past, tokens[past:]),), (LogitsRow(0, len(tokens) - past - 1),), _targets(1))
    return _run(runner, step, padding).target_logprobs[: len(TARGETS)]


def _score_one_by_one(runner: Runner, tokens: tuple[int, ...], first: int) -> FloatArray:
    """As `_score`, with the first `first` tokens in one step and each later token in a step of its own."""
    found = _score(runner, tokens[:first])
    for past in range(first, len(tokens)):
        found = _score(runner, tokens[: past + 1], past)
    return found


def _score_tree_batch(runner: Runner, stem: tuple[int, ...], *suffixes: tuple[int, ...]) -> list[FloatArray]:
    """As `_score`, behind both ends: one step holds the stem and two tokens of the left suffix; the next, a tree batch,
    holds the right suffix behind the stem together with the rest of the left one."""
    left, right = suffixes
    stem_cells = np.arange(FIRST_CELL, FIRST_CELL + STEM, dtype=np.int32)
    first = FIRST_CELL + STEM + 2
    runner.run(Step((Row(SHARED_PREFIX, 0, stem + left[:2], cells_P=stem_cells[:0]),), first_cell=FIRST_CELL))
    begun: CellArray = np.arange(FIRST_CELL, first, dtype=np.int32)
    rows = (Row(SHARED_PREFIX, STEM, right, cells_P=stem_cells), Row(SHARED_PREFIX, STEM + 2, left[2:], cells_P=begun))
    logits_rows = (LogitsRow(1, SUFFIX - 3), LogitsRow(0, SUFFIX - 1))
    both = runner.run(Step(rows, logits_rows, _targets(2), first_cell=first)).target_logprobs
    return [both[: len(TARGETS)], both[len(TARGETS) :]]


def _targets(num_rows: int) -> tuple[tuple[int, int], ...]:
    """`TARGETS` behind each logits row of a step."""
    return tuple((row, token) for row in range(num_rows) for token in TARGETS)


def _run(runner: Runner, step: Step, padding: BucketedRunner | None) -> StepOutput:
    padded = step if padding is None else padding.padded(step)
    assert padded is not None
    return runner.run(padded)


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


def _check_buckets(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why steps of few shapes must not be used on this model and device; None where they score what others do."""
    rng = np.random.default_rng(0)
    texts = [tuple(text) for text in rng.integers(0, vocab_size, (2, TEXT_TOKENS)).tolist()]
    runner.reserve(TEXT_TOKENS)
    found = []
    try:
        expected = [_score(runner, text) for text in texts]
        for text in texts:
            _run(runner, Step((Row(0, 0, text[:-2]),)), bucketed)
            found.append(_score(runner, text, TEXT_TOKENS - 2, bucketed))
        again = _score_one_by_one(runner, texts[1], 1)
    except RunError as error:
        return f"a step that was filled up fails: {error}"
    return disagreement("steps that were filled up", expected, found, again)


def _check_replays(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why captured steps must not be used; None where a replay finds in other tokens what a plain step finds."""
    slots = range(runner.capacity.num_slots)
    logits_rows = tuple(LogitsRow(slot, 0) for slot in slots)
    targets = _targets(len(slots))
    expected, found = [], []
    try:
        for slot in slots:
            runner.run(Step((Row(slot, 0, (slot % vocab_size,)),), logits_rows[:1]))
        for first in (0, vocab_size // 2):
            rows = tuple(Row(slot, 1, ((first + slot) % vocab_size,)) for slot in slots)
            step = Step(rows, logits_rows, targets)
            expected.append(runner.run(step))
            found.append(_run(runner, step, bucketed))
    except RunError as error:
        return f"a captured step fails: {error}"
    if any((a.greedy_ids != b.greedy_ids[: len(slots)]).any() for a, b in zip(expected, found, strict=True)):
        return "replays of a captured step find other tokens"
    plain, replayed = ([output.target_logprobs[: len(targets)] for output in outputs] for outputs in (expected, found))
    return disagreement("replays of a captured step", plain, replayed, plain[1])


def fitting_attention(
    chunk_size: int, device: Device, spec: DecoderSpec, open_graph: OpenGraph
) -> tuple[int, list[str]]:
    """The most tokens of a step on this device, and a note where that is less than `chunk_size`.

    WebGPU's provider attends to 32 tokens and more with a shader of its own, which exchanges keys between the lanes of
    a subgroup. On Mesa's software Vulkan all keys but the first few come out wrong, without an error
    (onnxruntime-ep-webgpu 0.4.0, Mesa 25). Shorter steps take another shader, which is right there.
    """
    if not is_attention_at_risk(chunk_size, device, spec) or attends_to_long_steps(open_graph):
        return chunk_size, []
    note = f"steps are cut to {SHORT_STEP} tokens: this {device.kind} device attends to longer ones wrongly"
    logger.warning("%s", note)
    return SHORT_STEP, [note]


def attends_to_long_steps(open_graph: OpenGraph) -> bool:
    """Whether the first tokens of a long step see what they see in a short one, as causal attention must."""
    session = open_graph(attention_graph(_FLOAT, NUM_HEADS, HEAD_SIZE))
    tokens = np.random.default_rng(0).standard_normal((3, 1, 2 * SHORT_STEP, NUM_HEADS * HEAD_SIZE), np.float32)
    long = _attend(session, tokens)
    short = _attend(session, tokens[:, :, :SHORT_STEP])
    return bool(np.abs(long[:, :SHORT_STEP] - short).max() < ATTENDED_TOLERANCE)


def _attend(session: Any, tokens: FloatArray) -> FloatArray:
    length = tokens.shape[2]
    past = np.zeros((1, NUM_HEADS, 0, HEAD_SIZE), np.float32)
    arrays = (*tokens, past, past, np.array([length - 1], np.int32), np.array(length, np.int32))
    binding = session.io_binding()
    for name, array in zip(INPUTS, arrays, strict=True):
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    binding.bind_output(OUTPUT)
    session.run_with_iobinding(binding)
    (attended,) = binding.get_outputs()
    result: FloatArray = attended.numpy()
    return result
