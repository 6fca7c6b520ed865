"""One session of a float model whose weights and switches are bound, with those of its upper parts. Knows targets and
requests, no tasks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from typing_extensions import override

from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.tap import ReadingTap
from olive_ext.engine.runners.ort.bound_weights import BoundWeights, OpenAbove
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.errors import ModelError
from olive_ext.graph.nodes import reads
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import memory_of
from olive_ext.model.types import Role
from olive_ext.plugins.diagnose.remedy.documents import Document
from olive_ext.plugins.diagnose.remedy.kept_states import KeptStates, KeptStepStates, MissingStatesError
from olive_ext.plugins.diagnose.remedy.roundings import AnyTarget, Rounding, Switches
from olive_ext.plugins.diagnose.remedy.weights import Matrix
from olive_ext.records import Records
from olive_ext.session.local import LocalModel
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest
from olive_ext.session.session import Session
from olive_ext.session.texts import read_texts

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

SMALL = 1 << 21
"""Bound weights of a graph that one thread runs: several would wait for each other. The quickstart's model of 0.5 M
took 13.8 s of processor time on one thread and 29 s on two, whose first one alone took 14.7 s."""


NO_NUMBER = 100.0
"""Nats of a position whose distribution is NaN or infinite, as those of a damaged weight: float32 has none larger."""


class BoundSession:
    """A session of one model whose weights and switches are bound."""

    def __init__(
        self,
        model: ResolvedModel,
        arrays: Mapping[str, Mapping[str, Matrix]],
        roundings: Sequence[Rounding],
        levels: Sequence[Collection[str]] = (),
    ) -> None:
        """`arrays`: the graphs' own numbers, by part; `levels`: what is above each border that variants may begin at.
        Raises what opening `model` raises."""
        switches, files = Switches(roundings), {"": model.files.decoder}
        files |= {part: companion.graph for part, companion in model.files.companions.items()}
        model = _on_fitting_threads(model, sum(array.size for array in arrays[""].values()))
        self._decoder = Borders(arrays[""], switches.edit, model, levels)
        self._weights = {part: BoundWeights(own, lambda _: None) for part, own in arrays.items()} | {"": self._decoder}
        texts = read_texts(model)
        opened = open_ort_runner(model, weights={files[part]: bound for part, bound in self._weights.items()})
        self.local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
        self.kernels = DivergenceKernels.at(opened.runner)
        self.missing = list(switches.missing)
        self._bound: frozenset[AnyTarget] = frozenset()
        self._above: dict[Border, Session] = {}
        self._records: Records
        self.session: Session

    def read(self, records: Records) -> None:
        """Opens the session, which compares what it is asked with `records`."""
        self._records = records
        self.session = self.local.session(ReadingTap(records, self.kernels))

    @property
    def sessions(self) -> list[tuple[Session, float]]:
        """All that are open, and the share of the whole graph's multiplications that a token takes there."""
        return [(self.session, 1.0), *((session, border.share) for border, session in self._above.items())]

    def share(self, targets: Collection[AnyTarget]) -> float:
        """The share of the graph's multiplications that are above the highest border below all of `targets`."""
        values = {value for target in targets for value in target.values}
        fits = [border.share for border in self._decoder.borders if values and border.decided.issuperset(values)]
        return min(fits, default=1.0)

    def sums(self, documents: Sequence[Document], bases: Sequence[frozenset[AnyTarget]]) -> Floats:
        """KL(float || what is bound) in nats, summed over the positions of each of N documents [N]. What is computed
        below a border as in one of the variants `bases`, is taken from there; the first of them to come leaves it."""
        runs = {base: (base, *map(id, documents)) for base in bases}
        changed = {base: {value for one in base ^ self._bound for value in one.values} for base in bases}
        if any(target.part for base in bases for target in base ^ self._bound):
            changed = {}
        fits = [
            (border, runs[base])
            for border in reversed(self._decoder.borders)
            for base, values in changed.items()
            if values <= border.decided and border.part.border in self._decoder.kept.borders(runs[base])
        ]
        for border, run in fits:
            found = self._sums_above(border, run, documents)
            if found is not None:
                return found
        return self._whole_sums(documents, {runs[base]: values for base, values in changed.items()})

    def _sums_above(self, border: Border, run: Hashable, documents: Sequence[Document]) -> Floats | None:
        """From a border's states of a run; None where its part does not open, or these are of other steps."""
        try:
            session = self._session_above(border, run)
            session.gc()
            assert border.states is not None
            border.states.begin(run)
            return _sums(session, documents)
        except ModelError as error:
            logger.debug("no variant begins at %s: %s", border.part.border, error)
            if border in self._decoder.borders:  # two runs may begin at one
                self._decoder.borders.remove(border)
        except MissingStatesError:
            self._decoder.kept.drop(run)
        return None

    def _whole_sums(self, documents: Sequence[Document], runs: Mapping[Hashable, Collection[str]]) -> Floats:
        kept, states = self._decoder.kept, self._decoder.states
        assert states is not None
        left = []
        for run, changed in runs.items():
            borders = [one.part.border for one in self._decoder.borders if one.decided.issuperset(changed)]
            if len(borders) > len(kept.borders(run)):
                kept.begin(run, borders)
                left.append(run)
        self.session.gc()
        states.begin(targets=left)
        try:
            return _sums(self.session, documents)
        finally:
            states.begin()

    def _session_above(self, border: Border, run: Hashable) -> Session:
        if border not in self._above:
            local = replace(self.local, opened=self._decoder.above(border, run))
            self._above[border] = local.session(ReadingTap(self._records, self.kernels))
        return self._above[border]

    def bind(self, wanted: frozenset[AnyTarget], numbers: Callable[[AnyTarget], Mapping[str, Matrix]]) -> None:
        """Has some targets quantized, the others not. `numbers`: what a target's values are then."""
        if wanted == self._bound:
            return
        for target in self._bound - wanted:
            self._weights[target.part].put_back(target.values)
        for target in wanted - self._bound:
            self._weights[target.part].put(numbers(target))
        if any(target.part for target in self._bound ^ wanted):
            self.session.release_memory()  # what encoders have made of items, too
        self._bound = wanted


