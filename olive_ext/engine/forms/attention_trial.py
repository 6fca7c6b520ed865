"""Whether a device computes what numpy computes: attention over a paged cache, on random numbers, in the steps that an
evaluation will run. First attention by its definition, on the host in float32; then a model of a single PagedAttention,
with inputs and outputs in fp32; then the trial.

Axes: S tokens of one text, N of all rows of a step, Q heads of queries, H of keys, D head size, W = heads x head size,
R half of the rotated part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from olive_ext.engine.forms.kv_store import Pool
from olive_ext.engine.forms.paged_attention import BOUNDS, INPUTS, KEPT, PASTS, STARTS, TABLE, Caches
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import FloatArray
from olive_ext.errors import ModelError, ProviderError, RunError
from olive_ext.graph.nodes import attribute, model_of
from olive_ext.model.decisions import BLOCK_SIZE
from olive_ext.model.providers.bindings import named_ort_failures
from olive_ext.model.types import KvTensor

QUERY, KEY, VALUE, COS, SIN, SINK, Q_NORM, K_NORM = 0, 1, 2, 8, 9, 11, 12, 13
"""Indices of the node's inputs."""

FLOATS = (1, 10, 16)
"""Element types of caches that store keys and values without quantization."""

SCALE = 1 / 16
"""The scale of a quantized cache."""


def attended(node: onnx.NodeProto, values: Mapping[int, FloatArray], cache: KvTensor) -> FloatArray:
    """The output of `node` [S, W] for a text without a past. `values`: its inputs by index, tokens as [S, width]. A
    quantized `cache` has `SCALE`."""
    heads, head_size, elem_type = cache.heads, cache.head_size, cache.elem_type
    num_queries = int(attribute(node, "num_heads", 0))
    tokens_SW = np.concatenate([values[place] for place in (QUERY, KEY, VALUE) if place in values], axis=1)
    parts = np.split(tokens_SW.reshape(len(tokens_SW), -1, head_size), [num_queries, num_queries + heads], axis=1)
    q_QSD, k_HSD, v_HSD = (part.swapaxes(0, 1) for part in parts)
    epsilon = float(attribute(node, "qk_norm_epsilon", 1e-6))
    q_QSD, k_HSD = _normed(q_QSD, values.get(Q_NORM), epsilon), _normed(k_HSD, values.get(K_NORM), epsilon)
    if attribute(node, "do_rotary", 0):
        is_interleaved = bool(attribute(node, "rotary_interleaved", 0))
        q_QSD, k_HSD = (rotated(part, values[COS], values[SIN], is_interleaved) for part in (q_QSD, k_HSD))
    q_QSD, k_HSD, v_HSD = q_QSD * score_scale(node, head_size), _stored(k_HSD, elem_type), _stored(v_HSD, elem_type)
    softcap, sink_Q = float(attribute(node, "softcap", 0.0)), values.get(SINK)
    visible_SS = visible(len(tokens_SW), int(attribute(node, "local_window_size", -1)))
    found_QSD = np.empty_like(q_QSD)
    for i, q_SD in enumerate(q_QSD):
        group = i * heads // num_queries
        scores_SS = q_SD @ k_HSD[group].T
        if softcap:
            scores_SS = softcap * np.tanh(scores_SS / softcap)
        scores_SS = np.where(visible_SS, scores_SS, -np.inf)
        sink = -np.inf if sink_Q is None else float(sink_Q.ravel()[i])
        top_S1 = np.maximum(scores_SS.max(axis=1, keepdims=True), sink)
        shares_SS = np.exp(scores_SS - top_S1)
        found_QSD[i] = shares_SS @ v_HSD[group] / (shares_SS.sum(axis=1, keepdims=True) + np.exp(sink - top_S1))
    return np.asarray(found_QSD.swapaxes(0, 1)).reshape(len(tokens_SW), -1)


