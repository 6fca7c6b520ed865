"""The finding on one model in two places: how far apart they are, beside this model's own noise, and beside what the
rounding of their arithmetic does to it. Noise passes each of the two with a probability of at most 1 %.

**The sample.** Requests of a comparison are kept while it runs: those of documents drawn at random, to be run again in
other forms, and those that are farthest apart, to be looked into.

**The noise.** The model is asked the same requests in other forms of running it, and with the inputs of its products
moved at random by as much as the rounding of any kernel amounts to. A product's result, computed with rounding in any
order, is the exact one of inputs that are moved by at most n u relatively, and with high probability by a multiple of
sqrt(n) u (Higham 2002, ch. 3; Higham and Mary 2019), with n terms and the unit roundoff u. Kernels sum in blocks, of
tiles and of vector lanes: sqrt(b + n / b) u.

**The decision.** Whether two places are farther apart than noise is tested twice at half the level each. Axes: N
positions, D documents.

Single positions: the distances of a noise run are a sample of what rounding does at a position. Their tail is taken
for a Pareto's from the 95 % quantile on (Hill 1975), which gives the distance that is passed at one of N positions with
a probability of at most alpha (Weissman 1978): x_k (k N / (alpha J))^xi with the k-th largest x_k of J noise distances
and the mean xi of ln x_j / x_k over the k largest. A Pareto's tail is heavier than a normal's: the limit errs upwards,
which is what a sample of few positions needs (with the moment estimator of Dekkers, Einmahl and de Haan 1989, which
fits lighter tails, 5 to 10 % of equal pairs were beyond the limit: `python -m docs.benchmarks places rates`).

All together: for each of D documents the logarithm of the pair's root mean square over the noise's, on the same
positions: one-sided t-test that its mean is at most 0. A document's own scale cancels.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from scipy import stats

from olive_ext.config import EngineConfig
from olive_ext.errors import OliveExtError, RunError, first_line
from olive_ext.graph.nodes import attribute
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.diagnose.remedy.variants import asked
from olive_ext.python_processes import usable_processors
from olive_ext.report.diagnosis import FirstPosition, Noise, PlaceFinding, PlaceKind
from olive_ext.report.numbers import nats
from olive_ext.session.opening import open_model
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

MOST_DOCUMENTS = 64
MOST_APART = 32


@dataclass(frozen=True)
class Probe:
    """A request with what both places said: log-probabilities of its targets in nats, [T] each."""

    task: str
    document: int
    request: ScoringRequest | RollingRequest
    own: FloatArray
    other: FloatArray
    positions: npt.NDArray[np.int64]
    """Tokens before each target that the models attended to, [T]."""

    targets: npt.NDArray[np.int64]

    @property
    def apart(self) -> FloatArray:
        """How far apart the two places are at each target, in nats."""
        return np.abs(self.own - self.other)

    def tokens(self, target: int) -> list[int] | None:
        """The tokens that were fed before this target is predicted; None where they are not known."""
        position = int(self.positions[target])
        if isinstance(self.request, ScoringRequest):
            before: Any = self.request.context
        else:
            before = () if self.request.prefix is None else (self.request.prefix,)
        if isinstance(before, str) or (len(before) and not isinstance(before[0], int)):
            return None
        whole = [*before, *self.targets[:target].tolist()]
        return whole[len(whole) - position :] if 0 < position <= len(whole) else None


class Sample:
    """At most `MOST_DOCUMENTS` documents of each task, those with the smallest digests of their numbers: every document
    is among them with the same probability, however many come. For each document the first request: its choices share a
    context, which each would compute again."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[tuple[int, int], Probe]] = {}
        self._apart: list[tuple[float, int, Probe]] = []
        self._count = 0

    def note(
        self, task: str, document: int, request: ScoringRequest | RollingRequest, output: ScoringOutput | RollingOutput
    ) -> None:
        """Notes a compared request."""
        compared = output.compared
        if compared is None or not len(compared):
            return
        own, other = np.asarray(output.token_logprobs, np.float64), np.asarray(compared.reference_logprobs, np.float64)
        kept = Probe(task, document, request, own, other, compared.positions, compared.targets)
        self._count += 1
        heapq.heappush(self._apart, (float(np.nan_to_num(kept.apart).max()), self._count, kept))
        if len(self._apart) > MOST_APART:
            heapq.heappop(self._apart)
        documents = self._tasks.setdefault(task, {})
        key = (zlib.crc32(f"{task} {document}".encode()), document)
        if key in documents or len(documents) < MOST_DOCUMENTS or key < max(documents):
            documents.setdefault(key, kept)
            if len(documents) > MOST_DOCUMENTS:
                del documents[max(documents)]

    def documents(self) -> Iterator[Probe]:
        """The request of each drawn document, with tasks in turns, in random order within each."""
        ordered = [[documents[key] for key in sorted(documents)] for documents in self._tasks.values()]
        for turn in itertools.zip_longest(*ordered):
            yield from (document for document in turn if document is not None)

    def apart(self) -> list[Probe]:
        """The requests that are farthest apart, at most `MOST_APART`."""
        return [kept for *_, kept in sorted(self._apart, reverse=True)]