def _on_fitting_threads(model: ResolvedModel, num_weights: int) -> ResolvedModel:
    engine = model.settings.engine
    if engine.num_threads != "auto" or model.device.kind != "cpu" or num_weights > SMALL:
        return model
    return model.patched({"engine": engine.model_copy(update={"num_threads": 1})})


def as_numbers(kl: npt.NDArray[np.float32]) -> Floats:
    """KL in nats, of positions without numbers `NO_NUMBER`."""
    return np.nan_to_num(kl.astype(np.float64), nan=NO_NUMBER, posinf=NO_NUMBER)


def _sums(session: Session, documents: Sequence[Document]) -> Floats:
    return np.array(
        [
            sum(float(as_numbers(output.compared.kl).sum()) for output in document if output.compared is not None)
            for document in asked(session, documents)
        ]
    )


def asked(session: Session, documents: Sequence[Document]) -> list[list[ScoringOutput | RollingOutput]]:
    """The outputs of each document's requests."""
    requests = [request for document in documents for request in document]
    scoring = [request for request in requests if isinstance(request, ScoringRequest)]
    rolling = [request for request in requests if isinstance(request, RollingRequest)]
    scored = iter(session.loglikelihood(scoring) if scoring else ())
    rolled = iter(session.loglikelihood_rolling(rolling) if rolling else ())
    outputs: list[ScoringOutput | RollingOutput] = [
        next(scored) if isinstance(request, ScoringRequest) else next(rolled) for request in requests
    ]
    ordered = iter(outputs)
    return [[next(ordered) for _ in document] for document in documents]


@dataclass(frozen=True)
class UpperPart:
    """The nodes that some inputs decide, by their numbers, and what these nodes read of the others."""

    nodes: frozenset[int]
    border: tuple[str, ...]
    """Values that other nodes make of tokens or weights, in the order of the graph."""

    beside: frozenset[int]
    """Other nodes whose values are read, and need neither tokens nor weights nor caches: masks, lengths, rotary tables.
    They belong to both parts."""