def rounded(value: FloatArray, elem_type: int) -> FloatArray:
    """`value`, rounded to that type."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    return np.asarray(np.asarray(value, np.float32).astype(dtype), np.float32)


def _stored(part: FloatArray, elem_type: int) -> FloatArray:
    if elem_type in FLOATS:
        return part
    codes = part / SCALE
    is_whole = np.issubdtype(helper.tensor_dtype_to_np_dtype(elem_type), np.integer)
    return np.asarray(rounded(np.rint(codes).clip(-128, 127) if is_whole else codes, elem_type) * SCALE, np.float32)


def score_scale(node: onnx.NodeProto, head_size: int) -> float:
    """The factor of the products of queries and keys."""
    return float(attribute(node, "scale", 0.0)) or float(head_size**-0.5)


def visible(length: int, window: int) -> np.ndarray:
    """Whether a token [S] sees a position [S]."""
    distances_SS = np.arange(length)[:, None] - np.arange(length)
    return np.asarray((distances_SS >= 0) & ((distances_SS < window) | (window <= 0)))


def _normed(part: FloatArray, weight: FloatArray | None, epsilon: float) -> FloatArray:
    """Divided by the root of the mean square of each head, times `weight` [D]."""
    if weight is None:
        return part
    return np.asarray(part / np.sqrt(np.square(part).mean(axis=-1, keepdims=True) + epsilon) * weight, np.float32)


def rotated(part: FloatArray, cos_SR: FloatArray, sin_SR: FloatArray, is_interleaved: bool) -> FloatArray:
    """The first 2 R numbers of each head, taken as R points in the plane, turned by the angle of their position."""
    half = cos_SR.shape[1]
    cos, sin = cos_SR[: part.shape[1]], sin_SR[: part.shape[1]]
    at = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(half), slice(half, 2 * half))
    first, second = (part[..., place] for place in at)
    turned = np.array(part, np.float32)
    turned[..., at[0]] = first * cos - second * sin
    turned[..., at[1]] = second * cos + first * sin
    return turned


LENGTH = 640
"""Tokens of a text: in three blocks, and beyond 512, from where on a decoding kernel splits the keys."""

WINDOW = 300
"""Longer windows are cut to so many positions: texts of 640 tokens would not show them."""

PAST = ("past_key", "past_value")
PRESENT = ("present_key", "present_value")
OUTPUT = "attended"

SCALES = (14, 15)
"""Indices of the node's inputs."""

_GIVEN: Mapping[int, str] = {**dict(enumerate((*PAST, STARTS, PASTS, TABLE), 3)), 16: BOUNDS}
"""The inputs of a trial that are not attended to, by their index in the node."""


@dataclass(frozen=True)
class AttentionTrial:
    """`graph` takes `inputs`, `PAST` in blocks, which it returns as `PRESENT`, and the inputs of a packed step. It
    returns `OUTPUT` [N, W]."""

    graph: bytes
    node: onnx.NodeProto
    """The attention, with the window that is tried."""

    inputs: Mapping[int, tuple[tuple[int, ...], int]]
    """By index in `node`, the input's shape, where 0 is the number of tokens, and the type to which it is rounded."""

    cache: KvTensor
    """One of the caches over which the attention runs."""


def input_name(place: int) -> str:
    """The name in a trial's graph of the node's input with that index."""
    return f"input_{place}"


def attention_trials(paged: onnx.ModelProto, caches: Caches) -> list[AttentionTrial]:
    """A graph for each kind of attention over these paged caches: kinds differ in attributes, inputs and storage."""
    weights = {tensor.name: tensor for tensor in paged.graph.initializer}
    trials: dict[object, AttentionTrial] = {}
    for node in paged.graph.node:
        if node.op_type != "PagedAttention" or node.input[3] not in caches:
            continue
        cache = caches[node.input[3]]
        shapes = [tuple(weights[name].dims) if name in weights else bool(name) for name in node.input]
        storage = cache.elem_type, cache.heads, cache.head_size
        kind = (tuple(sorted(entry.SerializeToString() for entry in node.attribute)), *shapes, storage)
        if kind not in trials:
            trials[kind] = _trial_of(node, weights, cache)
    return list(trials.values())


