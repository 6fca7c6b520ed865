"""One session of a float model whose weights and switches are bound, with those of its upper parts, which begin with
kept states. Knows targets and requests, no tasks.

A run of steps begins with nothing resident. What a step computes is decided by the steps before it and by itself, so a
digest of all of these is its key: another run of the same requests has the same steps, or finds nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from typing_extensions import override

from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.tap import ReadingTap
from olive_ext.engine.runners.ort.inputs import BoundWeights, OpenAbove, StepStates
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.engine.step import Step
from olive_ext.errors import ModelError
from olive_ext.graph.edits import part_of
from olive_ext.graph.nodes import reads
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel
from olive_ext.model.providers.devices import memory_of
from olive_ext.model.types import Role
from olive_ext.plugins.diagnose.remedy.documents import Document, asked
from olive_ext.plugins.diagnose.remedy.roundings import AnyTarget, Rounding, Switches
from olive_ext.plugins.diagnose.remedy.weights import Matrix
from olive_ext.records import Records
from olive_ext.session.local import LocalModel, read_texts
from olive_ext.session.session import Session

Values: TypeAlias = dict[str, Any]
"""Values on their device (`onnxruntime.OrtValue`) by name."""


class MissingStatesError(Exception):
    """Nothing is kept of a step: the whole graph is to be run."""


class KeptStates:
    """Values by runs and steps, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._runs: OrderedDict[Hashable, dict[bytes, Values]] = OrderedDict()
        self._borders: dict[Hashable, list[tuple[str, ...]]] = {}

    def borders(self, run: Hashable) -> Sequence[tuple[str, ...]]:
        """The borders that are kept of every step of a run."""
        return self._borders.get(run, ())

    def begin(self, run: Hashable, borders: Iterable[tuple[str, ...]]) -> None:
        """Keeps the values of these borders of the steps that come, beside those of other runs while there is room."""
        self.drop(run)
        self._runs[run], self._borders[run] = {}, list(borders)

    def names(self, run: Hashable) -> frozenset[str]:
        """All values of a run's borders."""
        return frozenset(name for border in self.borders(run) for name in border)

    def type_of(self, run: Hashable, name: str) -> tuple[int, list[None]]:
        """ONNX's element type of a value of the run's, and as many lengths as it has axes."""
        value = next(iter(self._runs[run].values()))[name]
        return int(value.element_type()), [None] * len(value.shape())

    def get(self, run: Hashable, step: bytes) -> Mapping[str, Any]:
        """The states of one step. Raises `MissingStatesError`."""
        try:
            return self._runs[run][step]
        except KeyError:
            raise MissingStatesError from None

    def put(self, run: Hashable, step: bytes, values: Values) -> None:
        """Keeps a step's values. Where there is no room, runs that began earlier are dropped, then borders of this
        one: every second."""
        if run not in self._runs:
            return
        self._runs[run][step] = values
        self._num_bytes += _num_bytes(values.values())
        while self._num_bytes > self._most_bytes and self._borders[run]:
            oldest = next(iter(self._runs))
            if oldest != run:
                self.drop(oldest)
            else:
                self._thin(run)

    def drop(self, run: Hashable) -> None:
        """Forgets a run."""
        for values in self._runs.pop(run, {}).values():
            self._num_bytes -= _num_bytes(values.values())
        self._borders.pop(run, None)

    def _thin(self, run: Hashable) -> None:
        self._borders[run] = self._borders[run][1::2]
        names = self.names(run)
        for values in self._runs[run].values():
            for name in set(values) - names:
                self._num_bytes -= _num_bytes([values.pop(name)])


class KeptStepStates(StepStates):
    """The states that one runner's steps take, or leave."""

    def __init__(self, kept: KeptStates, taken: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> None:
        """`taken`: inputs of the graph, `left`: outputs."""
        self._kept, self._taken, self.left = kept, taken, left
        self._source: Hashable = None
        self._targets: tuple[Hashable, ...] = ()
        self._digest = b""

    def begin(self, source: Hashable = None, targets: Iterable[Hashable] = ()) -> None:
        """Another run begins, with nothing resident: it takes the states of the run `source`, and leaves its own in
        those of `targets`."""
        self._source, self._targets, self._digest = source, tuple(targets), b""

    @override
    def bind(self, binding: Any, step: Step) -> None:
        """Binds what a step takes and leaves. Raises `MissingStatesError`."""
        self._digest = hashlib.blake2b(self._digest + _content(step), digest_size=16).digest()
        if self._taken:
            values = self._kept.get(self._source, self._digest)
            for name in self._taken:
                binding.bind_ortvalue_input(name, values[name])
        for name in self.left:
            binding.bind_output(name)

    @override
    def collect(self, outputs: Sequence[Any]) -> None:
        """Keeps what the step has left."""
        values = dict(zip(self.left, outputs, strict=True))
        for run in self._targets:
            names = self._kept.names(run)
            self._kept.put(run, self._digest, {name: value for name, value in values.items() if name in names})


def _content(step: Step) -> bytes:
    """All that decides what a step computes, besides what is resident."""
    rows = [
        (
            *row[:3],
            None if row.cells_P is None else row.cells_P.tobytes(),
            [(run.item.key, run.start, run.stop) for run in row.media],
        )
        for row in step.rows
    ]
    moves = [(move.source_N.tobytes(), move.target) for move in step.moves]
    read = [row[:2] for row in step.logits_rows]
    return repr((rows, step.copies, moves, step.first_cell, step.width, step.whole_length, read)).encode()


def _num_bytes(values: Iterable[Any]) -> int:
    return sum(value.tensor_size_in_bytes() for value in values)


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
        engine, num_weights = model.settings.engine, sum(array.size for array in arrays[""].values())
        if engine.num_threads == "auto" and model.device.kind == "cpu" and num_weights <= SMALL:
            model = model.patched({"engine": engine.model_copy(update={"num_threads": 1})})
        self._decoder = Borders(arrays[""], switches.edit, model, levels)
        self._weights = {part: BoundWeights(own, lambda _: None) for part, own in arrays.items()} | {"": self._decoder}
        texts = read_texts(model)
        opened = open_ort_runner(model, weights={files[part]: bound for part, bound in self._weights.items()})
        self.local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
        self.kernels = DivergenceKernels.at(opened.runner, texts.tokenizer.num_ids)
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
            if border not in self._above:
                local = replace(self.local, opened=self._decoder.above(border, run))
                self._above[border] = local.session(ReadingTap(self._records, self.kernels))
            session = self._above[border]
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
        whole = self._graph
        nodes = [whole.node[index] for index in sorted(part.nodes | part.beside)]
        made = {name for node in nodes for name in node.output}
        outputs = [value for value in whole.output if value.name in made and value.name not in part.border]
        upper = part_of(model, nodes, outputs)
        dropped = {past for present, past in self._caches.items() if present not in made}
        upper.graph.input.extend(value for value in whole.input if value.name not in dropped)
        upper.graph.input.extend(border)
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
        model = self._model
        is_fit = model.media is None and not model.spec.cross and model.device.kind == "cpu"
        self.borders = self._found(proto) if is_fit and model.buckets.steps == "none" else []
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
        multiplied = {name for node in graph.node if "Gather" not in node.op_type for name in node.input}
        sizes = {name: array.size for name, array in self._arrays.items() if name in multiplied and array.size > 1}
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
