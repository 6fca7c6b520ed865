"""Whether a device computes what numpy computes: attention over a paged cache, on random numbers, in the steps that an
evaluation will run.

Axes: S tokens of a text, N of all rows of a step, D = heads x head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
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
from olive_ext.engine.forms.packed.attention_reference import (
    COS,
    FLOATS,
    K_NORM,
    KEY,
    Q_NORM,
    QUERY,
    SCALE,
    SIN,
    SINK,
    VALUE,
    attended,
    rotated,
    rounded,
    score_scale,
    visible,
)
from olive_ext.engine.forms.packed.kv import Pool
from olive_ext.engine.forms.packed.rewrite import BOUNDS, KEPT, PASTS, STARTS, TABLE
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

SHARP = 3
"""The text that is the first one with other queries, in its blocks: these attend to a few positions, all others to all
that they see."""

TABLES, NUM_BLOCKS = ((6, 2, 4), (6, 1, 0), (3, 5, 7), (6, 2, 4)), 8
"""Blocks of the texts: neither neighbours nor in order."""

ROWS = 80
"""Of a step: more than there are lanes in two warps, or slots by default."""

SHARPNESS = 4.0
"""Standard deviation of the sharp text's scores: wrong scales, soft caps and rotations change its values by as much as
they are."""

EVEN, COUNTED = 0.35, 4
"""Scores of the other texts are about this, positive and negative by turns: a token attends to each position it sees by
about one part in their number, and by twice as much to each as to its neighbour. Differences times that number, over
`COUNTED`, are held to the tolerance: one position that is lost makes 0.35, those of rounding are beside it."""

TOLERANCE = 0.1
"""Largest accepted error of attended values around 1."""

QUANTIZED_TOLERANCE = 0.3
"""The same where the cache has 8 bits, to which some kernels may round queries and weights, too."""


_OWN_TYPE = (b"", b"float16", b"bfloat16", b"int8", b"float8e4m3fn")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "is_causal": (1,),
    "kv_cache_layout": (b"SEPARATE",),
    "rotary_offset": (0,),
    "v_head_size": (0,),
    "k_cache_dtype": _OWN_TYPE,
    "v_cache_dtype": _OWN_TYPE,
}
"""Other attributes of an exporter's node, and the values at which they do nothing."""


class Span(NamedTuple):
    """A row of a step: tokens `start` to `stop` of a text, behind those in front of it."""

    text: int
    start: int
    stop: int


def spans() -> list[list[Span]]:
    """What is fed, each list at once: a prompt that ends within a block; the rest of it, a second text behind its
    first block, and short rows; a token each of many rows, of which the answer's are new. The other rows that were fed
    before write what is there already."""
    short = [
        Span(i % 2 * SHARP, past, past + 1 + i % 3)
        for i, past in enumerate(np.linspace(0, CUT - 3, ROWS - 4, dtype=int))
    ]
    long = [Span(text, CUT, LENGTH) for text in (0, SHARP)]
    prompts = [*short, Span(1, FORK, FORK + MORE), Span(2, 0, PROMPT), *long]
    return [[Span(0, 0, CUT)], prompts, *([*_single(past), Span(2, past, past + 1)] for past in range(PROMPT, ANSWER))]


def _single(turn: int) -> Iterator[Span]:
    """A token each of many rows, most of the first text. Which of its queries a position has changes by turns."""
    for i, past in enumerate(np.linspace(LENGTH - 1, 0, ROWS - 1, dtype=int)):
        text = (0, 1, SHARP, 0)[(i + turn) % 4]
        start = FORK + i % MORE if text == 1 else int(past)
        yield Span(text, start, start + 1)


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
        if not difference <= (TOLERANCE if trial.elem_type in FLOATS else QUANTIZED_TOLERANCE):
            shown = f"attention over a paged cache is {difference:.2g} off on this device, of values around 1"
            return f"{shown}: at position {where}"
    return None


def _difference(trial: AttentionTrial, runner: Runner, most: int) -> tuple[float, str]:
    """The largest difference of a step, and where it is."""
    assert runner.open_graph is not None
    _check(trial.node)
    texts = _texts(trial)
    expected = [attended(trial.node, text, trial.heads, trial.head_size, trial.elem_type) for text in texts]
    session = runner.open_graph(trial.graph)
    shape = KvTensor(PAST[0], PRESENT[0], trial.elem_type, trial.heads, trial.head_size, position_axis=1)
    pools = [Pool(session, shape, NUM_BLOCKS, runner.device, runner.open_graph) for _ in PAST]
    constants = {place: value for place, value in texts[0].items() if place > 2}
    seen_S = visible(LENGTH, int(attribute(trial.node, "local_window_size", -1))).sum(axis=1)
    even_S = np.maximum(1, seen_S / COUNTED, dtype=np.float32)
    counts = [even_S if text != SHARP else np.ones_like(even_S) for text in range(len(texts))]
    worst, where = 0.0, ""
    for rows in (step for fed in spans() for step in steps_of(fed, most)):
        tokens = {place: _rows_of([text[place] for text in texts], rows) for place in texts[0] if place < 3}
        off_N = np.abs(_run(session, pools, {**constants, **tokens}, rows) - _rows_of(expected, rows)).max(axis=1)
        off_N *= _rows_of(counts, rows)
        if not (largest := float(off_N.max())) <= worst:  # what is no number is larger, too
            positions = np.concatenate([np.arange(row.start, row.stop) for row in rows])
            worst, where = largest, f"{positions[off_N.argmax()]}, in a step of {len(rows)} rows"
            if np.isnan(worst):
                break
    return worst, where