def _trial_of(source: onnx.NodeProto, weights: Mapping[str, TensorProto], cache: KvTensor) -> AttentionTrial:
    """A graph of `source` alone, which casts its inputs to the types that `source` takes."""
    elem_type = cache.elem_type
    narrow = elem_type if elem_type in FLOATS else TensorProto.FLOAT16  # queries, where the cache is quantized
    node = onnx.NodeProto()
    node.CopyFrom(source)
    node.output[:] = ["narrow", *PRESENT]
    for entry in node.attribute:
        if entry.name == "local_window_size":
            entry.i = min(entry.i, WINDOW)
    inputs: dict[int, tuple[tuple[int, ...], int]] = {}
    casts = []
    for place, name in enumerate(source.input):
        if name and place in _GIVEN:
            node.input[place] = _GIVEN[place]
        elif name:
            weight, wide = weights.get(name), input_name(place)
            own_type = TensorProto.FLOAT if place in SCALES else narrow
            own_type = own_type if weight is None else int(weight.data_type)
            inputs[place] = _shape(source, place, weight, cache), own_type
            node.input[place] = f"{wide}_narrow"
            casts.append(helper.make_node("Cast", [wide], [node.input[place]], name=wide, to=own_type))
    value = helper.make_tensor_value_info
    blocks: list[str | int | None] = ["blocks", "block_size", cache.heads, cache.head_size]
    taken = [
        value(input_name(place), TensorProto.FLOAT, [axis or None for axis in shape])
        for place, (shape, _) in inputs.items()
    ]
    taken += [value(name, elem_type, blocks) for name in PAST]
    taken += [value(name, TensorProto.INT32, shape) for name, shape in INPUTS.items() if name in set(node.input)]
    outputs = [value(OUTPUT, TensorProto.FLOAT, ["N", "W"]), *(value(name, elem_type, blocks) for name in PRESENT)]
    widened = helper.make_node("Cast", ["narrow"], [OUTPUT], name=OUTPUT, to=TensorProto.FLOAT)
    graph = helper.make_graph([*casts, node, widened], "attention", taken, outputs)
    serialized = bytes(model_of(graph, 21, "com.microsoft").SerializeToString())
    return AttentionTrial(serialized, node, inputs, cache)


def _shape(source: onnx.NodeProto, place: int, weight: TensorProto | None, cache: KvTensor) -> tuple[int, ...]:
    """The shape of an input, in which 0 stands for the number of tokens."""
    num_queries, heads, size = int(attribute(source, "num_heads", 0)), cache.heads, cache.head_size
    if place < 3:
        packed = 0 if source.input[1] else 2 * heads
        return (0, (heads if place else num_queries + packed) * size)
    if place in (COS, SIN):  # one that is computed from the length turns whole heads
        return (LENGTH, int(weight.dims[1]) if weight is not None else size // 2)
    if weight is not None:
        return tuple(weight.dims)
    return ({SINK: num_queries, Q_NORM: size, K_NORM: size}.get(place, 1),)


CUT, FORK, MORE = 280, BLOCK_SIZE, 44
"""Where a text's first step ends, within a block; the positions of it that a second text shares, a whole block; the
number of the second text's own tokens."""

PROMPT, ANSWER = 4, 8
"""Tokens of a third text: those of its prompt, and all. The others are fed one a step, as answers are. They are so few
that a token which a kernel does not write shows in those after it, as it would not among hundreds."""

SHARP = 3
"""The first text's tokens with other queries: these attend to a few positions, and all others to all they see."""

TABLES, NUM_BLOCKS = ((6, 2, 4), (6, 1, 0), (3, 5, 7), (6, 2, 4)), 8
"""Blocks of the texts, which are neither neighbours nor in order."""

ROWS = 80
"""Rows of a step: more than two warps have lanes, and more than the default number of slots."""

SHARPNESS = 4.0
"""The standard deviation of the sharp text's scores: wrong scales, caps and rotations change its values as much."""

EVEN, COUNTED = 0.35, 4
"""About the scores of the other texts, positive and negative by turns. A token then attends to each of n positions by
about 1/n, and twice as much to one as to its neighbour. Differences times n, over `COUNTED`, must keep the tolerance:
one lost position makes 0.35, and rounding next to nothing."""

TOLERANCE = 0.1
"""The largest accepted error of attended values, which are about 1."""

QUANTIZED_TOLERANCE = 0.3
"""The same where the cache has 8 bits, to which some kernels may also round queries and weights."""


_OWN_TYPE = (b"", b"float16", b"bfloat16", b"int8", b"float8e4m3fn")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "is_causal": (1,),
    "kv_cache_layout": (b"SEPARATE",),
    "rotary_offset": (0,),
    "v_head_size": (0,),
    "k_cache_dtype": _OWN_TYPE,
    "v_cache_dtype": _OWN_TYPE,
}
"""Other attributes of an exporter's node, and the values with which they have no effect."""


class Span(NamedTuple):
    """A row of a step: tokens `start` to `stop` of a text, after the tokens before them."""

    text: int
    start: int
    stop: int