FloatArray: TypeAlias = npt.NDArray[np.float64]

ALPHA = 0.01
"""The largest probability that noise is taken for more than noise."""

RESOLUTION = 4e-6
"""Smaller distances in nats do not count: twice the spacing of float32 at logits of 16 to 32."""

_LEAST_TESTED = 4
_TAIL = 0.05
_LEAST_TAIL = 10
_NOTHING = RESOLUTION / 10


@dataclass(frozen=True)
class PairAgainstNoise:
    """A pair of places compared with noise."""

    limit: float
    """The distance in nats that noise exceeds at none of the pair's positions."""

    ratio: float
    """The pair's distances divided by the noise's: the geometric mean over documents. 1 where it is not known."""

    is_farther_somewhere: bool
    is_farther_overall: bool

    @property
    def is_farther(self) -> bool:
        """Whether the pair is farther apart than the noise is."""
        return self.is_farther_somewhere or self.is_farther_overall


def held(pair: Sequence[FloatArray], noise: Sequence[Sequence[FloatArray]], everywhere: FloatArray) -> PairAgainstNoise:
    """`pair`: distances in nats at the positions of each of D documents; `noise`: the same of each noise run;
    `everywhere` [N]: the pair's distances at all positions that were compared."""
    runs = [[np.maximum(values, RESOLUTION) for values in run] for run in noise]
    limits = [tail_limit(np.concatenate(run), len(everywhere), ALPHA / 2) for run in noise]
    limit = max(RESOLUTION, *limits)  # runs in two places may differ in scale, and would be no tail together
    logs = np.array([
        math.log(_rms([np.maximum(values, RESOLUTION)]) / _rms([run[number] for run in runs]))
        for number, values in enumerate(pair)
    ])  # fmt: skip
    overall, ratio = False, math.exp(float(logs.mean())) if len(logs) else 1.0
    if len(logs) >= _LEAST_TESTED:  # distances that are all equal have no error
        error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
        overall = float(logs.mean()) - float(stats.t.ppf(1 - ALPHA / 2, len(logs) - 1)) * error > 0
    return PairAgainstNoise(limit, ratio, bool(everywhere.max(initial=0.0) > limit), overall)


def tail_limit(noise: FloatArray, num_positions: int, alpha: float) -> float:
    """The distance that noise exceeds at one of so many positions with a probability of at most `alpha`."""
    ordered = np.sort(noise)[::-1]
    count = min(len(ordered) - 1, max(_LEAST_TAIL, round(_TAIL * len(ordered))))
    if count < 1:
        return float(ordered[0])
    start = max(float(ordered[count]), _NOTHING)
    ordered = np.maximum(ordered, start)
    index = float(np.mean(np.log(ordered[:count] / start)))
    beyond = count * max(num_positions, 1) / (alpha * len(ordered))
    return float(max(ordered[0], start * max(beyond, 1.0) ** index))


