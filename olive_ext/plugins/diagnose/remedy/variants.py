"""A float model whose weights are bound, not constant, and how far it is from itself with other numbers in some of
them. Measurements are kept in a journal, by the content of documents and the weights that were quantized, so that an
interrupted map goes on.

One session serves all variants of weights and roundings: a variant is a binding. Knows targets and requests, and no
tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.tap import ReadingTap, WritingTap
from olive_ext.engine.runners.ort.inputs import BoundWeights
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.remedy.documents import Document, asked, document_key
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target
from olive_ext.plugins.diagnose.remedy.roundings import AnyTarget, Rounding, put_switches
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix
from olive_ext.records.journal import Journal
from olive_ext.session.answer_journal import deciding_facts
from olive_ext.session.local import LocalModel, RecordTo, new_records, read_texts
from olive_ext.session.opening import open_model

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
        self._bind(frozenset(targets))
        self._session.gc()
        return np.array(
            [
                sum(float(as_numbers(output.compared.kl).sum()) for output in document if output.compared is not None)
                for document in asked(self._session, documents)
            ]
        )

    def _bind(self, wanted: frozenset[AnyTarget]) -> None:
        """Quantizes these targets, and no others."""
        for target in self._bound - wanted:
            self._weights[target.part].put_back(target.values)
        for target in wanted - self._bound:
            sources = self._sources[target.part]
            numbers = target.numbers(sources.floats, self.alternatives.get(target, sources.quantized))
            self._weights[target.part].put(numbers)
        if any(target.part for target in self._bound ^ wanted):
            self._session.release_memory()  # what encoders have made of items, too
        self._bound = wanted

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

    def describe(self) -> dict[str, Any]:
        """All that decides what `kl` gives besides targets and documents, JSON-ready."""
        return deciding_facts(self._session)

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


@dataclass(frozen=True)
class Group:
    """Targets that are quantized together: one, a layer's weights or activations, or those of one kind."""

    name: str
    targets: tuple[AnyTarget, ...]

    @property
    def layer(self) -> int | None:
        """The layer of all; None where they have several, or are outside of the layers."""
        layers = {target.layer for target in self.targets}
        return layers.pop() if len(layers) == 1 else None

    @property
    def kind(self) -> str:
        """The kind of all; of several what these have in common: "activations", or nothing."""
        kinds = {target.kind for target in self.targets}
        return kinds.pop() if len(kinds) == 1 else self.targets[0].what.strip(", ")


def grouped(targets: Sequence[AnyTarget], by: str) -> list[Group]:
    """The targets one by one ("node"), by layer, or by kind; those outside of the layers by kind in any case."""

    def key(target: AnyTarget) -> str:
        if by == "node":
            return target.name
        if target.layer is None:
            return target.kind or target.name
        return target.kind if by == "kind" else f"layer {target.layer}{target.what}"

    names = list(dict.fromkeys(map(key, targets)))
    return [Group(name, tuple(target for target in targets if key(target) == name)) for name in names]
