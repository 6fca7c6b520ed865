"""Whether a device computes what numpy computes: attention over a paged cache, on random numbers, in the steps that an
evaluation will run.

Axes: S tokens of a text, N of all rows of a step, D = heads x head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from onnx import helper

from olive_ext.engine.forms.packed.attention_model import (
    LENGTH,
    OUTPUT,
    PAST,
    PRESENT,
    SCALES,
    AttentionTrial,
    input_name,
)
from olive_ext.engine.forms.packed.attention_reference import COS, K_NORM, Q_NORM, SIN, SINK, attended, score_scale
from olive_ext.engine.forms.packed.kv import Pool
from olive_ext.engine.forms.packed.rewrite import BOUNDS, PASTS, STARTS, TABLE
from olive_ext.engine.runners.ort.ort_failures import named_ort_failures
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray
from olive_ext.errors import ModelError, ProviderError, RunError
from olive_ext.graph.nodes import attribute
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.types import KvTensor

CUT, FORK, MORE = 280, BLOCK_SIZE, 44
"""Where a text's first step ends, within a block; positions of it that a second text shares, a whole block; tokens of
that one's own."""

PROMPT, ANSWER = 4, 8
"""Tokens of a third text: those of its prompt, and all. The others are fed one in each step, as answers are: so few
that one that a kernel does not write shows in those behind it, as it would not among hundreds."""

TABLES, NUM_BLOCKS = ((6, 2, 4), (6, 1, 0), (3, 5, 7)), 8
"""Blocks of the texts: neither neighbours nor in order."""

ROWS = 80
"""Of a step: more than there are lanes in two warps, or slots by default."""

SHARPNESS = 4.0
"""Standard deviation of the scores: a token attends to a few positions, so that a missing one changes its values by as
much as they are. With 1 it would attend to hundreds, and a missing block would be as small as rounding."""

TOLERANCE = 0.1
"""Largest accepted error of attended values around 1."""

QUANTIZED_TOLERANCE = 0.3
"""The same where the cache has 8 bits: what numpy computes attends to keys and values that are not rounded to them."""

_FLOATS = (1, 10, 16)


class Span(NamedTuple):
    """A row of a step: tokens `start` to `stop` of a text, behind those in front of it."""

    text: int
    start: int
    stop: int


def spans() -> list[list[Span]]:
    """What is fed, each list at once: a prompt that ends within a block; the rest of it, a second text behind its
    first block, and short rows; a token each of many rows, of which the answer's are new. The other rows that were fed
    before write what is there already."""
    short = [Span(0, past, past + 1 + i % 3) for i, past in enumerate(np.linspace(0, CUT - 3, ROWS - 3, dtype=int))]
    pasts = np.linspace(LENGTH - 1, 0, ROWS - 1, dtype=int)
    single = [
        Span(1, FORK + i % MORE, FORK + i % MORE + 1) if i % 4 == 1 else Span(0, past, past + 1)
        for i, past in enumerate(pasts)
    ]
    prompts = [*short, Span(1, FORK, FORK + MORE), Span(2, 0, PROMPT), Span(0, CUT, LENGTH)]
    return [[Span(0, 0, CUT)], prompts, *([*single, Span(2, past, past + 1)] for past in range(PROMPT, ANSWER))]