def spans() -> list[list[Span]]:
    """The rows of each step: a prompt that ends within a block; then the rest of it, a second text after its first
    block, and short rows; then many rows of one token each, of which only the answer's are new. The other rows write
    again what is in the cache already."""
    short = [
        Span(i % 2 * SHARP, past, past + 1 + i % 3)
        for i, past in enumerate(np.linspace(0, CUT - 3, ROWS - 4, dtype=int))
    ]
    long = [Span(text, CUT, LENGTH) for text in (0, SHARP)]
    prompts = [*short, Span(1, FORK, FORK + MORE), Span(2, 0, PROMPT), *long]
    return [[Span(0, 0, CUT)], prompts, *([*_single(past), Span(2, past, past + 1)] for past in range(PROMPT, ANSWER))]


def _single(turn: int) -> Iterator[Span]:
    """Many rows of one token, most of the first text. Positions get one or the other of its queries by turns."""
    for i, past in enumerate(np.linspace(LENGTH - 1, 0, ROWS - 1, dtype=int)):
        text = (0, 1, SHARP, 0)[(i + turn) % 4]
        start = FORK + i % MORE if text == 1 else int(past)
        yield Span(text, start, start + 1)


def steps_of(rows: list[Span], most: int) -> Iterator[list[Span]]:
    """Steps of up to `most` tokens that hold the rows, which are cut where a step is full. Rows of one token each run
    together, as rows that decode do even where a prompt's steps are short."""
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
    only rounding differs. Each kind of attention runs six times if `most` is at least 600."""
    for trial in trials:
        try:
            with named_ort_failures("on attention over a paged cache"):
                difference, where = _difference(trial, runner, most)
        except (ModelError, ProviderError, RunError) as error:
            return str(error)
        if not difference <= (TOLERANCE if trial.cache.elem_type in FLOATS else QUANTIZED_TOLERANCE):
            shown = f"attention over a paged cache is {difference:.2g} off on this device, of values around 1"
            return f"{shown}: at position {where}"
    return None


def _difference(trial: AttentionTrial, runner: Runner, most: int) -> tuple[float, str]:
    """The largest difference of a step, and where it is. Raises `RunError` for what numpy does not compute here."""
    assert runner.open_graph is not None
    for entry in trial.node.attribute:
        value = helper.get_attribute_value(entry)
        if entry.name not in KEPT and value not in _NEUTRAL.get(entry.name, ()):
            raise RunError(f"attention over a paged cache has {entry.name} {value}, which no trial knows")
    texts = _texts(trial)
    expected = [attended(trial.node, text, trial.cache) for text in texts]
    session = runner.open_graph(trial.graph)
    pools = [Pool(session, trial.cache, NUM_BLOCKS, runner.device, runner.open_graph) for _ in PAST]
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


def _rows_of(texts: Sequence[FloatArray], rows: Iterable[Span]) -> FloatArray:
    """The texts' values [S, ...] at the tokens of a step."""
    return np.concatenate([texts[row.text][row.start : row.stop] for row in rows])


def _texts(trial: AttentionTrial) -> list[dict[int, FloatArray]]:
    """The node's inputs by index for each text, tokens as [S, width], rounded to the types to which the graph casts."""
    rng = np.random.default_rng(0)
    constants: dict[int, FloatArray] = {}
    for place, (shape, _) in trial.inputs.items():
        if place > VALUE:
            constants[place] = _constant(place, rng.standard_normal(shape, np.float32), constants)
    node, size = trial.node, trial.cache.head_size
    # Factors of queries [D] of variance 1: scores are `EVEN` at the first number and what it is rotated with.
    gains = np.full(size, SHARPNESS / (score_scale(node, size) * size**0.5), np.float32)
    partner = (1 if attribute(node, "rotary_interleaved", 0) else constants[COS].shape[1]) if COS in constants else 0
    gains[[0, partner]] *= EVEN / SHARPNESS
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


def _tokens(
    trial: AttentionTrial, constants: Mapping[int, FloatArray], gains: FloatArray, rng: np.random.Generator
) -> tuple[dict[int, FloatArray], dict[int, FloatArray]]:
    """Tokens of a text [S, width] by index, with queries that attend to all positions, and with queries that attend to
    a few. All numbers are exact in 8 bits. Sums of values stay small, and so does their rounding."""
    node, heads, size = trial.node, trial.cache.heads, trial.cache.head_size
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
    """The attention's output [N, W] for a step."""
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