class UpperParts:
    """The parts of one graph."""

    def __init__(self, graph: onnx.GraphProto, caches: Mapping[str, str], changing: Collection[str]) -> None:
        """`caches`: by the outputs that a later step takes as an input these inputs; `changing`: the other inputs
        that values at a border depend on (tokens, weights)."""
        self._graph, self._caches = graph, caches
        self._reads = [frozenset(reads([node])) for node in graph.node]
        self._readers: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(self._reads):
            for name in names:
                self._readers[name].append(index)
        self._makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
        self._changed = self.decided_by({*changing, *caches.values()})

    def decided_by(self, values: Iterable[str]) -> frozenset[int]:
        """The nodes that read these values, or what is made of them, in this step or a later one."""
        found: set[int] = set()
        pending = list(values)
        while pending:
            for index in self._readers.get(pending.pop(), ()):
                if index not in found:
                    found.add(index)
                    made = self._graph.node[index].output
                    pending += [*made, *(self._caches[name] for name in made if name in self._caches)]
        return frozenset(found)

    def part(self, values: Iterable[str]) -> UpperPart | None:
        """What these inputs decide; None where that is no part which runs by itself: it reads a cache that the rest
        writes."""
        nodes = self.decided_by(values)
        read = {name for index in nodes for name in self._reads[index]}
        makers = {self._makers[name] for name in read if name in self._makers} - nodes
        border = [name for index in sorted(makers & self._changed) for name in self._graph.node[index].output]
        border = [name for name in border if name in read]
        own = {past for present, past in self._caches.items() if self._makers.get(present) in nodes}
        others = set(self._caches.values()) - own
        if others & read or set(border) & set(self._caches):
            return None
        return UpperPart(nodes, tuple(border), self._with_makers(makers - self._changed))

    def cut(self, model: onnx.ModelProto, part: UpperPart, border: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
        """A part of `model` by itself, which takes the `border`, and every input of the whole but the rest's caches,
        read or not."""
        upper = onnx.ModelProto(ir_version=model.ir_version)
        upper.opset_import.extend(model.opset_import)
        upper.functions.extend(model.functions)
        graph, whole = upper.graph, self._graph
        graph.name = whole.name
        graph.node.extend(whole.node[index] for index in sorted(part.nodes | part.beside))
        read = {name for index in part.nodes | part.beside for name in self._reads[index]}
        made = {name for node in graph.node for name in node.output}
        graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in read)
        graph.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in read)
        graph.output.extend(value for value in whole.output if value.name in made and value.name not in part.border)
        dropped = {past for present, past in self._caches.items() if present not in made}
        graph.input.extend(value for value in whole.input if value.name not in dropped)
        graph.input.extend(border)
        return upper

    def _with_makers(self, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes with those that make what they read, and so on."""
        found: set[int] = set()
        pending = list(nodes)
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += [self._makers[name] for name in self._reads[index] if name in self._makers]
        return frozenset(found)


MOST = 16
"""Borders of a graph: each has a session of its own, and keeps its states."""

MEMORY = 0.25
"""Share of the free memory that states may take."""

_LEAST_GAIN = 0.05
"""A border that saves less of the multiplications is none."""


@dataclass(eq=False)
class Border:
    """The part of a graph above it."""

    part: UpperPart
    decided: frozenset[str]
    """The bound values that change nothing below."""

    share: float
    """The share of the whole graph's multiplications that are by bound weights."""

    opened: OpenedRunner | None = None
    states: KeptStepStates | None = None


class Borders(BoundWeights):
    """Bound weights of a decoder, whose steps leave their states at borders: a variant of the float graph may begin at
    the border below what it changes, with the states that another variant had there. All below computes the same in two
    variants that differ above it only. What some inputs decide is a part of the graph that runs by itself."""

    states: KeptStepStates | None

    def __init__(
        self,
        values: Mapping[str, npt.NDArray[Any]],
        prepare: Callable[[ModelProto], None],
        model: ResolvedModel,
        levels: Sequence[Collection[str]],
    ) -> None:
        """`levels`: of each border that may be the bound values that are above it."""
        super().__init__(values, prepare)
        self._model, self._levels = model, levels
        self.kept = KeptStates(int(MEMORY * memory_of("cpu").free))
        self.borders: list[Border] = []
        """From the lowest to the highest."""

        self._proto = ModelProto()
        self._parts: UpperParts
        self._open_above: OpenAbove

    @override
    def edit(self, proto: ModelProto) -> None:
        super().edit(proto)
        self.borders = self._found(proto) if _is_fit(self._model) else []
        left = dict.fromkeys(name for border in self.borders for name in border.part.border)
        present = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in left if name not in present)
        self._proto = proto
        self.states = KeptStepStates(self.kept, left=tuple(left))

    @override
    def opened(self, above: OpenAbove) -> None:
        self._open_above = above

    def above(self, border: Border, run: Hashable) -> OpenedRunner:
        """The runner of the part above a border, opened when it is first asked for; its types are those of `run`."""
        if border.opened is None:
            infos = [
                onnx.helper.make_tensor_value_info(name, *self.kept.type_of(run, name)) for name in border.part.border
            ]
            proto = self._parts.cut(self._proto, border.part, infos)
            border.states = KeptStepStates(self.kept, taken=border.part.border)
            border.opened = self._open_above(proto, border.states)
        assert border.opened is not None
        return border.opened

    def _found(self, proto: ModelProto) -> list[Border]:
        spec, graph = self._model.spec, proto.graph
        tokens = {one.tensor.name for one in spec.inputs if one.role is Role.INPUT_IDS}
        changing = {*tokens, *spec.embeddings, *self._arrays}
        self._parts = UpperParts(graph, {cache.present: cache.past for cache in spec.caches}, changing)
        nodes = {name: self._parts.decided_by([name]) for name in self._arrays}
        sizes = self._multiplied(graph)
        found: dict[tuple[str, ...], Border] = {}
        for values in self._levels:
            part = self._parts.part(values)
            if part is None or not part.border:
                continue
            read = {name for index in part.nodes for name in graph.node[index].input}
            share = sum(size for name, size in sizes.items() if name in read) / max(1, sum(sizes.values()))
            decided = frozenset(name for name, own in nodes.items() if own <= part.nodes)
            if share <= 1 - _LEAST_GAIN:
                found[part.border] = Border(part, decided, share)
        borders = sorted(found.values(), key=lambda border: -border.share)
        every = -(-len(borders) // MOST)
        return borders[::-1][::every][::-1] if borders else []

    def _multiplied(self, graph: onnx.GraphProto) -> dict[str, int]:
        """The sizes of the bound weights that are multiplied with, not looked up."""
        readers = {name for node in graph.node if "Gather" not in node.op_type for name in node.input}
        return {name: array.size for name, array in self._arrays.items() if name in readers and array.size > 1}


def _is_fit(model: ResolvedModel) -> bool:
    """Whether the engine's steps of a model may begin above others'."""
    takes_text = model.media is None and not model.spec.cross
    return takes_text and model.device.kind == "cpu" and model.buckets.steps == "none"