def _rms(parts: Sequence[FloatArray]) -> float:
    return math.sqrt(float(np.mean(np.concatenate(list(parts)) ** 2)))


CHUNK = 24
"""Tokens of a step where these are few: not a multiple of what kernels take at a time."""

NUM_MOVED = 2
"""Runs with changed inputs."""

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
    """The coarsest of `UNITS` that a place rounds to: by its graphs' weights, and by its providers' options."""
    if model.kind == "hf":
        dtype = model.settings.dtype
        return dtype if dtype in UNITS else "bfloat16"
    graphs = [one.graph for one in (model.decoder_graph(), *map(load_graph, model.files.stages))]
    weights = itertools.chain.from_iterable(graph.initializer for graph in graphs)
    types = {_FLOATS[one.data_type] for one in weights if one.data_type in _FLOATS and len(one.dims) > 1}
    for provider in model.providers:
        for name, value in dict(provider.options).items():
            if str(value).lower() not in ("0", "false", ""):
                types |= {unit for word, unit in _OPTIONS.items() if word in f"{name} {value}".lower()}
    nodes = itertools.chain.from_iterable(graph.node for graph in graphs)
    rounds_rows = not model.files.pipeline and model.spec.rounds_rows  # a pipeline's interface cannot be read
    if rounds_rows or any(attribute(node, "accuracy_level", 0) == 4 for node in nodes):
        types.add("8-bit activations")
    return coarser(*types)


def coarser(*names: str) -> str:
    """The one with the largest unit roundoff; float32 without any."""
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
    """Another form: a row for each text instead of shared steps, few tokens at a time, on other threads. All of this in
    one run, because each opened session costs time."""
    threads = 2 if model.settings.engine.num_threads == 1 and (usable_processors() or 1) > 1 else 1
    words = f"rows, chunks of {CHUNK} tokens, {threads} thread{'s' * (threads > 1)}"
    return Variant(words, {"chunk_size": CHUNK, "scoring": "rows", "num_threads": threads})


def moved(unit: str, count: int = NUM_MOVED) -> list[Variant]:
    """With changed inputs, by other numbers in each run."""
    words = f"inputs of products moved as by rounding in {unit}"
    return [
        Variant(f"{words}, draw {seed + 1}", {}, edit_graph=partial(move_inputs, unit=unit, seed=seed))
        for seed in range(count)
    ]


def log_probabilities(
    model: ResolvedModel, variant: Variant, sample: Sequence[Probe], max_length: int
) -> list[FloatArray]:
    """The log-probabilities in nats of each request's targets. Raises `OliveExtError` if the model cannot run this
    way."""
    engine = model.settings.engine.model_dump(exclude_unset=True)
    here = {"isolation": "none", "workers": None, "max_length": max_length, "deterministic": True}
    changed = model.patched({**here, "engine": EngineConfig.parse({**engine, **variant.engine})})
    try:
        with open_model(replace(changed, edit_graph=variant.edit_graph)) as session:
            (outputs,) = asked(session, [[kept.request for kept in sample]])
    except ValueError as error:
        raise error if isinstance(error, OliveExtError) else RunError(str(error)) from error
    return [np.asarray(output.token_logprobs, np.float64) for output in outputs]


logger = logging.getLogger(__name__)

SHARE = 0.06
"""The part of the tokens that both places were fed which noise runs may take together, beside `LEAST_DOCUMENTS`."""

MOST_AMPLIFIED = 10_000
"""The most that a model's rounding amounts to, in multiples of its unit roundoff, as a root mean square in nats: 28 for
float32 on the quickstart's model and 270 on a recurrent one, 14 for 8-bit activations. Where changed inputs change
more, the place does not repeat its own results."""