def _check(node: onnx.NodeProto) -> None:
    """Raises `RunError` for what numpy does not compute."""
    for entry in node.attribute:
        value = helper.get_attribute_value(entry)
        if entry.name not in KEPT and value not in _NEUTRAL.get(entry.name, ()):
            raise RunError(f"attention over a paged cache has {entry.name} {value}, which no trial knows")


def _rows_of(texts: Sequence[FloatArray], rows: Iterable[Span]) -> FloatArray:
    """What the texts [S, ...] have at the tokens of a step."""
    return np.concatenate([texts[row.text][row.start : row.stop] for row in rows])


def _texts(trial: AttentionTrial) -> list[dict[int, FloatArray]]:
    """The node's inputs by place for each text, tokens as [S, width]; rounded to the types that the graph casts to."""
    rng = np.random.default_rng(0)
    constants: dict[int, FloatArray] = {}
    for place, (shape, _) in trial.inputs.items():
        if place > VALUE:
            constants[place] = _constant(place, rng.standard_normal(shape, np.float32), constants)
    gains = _gains(trial, constants)
    if Q_NORM in constants:
        constants[Q_NORM] *= gains
        gains = np.ones_like(gains)
    (first, sharp), (other, _) = (_tokens(trial, constants, gains, rng) for _ in range(2))
    second = {place: np.concatenate([first[place][:FORK], other[place][FORK : FORK + MORE]]) for place in first}
    third = {place: value[:ANSWER] for place, value in other.items()}
    return [
        {place: rounded(text[place], elem_type) for place, (_, elem_type) in trial.inputs.items()}
        for text in ({**text, **constants} for text in (first, second, third, sharp))
    ]


def _constant(place: int, value: FloatArray, others: Mapping[int, FloatArray]) -> FloatArray:
    if place in (Q_NORM, K_NORM):
        return np.asarray(1 + value / 10)
    if place in SCALES:
        return np.full_like(value, SCALE)
    if place in (COS, SIN):
        return np.cos(3 * value) if place == COS else np.sqrt(1 - np.square(others[COS]))
    if place != SINK:
        raise RunError(f"attention over a paged cache has an input {place} that no trial knows")
    return value


def _gains(trial: AttentionTrial, constants: Mapping[int, FloatArray]) -> FloatArray:
    """What queries [D] of variance 1 are multiplied by: the first number, and what it is rotated with, make scores of
    `EVEN`, the others of `SHARPNESS`."""
    node, size = trial.node, trial.head_size
    gains = np.full(size, SHARPNESS / (score_scale(node, size) * size**0.5), np.float32)
    partner = (1 if attribute(node, "rotary_interleaved", 0) else constants[COS].shape[1]) if COS in constants else 0
    gains[[0, partner]] *= EVEN / SHARPNESS
    return gains


def _tokens(
    trial: AttentionTrial, constants: Mapping[int, FloatArray], gains: FloatArray, rng: np.random.Generator
) -> tuple[dict[int, FloatArray], dict[int, FloatArray]]:
    """Tokens of a text [S, width] by place, with queries that attend to all positions, and with some that attend to a
    few. Numbers are exact in 8 bits, too; sums of values stay small, and with them what rounds these."""
    node, heads, size = trial.node, trial.heads, trial.head_size
    sharp_SQD = rng.standard_normal((LENGTH, int(attribute(node, "num_heads", 0)), size), np.float32)
    even_SQD = np.zeros_like(sharp_SQD)
    even_SQD[..., 0] = size**0.5
    keys_SHD, values_SHD = rng.integers(2, 7, (2, LENGTH, heads, size)) / 4
    keys_SHD *= rng.choice([-1, 1], keys_SHD.shape)
    keys_SHD[..., 0] = rng.integers(4, 13, (LENGTH, heads)) / 8 * (-1.0) ** np.arange(LENGTH)[:, None]
    sums_HD = rng.uniform(-1, 1, (heads, size))
    for value_HD, share_H in zip(values_SHD, np.exp(EVEN * keys_SHD[..., 0]), strict=True):
        value_HD *= np.where(sums_HD < 0, 1, -1)
        sums_HD += share_H[:, None] * value_HD
    texts = []
    for queries in (even_SQD, sharp_SQD):
        parts = [queries * gains, keys_SHD, values_SHD]
        if attribute(node, "do_rotary", 0):  # back by what the node will rotate them by
            turn, is_pairs = (constants[COS], -constants[SIN]), bool(attribute(node, "rotary_interleaved", 0))
            parts[:2] = [rotated(part.swapaxes(0, 1), *turn, is_pairs).swapaxes(0, 1) for part in parts[:2]]
        flat = [part.reshape(LENGTH, -1) for part in parts]
        texts.append(dict(enumerate(flat)) if KEY in trial.inputs else {QUERY: np.concatenate(flat, axis=1)})
    return texts[0], texts[1]


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
    return np.asarray(binding.get_outputs()[0].numpy())
