"""The noise of a model: what it says of the same requests in other forms of running it, and with the inputs of its
products moved at random by as much as the rounding of any kernel amounts to. Knows no statistics.

A product's result, computed with rounding in any order, is the exact one of inputs that are moved by at most n u
relatively, and with high probability by a multiple of sqrt(n) u (Higham 2002, ch. 3; Higham and Mary 2019), with n
terms and the unit roundoff u. Kernels sum in blocks, of tiles and of vector lanes: sqrt(b + n / b) u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from olive_ext.config import EngineConfig
from olive_ext.errors import OliveExtError, RunError
from olive_ext.graph.nodes import attribute
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.places.decision import FloatArray
from olive_ext.plugins.diagnose.places.sample import Kept
from olive_ext.python_processes import usable_processors
from olive_ext.session.opening import open_model
from olive_ext.session.requests import ScoringRequest

CHUNK = 24
"""Tokens of a step where these are few: no multiple of what kernels take in one go."""

NUM_MOVED = 2
"""Runs with moved inputs."""

UNITS = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8, "8-bit activations": 2.0**-7}
"""Unit roundoff by what a place computes in. Of activations that are rounded to 8 bits in blocks: a step is 1/127 of
the largest, which is about three times the root mean square of a block."""

_MOST_TERMS = 256
"""sqrt(b + n / b) for n up to 16,384 terms in blocks b of 64 to 256 stays near sqrt(256)."""

_BLOCK_UNITS = ("float32", "tf32", "float16", "bfloat16")
_FLOATS = {1: "float32", 10: "float16", 16: "bfloat16"}
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulBnb4")
_PASSED = ("DequantizeLinear", "Cast", "Transpose")
_OPTIONS = {"fp16": "float16", "float16": "float16", "bf16": "bfloat16", "tf32": "tf32"}


def computed_in(model: ResolvedModel) -> str:
    """The coarsest of `UNITS` that a place rounds to: by its graph's weights, and by its providers' options."""
    if model.kind == "hf":
        dtype = model.settings.dtype
        return dtype if dtype in UNITS else "bfloat16"
    graph = model.decoder_graph().graph
    types = {_FLOATS[one.data_type] for one in graph.initializer if one.data_type in _FLOATS and len(one.dims) > 1}
    for provider in model.providers:
        for name, value in dict(provider.options).items():
            if str(value).lower() not in ("0", "false", ""):
                types |= {unit for word, unit in _OPTIONS.items() if word in f"{name} {value}".lower()}
    if model.spec.rounds_rows or any(attribute(node, "accuracy_level", 0) == 4 for node in graph.node):
        types.add("8-bit activations")
    return coarser(*types)


def coarser(*names: str) -> str:
    """The one with the largest unit roundoff; float32 of none."""
    return max(("float32", *names), key=lambda name: UNITS.get(name, 0.0))


def move_inputs(model: ModelProto, unit: str, seed: int) -> None:
    """Puts a multiplication by 1 + e before every product with weights in `model`, e drawn for each column of the
    product's input from a normal distribution with a standard deviation of sqrt(n) u. Raises `ValueError` where there
    is no such product."""
    graph, rng = model.graph, np.random.default_rng(seed)
    weights = {one.name: one for one in graph.initializer}
    sources = {output: node for node in graph.node for output in node.output}
    moved = ModelProto().graph
    for number, node in enumerate(graph.node):
        if columns := _columns(node, weights, sources) if node.op_type in _PRODUCTS else 0:
            spread = UNITS[unit] * (math.sqrt(min(columns, _MOST_TERMS)) if unit in _BLOCK_UNITS else 1.0)
            name, factor = f"olive_ext_moved_{number}", f"olive_ext_moved_{number}_float"
            values = (1 + spread * rng.standard_normal(columns)).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(values, factor))
            if (elem_type := _type_of(node, weights, sources)) != TensorProto.FLOAT:
                cast, factor = factor, f"{name}_factor"
                moved.node.append(helper.make_node("Cast", [cast], [factor], to=elem_type, name=f"{name}_cast"))
            moved.node.append(helper.make_node("Mul", [node.input[0], factor], [name], name=name))
            node.input[0] = name
        moved.node.append(node)
    if len(moved.node) == len(graph.node):
        raise ValueError("its graph has no product with weights")
    del graph.node[:]
    graph.node.extend(moved.node)


def _columns(node: NodeProto, weights: Mapping[str, TensorProto], sources: Mapping[str, NodeProto]) -> int:
    """Columns of the input that a product with weights sums over; 0 where it has none, or they are not known."""
    if node.op_type in ("MatMulNBits", "MatMulBnb4"):
        return int(attribute(node, "K", 0))
    name, is_turned = node.input[1], bool(attribute(node, "transB", 0))
    while name not in weights and name in sources and sources[name].op_type in _PASSED:
        is_turned ^= sources[name].op_type == "Transpose"
        name = sources[name].input[0]
    shape = weights[name].dims if name in weights else ()
    return 0 if len(shape) != 2 else shape[1 if is_turned else 0]


def _type_of(node: NodeProto, weights: Mapping[str, TensorProto], sources: Mapping[str, NodeProto]) -> int:
    """The element type of a product's input: that of its weights, or of what scales them."""
    names = [*node.input[1:]]
    while names:
        name = names.pop(0)
        if name in weights and weights[name].data_type in _FLOATS:
            return int(weights[name].data_type)
        if name in sources and (source := sources[name]).op_type in _PASSED:
            if source.op_type == "Cast":
                return int(attribute(source, "to", TensorProto.FLOAT))
            names += source.input
    return int(TensorProto.FLOAT)