HARMLESS = 1e-4
"""Up to so many nats statistics alone make a pair green; beyond, nodes must agree. Other kernels in float32 differ by
up to 1e-5, and a product that is 0.01 % too large by 2.6e-4."""

LEAST_DOCUMENTS, LEAST_POSITIONS = 8, 100
"""The fewest documents on which noise is measured, whatever that costs: only some positions show its tail."""


@dataclass(frozen=True)
class Places:
    """The evaluated model and the reference; None of a reference that is records, which were `recorded_in`."""

    model: ResolvedModel
    reference: ResolvedModel | None
    names: tuple[str, str]
    max_length: int
    recorded_in: str = "float32"


@dataclass(frozen=True)
class _Run:
    noise: Noise
    apart: list[FloatArray]


def located(
    places: Places, sample: Sample, everywhere: FloatArray, tokens_fed: int
) -> tuple[PlaceFinding, tuple[Probe, int] | None]:
    """The finding, and the request and target where the places part for the first time, or where they are farthest
    apart if noise explains it, and it is not harmless. `everywhere` [N]: distances in nats at all positions;
    `tokens_fed` to one of the models."""
    models = (model for model in (places.model, places.reference) if model is not None)
    unit = coarser(*map(computed_in, models), places.recorded_in)
    size = _size(everywhere) if len(everywhere) else (0.0, 0.0)
    finding = PlaceFinding("cannot_tell", *places.names, unit, *size, len(everywhere))
    if not len(everywhere):
        return replace(finding, reason="no log-probability was compared"), None
    if not np.isfinite(everywhere).all():
        return replace(finding, reason="a log-probability is not finite"), None
    own, rounding, failures = _runs(places, unit, sample, tokens_fed)
    documents = [kept.apart for kept in sample.documents()]
    noises = tuple(run.noise for run in (*own, *rounding))
    sizes = [len(run.apart) for run in (*own, *rounding)]
    if not own or not rounding:
        why = failures[0] if failures else "no place can be run in another form"
        finding = replace(finding, noise=noises, reason=f"its noise was not measured ({why})")
        if size[1] <= RESOLUTION:
            return replace(finding, kind="same", reason=""), None
        early = _first(sample.apart(), size[1] / 2)
        return replace(finding, first=_first_position(*early)), early
    pair = documents[: min(sizes)]
    nearer, farther = (held(pair, [run.apart for run in runs], everywhere) for runs in (own, rounding))
    excuse = _no_noise(own, rounding, unit)
    near: PlaceKind = "cannot_tell" if excuse else "kernels" if nearer.is_farther else "same"
    kind: PlaceKind = "different" if farther.is_farther and (excuse or nearer.is_farther) else near
    is_open = kind == "different" or (kind != "cannot_tell" and size[1] > HARMLESS)
    where = _first(sample.apart(), farther.limit if kind == "different" else size[1] / 2) if is_open else None
    first = None if where is None else _first_position(*where)
    limits = replace(finding, noise_limit=nearer.limit, kernel_limit=farther.limit, ratio=farther.ratio)
    limits = replace(limits, reason=excuse if kind == "cannot_tell" else "")
    return replace(limits, kind=kind, noise=noises, first=first), where


def _no_noise(own: Sequence[_Run], rounding: Sequence[_Run], unit: str) -> str:
    """Why what was measured is not noise: a place that is wrong in some forms, or differs from run to run, is not
    excused by itself. Empty where it is noise."""
    most = MOST_AMPLIFIED * UNITS[unit]
    if large := [run.noise for run in rounding if run.noise.rms > most]:
        return f"{large[0].place} does not repeat itself: {large[0].form}, it is {nats(large[0].rms)} nats off"
    scales = [run.apart for run in rounding]
    for run in own:
        pair = run.apart[: min(map(len, scales))]
        if held(pair, scales, np.concatenate(run.apart)).is_farther:
            noise = run.noise
            return f"{noise.place} gives other numbers by {noise.form}: {nats(noise.rms)} nats off, beyond rounding"
    return ""