def steps_of(rows: list[Span], most: int) -> Iterator[list[Span]]:
    """Steps of up to `most` tokens that hold the rows, which are cut where a step is full. Rows of one token each run
    together, as rows that decode do however short a prompt's steps are."""
    step: list[Span] = []
    most = max(most, len(rows)) if all(row.stop - row.start == 1 for row in rows) else most
    room = most
    for text, begin, stop in rows:
        start = int(begin)
        while start < stop:
            taken = min(room, int(stop) - start)
            step.append(Span(text, start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield step
                step, room = [], most
    if step:
        yield step


def attends_otherwise(runner: Runner, trials: Sequence[AttentionTrial], most: int) -> str | None:
    """How far the device's attention over a paged cache is from numpy's, in steps of up to `most` tokens; None where
    that is rounding. Each kind of attention runs six times where `most` is not below 600."""
    for trial in trials:
        try:
            with named_ort_failures("on attention over a paged cache"):
                difference, where = _difference(trial, runner, most)
        except (ModelError, ProviderError, RunError) as error:
            return str(error)
        if not difference <= (TOLERANCE if trial.elem_type in _FLOATS else QUANTIZED_TOLERANCE):
            shown = f"attention over a paged cache is {difference:.2g} off on this device, of values around 1"
            return f"{shown}: at position {where}"
    return None


def _difference(trial: AttentionTrial, runner: Runner, most: int) -> tuple[float, str]:
    """The largest difference of a step, and where it is."""
    assert runner.open_graph is not None
    texts = _texts(trial)
    expected = [attended(trial.node, text, trial.heads, trial.head_size) for text in texts]
    session = runner.open_graph(trial.graph)
    shape = KvTensor(PAST[0], PRESENT[0], trial.elem_type, trial.heads, trial.head_size, position_axis=1)
    pools = [Pool(session, shape, NUM_BLOCKS, runner.device, runner.open_graph) for _ in PAST]
    constants = {place: value for place, value in texts[0].items() if place > 2}
    worst, where = 0.0, ""
    for rows in (step for fed in spans() for step in steps_of(fed, most)):
        tokens = {place: _rows_of([text[place] for text in texts], rows)[None] for place in texts[0] if place < 3}
        off_N = np.abs(_run(session, pools, {**constants, **tokens}, rows) - _rows_of(expected, rows)).max(axis=1)
        if not (largest := float(off_N.max())) <= worst:  # what is no number is larger, too
            positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
            worst, where = largest, f"{positions[off_N.argmax()]}, in a step of {len(rows)} rows"
            if np.isnan(worst):
                break
    return worst, where


def _rows_of(texts: Sequence[FloatArray], rows: Iterable[Span]) -> FloatArray:
    """What the texts [S, ...] have at the tokens of a step."""
    return np.concatenate([texts[row.text][row.start : row.stop] for row in rows])


def _texts(trial: AttentionTrial) -> list[dict[int, FloatArray]]:
    """The node's inputs by place for each text, tokens as [S, width]; rounded to the types that the graph casts to."""
    rng = np.random.default_rng(0)
    heads = int(attribute(trial.node, "num_heads", 0))
    factor = SHARPNESS / (score_scale(trial.node, trial.head_size) * trial.head_size**0.5)
    first: dict[int, FloatArray] = {}
    for place, (shape, _) in trial.inputs.items():
        value = rng.standard_normal([LENGTH if place < 3 else shape[0], *shape[2 if place < 3 else 1 :]], np.float32)
        if place == 0 and Q_NORM not in trial.inputs:
            value[:, : heads * trial.head_size] *= factor
        elif place in (Q_NORM, K_NORM):
            value = (1 + value / 10) * (factor if place == Q_NORM else 1)
        elif place in SCALES:
            value = np.full_like(value, 1 / 16)
        elif place == SIN:
            value = np.sqrt(1 - np.square(first[COS]))
        elif place == COS:
            value = np.cos(3 * value)
        elif place != SINK and place > 2:
            raise RunError(f"attention over a paged cache has an input {place} that no trial knows")
        first[place] = value
    second = {
        place: np.concatenate([value[:FORK], rng.permuted(value[FORK : FORK + MORE])]) if place < 3 else value
        for place, value in first.items()
    }
    third = {place: value[-ANSWER:] if place < 3 else value for place, value in first.items()}
    return [
        {place: _rounded(value, trial.inputs[place][1]) for place, value in text.items()}
        for text in (first, second, third)
    ]


def _rounded(value: FloatArray, elem_type: int) -> FloatArray:
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    return np.asarray(value, np.float32).astype(dtype).astype(np.float32)


def _run(
    session: ort.InferenceSession, pools: Sequence[Pool], values: Mapping[int, FloatArray], rows: Sequence[Span]
) -> FloatArray:
    """What a step [N, D] attends to."""
    lengths, longest = [row.stop - row.start for row in rows], max(row.stop for row in rows)
    integers = {
        TABLE: np.array([TABLES[row.text] for row in rows]),
        STARTS: np.cumsum([0, *lengths]),
        PASTS: np.array([row.start for row in rows]),
        BOUNDS: np.array([max(lengths), longest, longest]),
    }
    binding = session.io_binding()
    binding.bind_output(OUTPUT)
    for pool, past, present in zip(pools, PAST, PRESENT, strict=True):
        pool.bind(binding, past, present)
    taken = {value.name for value in session.get_inputs()}
    arrays = {name: array.astype(np.int32) for name, array in integers.items() if name in taken}
    for name, array in {**{input_name(place): value for place, value in values.items()}, **arrays}.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    session.run_with_iobinding(binding)
    (attended_ND,) = binding.get_outputs()[0].numpy()
    return np.asarray(attended_ND)
