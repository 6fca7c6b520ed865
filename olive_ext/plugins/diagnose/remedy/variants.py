"""Activations that are rounded beside weights, by switches in the float graph; the documents of tasks as requests; and
the float model whose weights are bound, not constant: how far it is on these documents from itself with other numbers.
A switch is a boolean that is bound as weights are: on, its value is rounded before it is read.

Prompts, templates, windows and examples are those of an evaluation. Generated answers of the model that is asked become
targets. Measurements are kept in a journal, by the content of documents and the weights that were quantized, so that an
interrupted map goes on. One session serves all variants of weights and roundings: a variant is a binding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from olive_ext.config import EvaluationConfig
from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.tap import ReadingTap, WritingTap
from olive_ext.engine.requests import Ids
from olive_ext.engine.runners.ort.inputs import BoundWeights
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.errors import TaskError
from olive_ext.media.pictures import media_digest
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix
from olive_ext.records.journal import Journal
from olive_ext.run.reference.observer import Observer, Scoring, score_generated
from olive_ext.session import Session
from olive_ext.session.answer_journal import deciding_facts
from olive_ext.session.local import LocalModel, RecordTo, new_records, read_texts
from olive_ext.session.opening import open_model
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

if TYPE_CHECKING:
    from olive_ext.backends.task_loading import LoadedTasks


from collections.abc import Iterator
from copy import deepcopy

from onnx import helper, numpy_helper

from olive_ext.graph.nodes import NodeWriter, attribute, default_opset, layer_of
from olive_ext.model.files.constants import plain_name
from olive_ext.plugins.diagnose.remedy.pairing import Pairing, kind_of
from olive_ext.plugins.diagnose.remedy.weights import WeightUse


def quantized_caches(floats: GraphWeights, quantized: GraphWeights) -> dict[str, str]:
    """The quantized graph's attention that keeps its KV cache in integers, and the float graph's does not, with why it
    is no entry: the cache is rounded inside of the attention, after its rotary embedding, before which no switch can
    be put."""
    whole = {plain_name(node.name) for node in floats.model.graph.node if _has_quantized_cache(node)}
    names = [node.name for node in quantized.model.graph.node if _has_quantized_cache(node)]
    why = "its KV cache is quantized: its loss is in what other kernels add"
    return {name: why for name in names if plain_name(name) not in whole}


def _has_quantized_cache(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and attribute(node, "k_quant_type", b"NONE") != b"NONE"


_DOMAIN = "com.microsoft"

OUTPUT = -1


@dataclass(frozen=True)
class Site:
    """An input of a node of the float graph, or its output. The engine renames nodes that it moves: `weight` finds
    those, too."""

    node: str
    index: int
    """The index of the input; `OUTPUT` for the output."""

    weight: str = ""
    """The constant that the node multiplies by; empty for another node."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Activations that the quantized model rounds before some of its nodes read them."""

    name: str
    """The float graph's node that reads them, or the first one, and what of it is meant."""

    kind: str
    """The name within its layer, e.g. "mlp/down_proj, activations"."""

    layer: int | None
    values: tuple[str]
    nodes: tuple[str, ...]
    """The quantized graph's nodes that round."""

    sites: tuple[Site, ...]
    pair: tuple[onnx.NodeProto, onnx.NodeProto]
    """QuantizeLinear and DequantizeLinear, with constant scales and zero points."""

    tensors: tuple[onnx.TensorProto, ...]
    """The constants of `pair`."""

    elem_type: int
    """ONNX's type of the float graph's activations."""

    scale_type: int
    """ONNX's type of the scales of `pair`."""

    float_bytes: int = 0
    bytes: int = 0
    what: str = ", activations"
    part: str = ""

    def numbers(self, floats: GraphWeights, quantized: GraphWeights) -> dict[str, Matrix]:
        """The switch, on."""
        return {self.values[0]: np.array(True)}

    def choice(self, value: str, output: str, opset: int) -> onnx.NodeProto:
        """An If that gives `value` as it is, or rounded where the switch is on."""
        node = helper.make_node("If", self.values, [output], output)
        for branch in ("then_branch", "else_branch"):
            made = helper.make_tensor_value_info(f"{output}/{branch}", self.elem_type, None)
            body = helper.make_graph([], branch, [], [made])
            writer, passed = NodeWriter(body, opset, f"{output}/{branch}/of"), value
            if branch == "then_branch":
                names = {}
                for tensor in self.tensors:
                    copy = body.initializer.add()
                    copy.CopyFrom(tensor)
                    copy.name = names[tensor.name] = f"{made.name}/{tensor.name}"
                passed = writer.add("Cast", [value], to=self.scale_type)
                for own in self.pair:
                    copied = deepcopy(own)
                    copied.domain = _DOMAIN  # which has all types of numbers at every opset
                    passed = writer.clone(copied, {**names, own.input[0]: passed})[own.output[0]]
            writer.add("Cast", [passed], made.name, to=self.elem_type)
            node.attribute.append(helper.make_attribute(branch, body))
        return node