def _size(apart: FloatArray) -> tuple[float, float]:
    """The root mean square and the largest."""
    return float(np.sqrt(np.mean(apart**2))), float(apart.max())


def _first_position(kept: Probe, target: int) -> FirstPosition:
    return FirstPosition(kept.task, kept.document, int(kept.positions[target]), float(kept.apart[target]))


def _runs(places: Places, unit: str, sample: Sample, tokens_fed: int) -> tuple[list[_Run], list[_Run], list[str]]:
    """Noise runs of both places, those with changed inputs, and why others are missing."""
    jobs = list(_jobs(places, unit))
    documents = _affordable(sample, int(2 * tokens_fed * SHARE / max(len(jobs), 1)))
    own: list[_Run] = []
    rounding: list[_Run] = []
    failures: list[str] = []
    for name, model, is_own, variant in jobs:
        try:
            said = log_probabilities(model, variant, documents, places.max_length)
        except OliveExtError as error:
            failures.append(f"{variant.words}: {first_line(error)}")
            logger.info("no noise of %s, %s: %s", name, variant.words, first_line(error))
            continue
        known = [kept.own if is_own else kept.other for kept in documents]
        apart = [np.abs(new - old) for new, old in zip(said, known, strict=True)]
        whole, is_rounding = np.concatenate(apart), variant.edit_graph is not None
        if not np.isfinite(whole).all():
            failures.append(f"{variant.words}: a log-probability is not finite")
            continue
        noise = Noise(name, variant.words, *_size(whole), len(whole), is_rounding)
        (rounding if is_rounding else own).append(_Run(noise, apart))
    return own, rounding, failures


def _jobs(places: Places, unit: str) -> Iterator[tuple[str, ResolvedModel, bool, Variant]]:
    """Name and model of the place, whether it is the evaluated one, and how it is run. One has changed inputs."""
    both = list(zip(places.names, (places.model, places.reference), (True, False), strict=True))
    there = [(name, model, is_own) for name, model, is_own in both if model is not None]
    kinds = {}  # two places of one kind have the same noise
    for name, model, is_own in reversed(there):
        providers = (model.runtime.name, *(provider.name for provider in model.providers))
        kinds[model.kind, (model.settings.dtype,) if model.kind == "hf" else providers] = name, model, is_own
    for name, model, is_own in reversed(kinds.values()):
        yield name, model, is_own, form_of(model)
    graphs = [one for one in there if one[1].kind == "onnx" and one[1].runtime.name == "onnxruntime"]
    graphs.sort(key=lambda one: one[1].device.kind != "cpu")
    for name, model, is_own in graphs[:1]:
        yield from ((name, model, is_own, variant) for variant in moved(unit))


def _affordable(sample: Sample, most_tokens: int) -> list[Probe]:
    """The first documents with so many tokens in all, and at least a few."""
    chosen: list[Probe] = []
    num_positions = 0
    for kept in sample.documents():
        is_choice = isinstance(kept.request, ScoringRequest)
        most_tokens -= int(kept.positions.max(initial=0)) + 1 if is_choice else len(kept.own)
        if most_tokens < 0 and len(chosen) >= LEAST_DOCUMENTS and num_positions >= LEAST_POSITIONS:
            break
        chosen.append(kept)
        num_positions += len(kept.own)
    return chosen


def _first(requests: Sequence[Probe], limit: float) -> tuple[Probe, int]:
    """The request and the target of the earliest position beyond the limit among the requests that are farthest apart;
    the farthest where only all together are."""
    beyond = [
        (int(kept.positions[at]), kept, int(at)) for kept in requests for at in np.flatnonzero(kept.apart > limit)
    ]
    if beyond:
        return min(beyond, key=lambda one: one[0])[1:]
    return requests[0], int(requests[0].apart.argmax())