@dataclass(frozen=True)
class Variant:
    """One way of running a model that changes its numbers by rounding alone."""

    words: str
    engine: Mapping[str, Any]
    edit_graph: Callable[[Any], None] | None = field(default=None, compare=False)


def form_of(model: ResolvedModel) -> Variant:
    """Another form: a row for each text instead of their shared steps, few tokens at a time, on other threads. All of
    this in one run: each session that is opened costs."""
    threads = 2 if model.settings.engine.num_threads == 1 and (usable_processors() or 1) > 1 else 1
    words = f"rows, chunks of {CHUNK} tokens, {threads} thread{'s' * (threads > 1)}"
    return Variant(words, {"chunk_size": CHUNK, "scoring": "rows", "num_threads": threads})


def moved(unit: str, count: int = NUM_MOVED) -> list[Variant]:
    """With moved inputs, each run by other numbers."""
    words = f"inputs of products moved as by rounding in {unit}"
    return [
        Variant(f"{words}, draw {seed + 1}", {}, edit_graph=partial(move_inputs, unit=unit, seed=seed))
        for seed in range(count)
    ]


def log_probabilities(
    model: ResolvedModel, variant: Variant, documents: Sequence[Sequence[Kept]], max_length: int
) -> list[FloatArray]:
    """The log-probabilities in nats of the targets of each document's requests, in their order. Raises
    `OliveExtError` where the model cannot be run in this way."""
    engine = model.settings.engine.model_dump(exclude_unset=True)
    here = {"isolation": "none", "workers": None, "max_length": max_length, "deterministic": True}
    opened = model.patched({**here, "engine": EngineConfig.parse({**engine, **variant.engine})})
    opened = opened if variant.edit_graph is None else replace(opened, edit_graph=variant.edit_graph)
    requests = [kept.request for document in documents for kept in document]
    try:
        with open_model(opened) as session:
            outputs = _answers(session, requests)
    except ValueError as error:
        raise error if isinstance(error, OliveExtError) else RunError(str(error)) from error
    numbers = iter(outputs)
    return [np.concatenate([np.asarray(next(numbers), np.float64) for _ in document]) for document in documents]


def _answers(session: Any, requests: Sequence[Any]) -> list[Sequence[float]]:
    """Log-probabilities of each request's targets, of both kinds of requests."""
    found: dict[int, Sequence[float]] = {}
    for is_scoring, ask in ((True, session.loglikelihood), (False, session.loglikelihood_rolling)):
        places = [index for index, one in enumerate(requests) if isinstance(one, ScoringRequest) is is_scoring]
        if places:
            outputs = ask([requests[index] for index in places])
            found.update(zip(places, (output.token_logprobs for output in outputs), strict=True))
    return [found[index] for index in range(len(requests))]
