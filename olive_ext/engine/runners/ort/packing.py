"""A decoder's graph with attention over a paged cache, and whether a device can be trusted with it: each kind of
attention as it is and over a paged cache on the same random numbers, then a small tree through the model. Knows no
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.engine.runners.ort.kv.kv_store import zeros
from olive_ext.engine.runners.ort.kv.paged import Pool
from olive_ext.engine.runners.ort.ort_failures import named_ort_failures
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.runners.trials import check_packed_steps
from olive_ext.engine.step import FloatArray
from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.graph.attention_trial import LENGTHS, OUTPUT, PAST, PRESENT, AttentionTrial, attention_trials
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.graph.paged_attention import (
    BOUNDS,
    FORMS,
    PASTS,
    STARTS,
    TABLE,
    PackedInputs,
    with_packed_inputs,
    with_paged_attention,
)
from olive_ext.graph.whole_length import WHOLE_LENGTH
from olive_ext.model import ResolvedModel
from olive_ext.model.media_types import EmbeddingSpec
from olive_ext.model.types import DecoderSpec, KvTensor, Role

TOLERANCE = 0.05
"""Largest accepted error of attended values around 1: rounding in bfloat16 is a fifth of it, a token that sees wrong
positions is off by far more."""

QUANTIZED_TOLERANCE = 0.3
"""The same where the cache has 8 bits: one kernel attends to what it is about to store, the other to what it has
stored."""

STEM, TEXT = 5, 9
"""Tokens of the first step, and of each of two texts. The second step ends the one and holds the whole other."""

_FLOATS = (1, 10, 16)


def packed(
    model: ResolvedModel, proto: ModelProto, spec: DecoderSpec
) -> tuple[ModelProto, DecoderSpec, list[AttentionTrial]]:
    """The decoder over a paged cache, its spec, and trials of each kind of attention in it. Raises `NotPagedError`."""
    tokens = [found.tensor.name for found in spec.inputs if found.role in (Role.INPUT_IDS, Role.POSITION_IDS)]
    kept = {*tokens, WHOLE_LENGTH}
    lengths = [found.tensor.name for found in spec.inputs if found.tensor.name not in kept]
    caches = {tensor.past: (tensor.heads, tensor.head_size) for tensor in spec.kv}
    inputs, form = PackedInputs(caches, tokens, lengths), FORMS[model.device.kind]
    paged = with_paged_attention(proto, inputs, form)
    read = replace(model.spec_of(paged), notes=spec.notes, choices=spec.choices)
    return paged, read, attention_trials(proto, inputs, form)


def packed_embedding(proto: ModelProto, spec: EmbeddingSpec) -> tuple[ModelProto, EmbeddingSpec]:
    """The graph that embeds tokens, for those of all rows of a step one behind the other."""
    inputs = tuple(replace(found, tensor=replace(found.tensor, shape=("N",))) for found in spec.inputs)
    return with_packed_inputs(proto, [found.tensor.name for found in inputs]), replace(spec, inputs=inputs)


def against_packed_steps(runner: OrtRunner, trials: Sequence[AttentionTrial]) -> str | None:
    """Why packed steps must not be used on this model and device; None where they compute what the graph's own
    attention does."""
    problem = _against_attention(runner, trials)
    if problem is None and runner.capacity.num_slots > 1:
        problem = check_packed_steps(runner, runner.vocab_size)
    return problem


def _against_attention(runner: OrtRunner, trials: Sequence[AttentionTrial]) -> str | None:
    for trial in trials:
        try:
            with named_ort_failures("on attention over a paged cache"):
                difference = _difference(trial, runner)
        except (RunError, MemoryShortageError) as error:
            return str(error)
        if not difference <= (TOLERANCE if trial.elem_type in _FLOATS else QUANTIZED_TOLERANCE):
            return f"attention over a paged cache is {difference:.2g} off on this device, of values around 1"
    return None


def _difference(trial: AttentionTrial, place: OrtRunner) -> float:
    rng = np.random.default_rng(0)
    first = _numbers(trial.inputs, rng)
    others = {name: shape for name, shape in trial.inputs.items() if 0 in shape}
    texts = [first, {**first, **_numbers(others, rng)}]
    before = place.open_graph(trial.before)
    expected = [_prompt(before, trial, text) for text in texts]
    after = place.open_graph(trial.after)
    shape = KvTensor(PAST[0], PRESENT[0], trial.elem_type, trial.heads, trial.head_size, position_axis=1)
    pools = [Pool(after, shape, 2, place.device) for _ in PAST]
    stem = _packed(after, pools, _tokens(trial, texts[:1], [(0, STEM)]), [STEM], [0])
    both = _packed(after, pools, _tokens(trial, texts, [(STEM, TEXT), (0, TEXT)]), [TEXT - STEM, TEXT], [STEM, 0])
    found = [np.concatenate([stem, both[:, : TEXT - STEM]], axis=1), both[:, TEXT - STEM :]]
    return float(np.abs(np.array(found) - np.array(expected)).max())


def _numbers(inputs: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, FloatArray]:
    """Values around 1 for the inputs of a text."""
    return {
        name: rng.standard_normal([size or TEXT for size in shape]).astype(np.float32) for name, shape in inputs.items()
    }


def _tokens(
    trial: AttentionTrial, texts: Sequence[Mapping[str, FloatArray]], spans: Sequence[tuple[int, int]]
) -> dict[str, FloatArray]:
    """The inputs of a packed step that holds a span of each text."""
    tokens = dict(texts[0])
    for name in (name for name, shape in trial.inputs.items() if 0 in shape):
        parts = [text[name][:, start:stop] for text, (start, stop) in zip(texts, spans, strict=True)]
        tokens[name] = np.concatenate(parts, axis=1)
    return tokens


def _prompt(session: ort.InferenceSession, trial: AttentionTrial, text: Mapping[str, FloatArray]) -> FloatArray:
    """The text behind nothing."""
    lengths = (np.array([TEXT - 1], np.int32), np.array(TEXT, np.int32))

    def bind_nothing(binding: ort.IOBinding) -> None:
        for name in PAST:
            binding.bind_ortvalue_input(name, zeros([1, trial.heads, 0, trial.head_size], trial.elem_type))

    return _run(session, bind_nothing, {**text, **dict(zip(LENGTHS, lengths, strict=True))})


def _packed(
    session: ort.InferenceSession,
    pools: Sequence[Pool],
    tokens: Mapping[str, FloatArray],
    lengths: Sequence[int],
    pasts: Sequence[int],
) -> FloatArray:
    """A packed step in which row number i has the block i."""
    longest = max(length + past for length, past in zip(lengths, pasts, strict=True))
    integers = {
        TABLE: np.arange(len(lengths))[:, None],
        STARTS: np.concatenate([[0], np.cumsum(lengths)]),
        PASTS: np.array(pasts),
        BOUNDS: np.array([max(lengths), longest, longest]),
    }
    taken = {value.name for value in session.get_inputs()}
    arrays = {name: array.astype(np.int32) for name, array in integers.items() if name in taken}

    def bind_pools(binding: ort.IOBinding) -> None:
        for pool, past, present in zip(pools, PAST, PRESENT, strict=True):
            pool.bind(binding, past, present)

    return _run(session, bind_pools, {**tokens, **arrays})


def _run(
    session: ort.InferenceSession, bind_caches: Callable[[ort.IOBinding], None], arrays: Mapping[str, Any]
) -> FloatArray:
    binding = session.io_binding()
    binding.bind_output(OUTPUT)
    bind_caches(binding)
    for name, array in arrays.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    session.run_with_iobinding(binding)
    attended: FloatArray = binding.get_outputs()[0].numpy()
    return attended