AnyTarget: TypeAlias = Target | Rounding
"""What is quantized alone: a weight, or the activations that some nodes read."""


def put_switches(model: onnx.ModelProto, roundings: Sequence[Rounding]) -> list[Rounding]:
    """Puts all roundings into a graph, in place, each with its switch as a constant that is off. Gives those that lack
    a site there."""
    graph = model.graph
    by_name = {node.name: node for node in graph.node}
    by_weight = {node.input[1]: node for node in graph.node if len(node.input) > 1 and node.input[1]}
    if roundings and not any(entry.domain == _DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    missing: list[Rounding] = []
    for rounding in roundings:
        (switch,) = rounding.values
        graph.initializer.append(numpy_helper.from_array(np.array(False), switch))
        sites = [(by_name.get(site.node) or by_weight.get(site.weight), site.index) for site in rounding.sites]
        if any(node is None for node, _ in sites):
            missing.append(rounding)
            continue
        chosen: dict[str, str] = {}
        for node, index in sites:
            assert node is not None
            if index == OUTPUT:
                node.output[0] = f"{(read := node.output[0])}/olive_ext_as_it_is"
                graph.node.append(rounding.choice(node.output[0], read, default_opset(model)))
                continue
            value = node.input[index]
            if value not in chosen:
                name = chosen[value] = f"{switch}/{len(chosen)}"
                graph.node.append(rounding.choice(value, name, default_opset(model)))
            node.input[index] = chosen[value]
    return missing


def static_roundings(pairing: Pairing, floats: GraphWeights, quantized: GraphWeights) -> Iterator[Rounding]:
    """The pairs of QuantizeLinear and DequantizeLinear whose nodes both graphs have. `pairing` names the others, and
    quantized KV caches."""
    pairing.unpaired |= quantized_caches(floats, quantized)
    nodes = quantized.model.graph.node
    for first in (node for node in nodes if node.op_type == "QuantizeLinear"):
        seconds = [one for one in nodes if one.op_type == "DequantizeLinear" and one.input[0] == first.output[0]]
        rounding = _static(first, seconds, floats, quantized)
        if isinstance(rounding, Rounding):
            yield rounding
        else:
            pairing.unpaired[first.name] = rounding


def _static(
    first: onnx.NodeProto, seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights
) -> Rounding | str:
    """The rounding that a pair is in the float graph, or why it is none there."""
    names = {name for node in (first, *seconds) for name in node.input[1:] if name}
    if not seconds or not names <= quantized.initializers.keys():
        return "its scale is not a constant, or integers are computed with"
    uses = {use.node.name: use for use in floats.uses.values() if use.inputs[0] == 1}
    graph, value, maker = quantized.model.graph, first.input[0], quantized.maker.get(first.input[0])
    is_read = any(value in node.input for node in graph.node if node is not first)
    made_by = None if maker is None else plain_name(maker.name)
    product = next((use for name, use in uses.items() if plain_name(name) == made_by), None)
    if product is None or is_read or any(value == output.name for output in graph.output):
        sites = _input_sites(seconds, floats, quantized, uses)
    else:  # the product's output is rounded for all that read it
        sites = [Site(product.node.name, OUTPUT, product.value)]
    if isinstance(sites, str):
        return sites
    tensors = tuple(quantized.tensor(name) for name in sorted(names))
    scale_type = quantized.initializers[first.input[1]].data_type
    weighed = [uses[site.node] for site in sites if site.weight]
    index = sites[0].index
    which = ", output" if index == OUTPUT else f", input {index}" if index else ""
    name = f"{plain_name(sites[0].node)}{which}"
    return Rounding(
        f"{name}, activations",
        f"{kind_of(name)}, activations",
        layer_of(name),
        (f"{name}/{index}/olive_ext_is_rounded",),
        tuple(node.name for node in (first, *seconds)),
        tuple(sites),
        (first, seconds[0]),
        tensors,
        elem_type=helper.np_dtype_to_tensor_dtype(floats.matrix(weighed[0]).dtype) if weighed else scale_type,
        scale_type=scale_type,
    )


def _input_sites(
    seconds: Sequence[onnx.NodeProto], floats: GraphWeights, quantized: GraphWeights, uses: Mapping[str, WeightUse]
) -> list[Site] | str:
    """The inputs of the float graph's nodes that are rounded, or why they are not known."""
    own_names: dict[str, list[onnx.NodeProto]] = {}
    for node in floats.model.graph.node:
        own_names.setdefault(plain_name(node.name), []).append(node)
    outputs, sites = {node.output[0] for node in seconds}, []
    for node in quantized.model.graph.node:
        for index in (n for n, name in enumerate(node.input) if name in outputs):
            readers = own_names.get(plain_name(node.name), [])
            if len(readers) != 1 or len(readers[0].input) <= index:
                return f"the float graph has no node '{node.name}' that reads it"
            use = None if index else uses.get(readers[0].name)
            sites.append(Site(readers[0].name, index, use.value if use is not None else ""))
    return sites or "no node reads it"


Document: TypeAlias = Sequence[Scoring]
"""The requests of one document: what is scored of it."""


def document_key(document: Document) -> bytes:
    """Digest of all that is asked of a document, pictures, sounds and features by their content."""
    parts = [[type(one).__name__, *(getattr(one, part.name) for part in fields(one))] for one in document]
    asked = [[(*value,) if isinstance(value, Ids) else value for value in request] for request in parts]
    if all(_is_text(value) for request in asked for value in request):
        return hashlib.blake2b(repr(document).encode(), digest_size=8).digest()
    return media_digest(asked).encode()


def _is_text(value: object) -> bool:
    """Whether `repr` distinguishes it from all others."""
    is_ids = isinstance(value, tuple) and all(isinstance(one, int) for one in value)
    return is_ids or value is None or isinstance(value, str | int)


class _Collector(Observer):
    """Keeps the scoring requests by document."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[str, int], list[tuple[int, Scoring]]] = {}

    def __call__(self, instance: Any, request: Any, output: Any) -> None:
        super().__call__(instance, request, output)
        if hasattr(output, "token_logprobs"):
            document = str(instance.task_name), int(instance.doc_id)
            self.requests.setdefault(document, []).append((instance.idx, request))


def answered(
    session: Session, config: EvaluationConfig, tasks: LoadedTasks, *, progress: bool
) -> Mapping[tuple[str, int], Document]:
    """The documents of `tasks`, by task and number, which the session's model answers and scores: the requests in
    lm-eval's order, then the generated answers as targets. Raises `TaskError` without any."""
    from olive_ext.backends.lm_eval import OrtLM
    from olive_ext.backends.lm_eval_run import run_tasks

    collector = _Collector()
    lm = OrtLM(session=session, observer=collector, seed=config.seed or 0)
    quick = config.model_copy(update={"bootstrap_iters": 0})
    run_tasks(lm, tasks, quick, progress=progress)
    score_generated(lm, collector.generated)
    ordered = {key: sorted(asked, key=itemgetter(0)) for key, asked in collector.requests.items()}
    documents = {key: [request for _, request in asked] for key, asked in ordered.items()}
    for item in sorted(collector.generated, key=lambda item: tuple(item.target.target)):
        documents.setdefault((item.task_name, item.doc_id), []).append(item.target)
    if not documents:
        raise TaskError(f"tasks {list(tasks.tasks)} ask nothing of a model")
    return dict(sorted(documents.items()))


def asked(session: Session, documents: Sequence[Document]) -> list[list[ScoringOutput | RollingOutput]]:
    """The outputs of each document's requests."""
    requests = [request for document in documents for request in document]
    scoring = [request for request in requests if isinstance(request, ScoringRequest)]
    rolling = [request for request in requests if isinstance(request, RollingRequest)]
    scored = iter(session.loglikelihood(scoring) if scoring else ())
    rolled = iter(session.loglikelihood_rolling(rolling) if rolling else ())
    return [
        [next(scored) if isinstance(request, ScoringRequest) else next(rolled) for request in document]
        for document in documents
    ]


Floats = npt.NDArray[np.float64]

SMALL = 1 << 21
"""The most weights of a graph that one thread runs: several threads would wait for each other. The quickstart's model
of 0.5 M took 13.8 s of processor time on one thread and 29 s on two, whose first one alone took 14.7 s."""

NO_NUMBER = 100.0
"""Nats of a position whose distribution is NaN or infinite, as with a damaged weight: float32 has no larger one."""


def as_numbers(kl: npt.NDArray[np.float32]) -> Floats:
    """KL in nats, of positions without numbers `NO_NUMBER`."""
    return np.nan_to_num(kl.astype(np.float64), nan=NO_NUMBER, posinf=NO_NUMBER)


class Variants:
    """The float model in one session, with some of the quantized numbers in place of its own, and some roundings."""

    def __init__(
        self,
        model: ResolvedModel,
        sources: Mapping[str, Sources],
        targets: Sequence[Target],
        roundings: Sequence[Rounding],
        record_to: RecordTo,
    ) -> None:
        """`sources`: by part of the package, of the decoder those of ""; `record_to`: where the float model's
        distributions are recorded. Raises what opening `model` raises."""
        self._sources = sources
        matrices: dict[str, dict[str, Matrix]] = {"": {}}
        for target in targets:
            floats, arrays = sources[target.part].floats, matrices.setdefault(target.part, {})
            roots = frozenset().union(*(use.roots for use in target.floats))
            uses = [use for use in (*floats.uses.values(), *target.floats) if use.roots & roots]
            arrays |= {use.value: floats.matrix(use) for use in uses}
        matrices[""] |= {name: np.array(False) for rounding in roundings for name in rounding.values}
        self.missing: list[Rounding] = []
        """The roundings whose nodes the engine's form of the graph does not have."""

        def edit(graph: onnx.ModelProto) -> None:
            self.missing = put_switches(graph, roundings)

        files = {"": model.files.decoder}
        files |= {part: companion.graph for part, companion in model.files.companions.items()}
        engine, num_weights = model.settings.engine, sum(array.size for array in matrices[""].values())
        if engine.num_threads == "auto" and model.device.kind == "cpu" and num_weights <= SMALL:
            model = model.patched({"engine": engine.model_copy(update={"num_threads": 1})})
        model = replace(model, is_compared=True)
        self._weights = {
            part: BoundWeights(arrays, (lambda _: None) if part else edit) for part, arrays in matrices.items()
        }
        texts = read_texts(model)
        opened = open_ort_runner(model, weights={files[part]: bound for part, bound in self._weights.items()})
        local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
        kernels = DivergenceKernels.at(opened.runner, texts.tokenizer.num_ids)
        self._records = new_records(local, record_to)
        self.recorder = local.session(WritingTap(self._records, kernels))
        self.recorder.records = self._records
        self._session = local.session(ReadingTap(self._records, kernels))
        self.facts = deciding_facts(self._session)
        """All that decides what `kl` gives besides targets and documents, JSON-ready."""

        self._bound: frozenset[AnyTarget] = frozenset()
        self.targets: list[AnyTarget] = [*targets, *(one for one in roundings if one not in self.missing)]
        """All that `kl` takes: of the roundings those whose nodes the engine's form of the graph has."""

        self.alternatives: dict[AnyTarget, GraphWeights] = {}
        """Graphs with the numbers of targets that are not the quantized model's own."""

    def record(self, documents: Sequence[Document]) -> npt.NDArray[np.int64]:
        """Keeps the float model's distributions at all targets; the number of positions of each document [N]."""
        outputs = asked(self.recorder, documents)
        return np.array([sum(len(output.token_logprobs) for output in document) for document in outputs])

    def kl(self, targets: Collection[AnyTarget], documents: Sequence[Document]) -> Floats:
        """KL(float || variant) in nats, summed over the positions of each of N documents [N]; the variant has the
        quantized numbers of `targets`. The documents have been recorded."""
        wanted = frozenset(targets)
        for target in self._bound - wanted:
            self._weights[target.part].put_back(target.values)
        for target in wanted - self._bound:
            sources = self._sources[target.part]
            numbers = target.numbers(sources.floats, self.alternatives.get(target, sources.quantized))
            self._weights[target.part].put(numbers)
        if any(target.part for target in self._bound ^ wanted):
            self._session.release_memory()  # what encoders have made of items, too
        self._bound = wanted
        self._session.gc()
        return np.array(
            [
                sum(float(as_numbers(output.compared.kl).sum()) for output in document if output.compared is not None)
                for document in asked(self._session, documents)
            ]
        )

    def compared(self, model: ResolvedModel, documents: Sequence[Document]) -> Floats:
        """As `kl`, of another model, which is opened for it: the quantized one itself."""
        with open_model(model, self._records) as session:
            outputs = [
                (number, as_numbers(output.compared.kl))
                for number, document in enumerate(asked(session, documents))
                for output in document
                if output.compared is not None  # an empty text has no positions
            ]
        numbers = np.repeat([number for number, _ in outputs], [len(nats) for _, nats in outputs])
        sums = np.bincount(numbers, np.concatenate([nats for _, nats in outputs]), len(documents))
        return sums.astype(np.float64)

    @property
    def tokens_fed(self) -> int:
        """Tokens that were computed so far, recorded ones, too."""
        return sum(int(session.counters.tokens_fed) for session in (self.recorder, self._session))

    def __enter__(self) -> Variants:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()
        self.recorder.close()


@dataclass(frozen=True)
class Material:
    """What a loss is measured with: variants of the float model, and documents whose distributions it has recorded."""

    variants: Variants
    documents: Sequence[Document]
    tasks: Sequence[str]
    """The task of each document."""

    positions: npt.NDArray[np.int64]
    """The positions of each document [N]."""

    journal: Journal | None
    """Of the facts of `variants` and of the quantized model."""

    @cached_property
    def _keys(self) -> list[bytes]:
        return [document_key(document) for document in self.documents]

    def part(self, numbers: Sequence[int]) -> Material:
        """Some of the documents."""
        documents, tasks = [self.documents[n] for n in numbers], [self.tasks[n] for n in numbers]
        return replace(self, documents=documents, tasks=tasks, positions=self.positions[list(numbers)])

    def kl(self, targets: Collection[AnyTarget], numbers: Sequence[int]) -> Floats:
        """KL(float || variant) in nats, summed over the positions of each of N documents, by their numbers [N]; the
        variant has the quantized numbers of `targets`."""
        names = repr(sorted((target.what, node) for target in targets for node in target.nodes))
        return self.kept(names, numbers, lambda documents: self.variants.kl(targets, documents))

    def kept(self, name: str, numbers: Sequence[int], measure: Callable[[Sequence[Document]], Floats]) -> Floats:
        """As `kl`, of a variant that has this name in the journal and is measured by `measure`."""
        keys = [hashlib.blake2b(name.encode() + self._keys[number], digest_size=16).digest() for number in numbers]
        known = {key: self.journal[key] for key in keys if key in self.journal} if self.journal is not None else {}
        missing = [(key, number) for key, number in zip(keys, numbers, strict=True) if key not in known]
        if missing:
            measured = measure([self.documents[number] for _, number in missing])
            made = dict(zip((key for key, _ in missing), measured.tolist(), strict=True))
            if self.journal is not None:
                self.journal.add(made)
            known |= made
        return np.array([known[key] for key in keys], np.float64)


def grouped(targets: Sequence[AnyTarget], by: str) -> dict[str, list[AnyTarget]]:
    """By name the targets that are quantized together: one by one ("node"), by layer, or by kind; those outside of the
    layers by kind in any case."""
    groups: dict[str, list[AnyTarget]] = {}
    for target in targets:
        name = target.name
        if by != "node" and (by == "kind" or target.layer is None):
            name = target.kind or target.name
        elif by == "layer":
            name = f"layer {target.layer}{target.what}"
        groups.setdefault(name, []).append(target)
    return groups
