"""A float model whose weights are bound, not constant, and how far it is from itself with other numbers in some.

One session serves all variants of weights and roundings: a variant is a binding. Knows targets and requests, no tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.recorded import ReadingTap, WritingTap
from olive_ext.engine.runners.ort.bound_weights import BoundWeights
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.model import ResolvedModel
from olive_ext.records import Records
from olive_ext.remedy.documents import Document
from olive_ext.remedy.pairing import Target
from olive_ext.remedy.quantized_cache import QuantizedCache
from olive_ext.remedy.roundings import AnyTarget, Rounding, Switches
from olive_ext.remedy.weights import GraphWeights, Matrix
from olive_ext.session.answer_journal import deciding_facts
from olive_ext.session.local import LocalModel, RecordTo, new_records
from olive_ext.session.opening import open_model
from olive_ext.session.session import Session
from olive_ext.session.texts import read_texts
from olive_ext.stats.compared_fields import Positions, TokenClasses
from olive_ext.text.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

Floats = npt.NDArray[np.float64]


def nats_by_document(positions: Positions, number: int) -> Floats:
    """KL in nats, summed over the positions of each of so many documents [N]."""
    rows = positions.rows
    return np.bincount(rows["document"], rows["kl"], number).astype(np.float64)


class BoundSession:
    """A session of one model whose weights and switches are bound."""

    def __init__(
        self, model: ResolvedModel, arrays: Mapping[str, Mapping[str, Matrix]], roundings: Sequence[Rounding]
    ) -> None:
        """`arrays`: the graphs' own numbers, by part. Raises what opening `model` raises."""
        switches, files = Switches(roundings), {"": model.files.decoder}
        files |= {part: companion.graph for part, companion in model.files.companions.items()}
        self._weights = {part: BoundWeights(own, _unchanged if part else switches.edit) for part, own in arrays.items()}
        texts = read_texts(model)
        opened = open_ort_runner(model, weights={files[part]: bound for part, bound in self._weights.items()})
        self.local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
        self.kernels = DivergenceKernels.at(opened.runner)
        self.missing = list(switches.missing)
        self._bound: frozenset[AnyTarget] = frozenset()
        self.session: Session

    def read(self, records: Records) -> None:
        """Opens the session, which compares what it is asked with `records`."""
        self.session = self.local.session(ReadingTap(records, self.kernels))

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
        else:
            self.session.gc()
        self._bound = wanted


def _unchanged(model: object) -> None:
    """Edits nothing."""


class Variants:
    """The float model in one session, with some of the quantized numbers in place of its own, and some roundings; in
    another one with the quantized KV cache, where there is one."""

    def __init__(
        self,
        model: ResolvedModel,
        graphs: Mapping[str, tuple[GraphWeights, GraphWeights]],
        targets: Sequence[Target],
        roundings: Sequence[Rounding],
        record_to: RecordTo,
    ) -> None:
        """`graphs`: by part the weights of the float graph and of the quantized one, of the decoder those of "";
        `record_to`: where the float model's distributions are recorded. Raises what opening `model` raises."""
        self._graphs = graphs
        self._arrays: dict[str, dict[str, Matrix]] = {"": {}}
        for target in targets:
            floats, arrays = graphs[target.part][0], self._arrays.setdefault(target.part, {})
            roots = frozenset().union(*(use.roots for use in target.floats))
            arrays |= {use.value: floats.matrix(use) for use in floats.uses.values() if use.roots & roots}
        self._arrays[""] |= {name: np.array(False) for rounding in roundings for name in rounding.values}
        self._roundings = roundings
        self._plain = BoundSession(replace(model, is_compared=True), self._arrays, roundings)
        self._records = new_records(self._plain.local, record_to)
        tap = WritingTap(self._records, self._plain.kernels)
        self.recorder = self._plain.local.session(tap, records=self._records)
        self._plain.read(self._records)
        self._cached: BoundSession | None = None
        self.missing = self._plain.missing
        self.targets: list[AnyTarget] = [*targets, *(one for one in roundings if one not in self.missing)]
        """All that `kl` takes: of the roundings those whose nodes the engine's form of the graph has."""

        self.alternatives: dict[AnyTarget, GraphWeights] = {}
        """Graphs with the numbers of targets that are not the quantized model's own."""

    def add_cache(self, cache: QuantizedCache, model: ResolvedModel) -> None:
        """Takes the quantized cache as a target, too; `model` is the float one with it. Raises what opening it raises,
        and `ModelError` where the engine's form of it has not all that the other has."""
        self._cached = BoundSession(replace(model, is_compared=True), self._arrays, self._roundings)
        self._cached.read(self._records)
        others = set(self._cached.missing) - set(self.missing)
        self.missing += others
        self.targets = [*(one for one in self.targets if one not in others), cache]

    def record(self, documents: Sequence[Document]) -> npt.NDArray[np.int64]:
        """Keeps the float model's distributions at all targets; the number of positions of each document [N]."""
        outputs = _asked(self.recorder, documents)
        return np.array([sum(len(output.token_logprobs) for output in document) for document in outputs])

    def kl(self, targets: Collection[AnyTarget], documents: Sequence[Document]) -> Floats:
        """KL(float || variant) in nats, summed over the positions of each of N documents [N]; the variant has the
        quantized numbers of `targets`. The documents have been recorded."""
        has_cache = any(isinstance(target, QuantizedCache) for target in targets)
        bound = self._cached if has_cache and self._cached is not None else self._plain
        bound.bind(frozenset(targets), self._numbers)
        return _sums(bound.session, documents)

    def compared(self, model: ResolvedModel, documents: Sequence[Document]) -> Positions:
        """All positions of another model, which is opened for it: the quantized one itself. Documents are numbered as
        they come."""
        with open_model(model, self._records) as session:
            classes = TokenClasses(session.tokenizer.token_text, session.tokenizer.special_ids)
            positions = Positions()
            for number, outputs in enumerate(_asked(session, documents)):
                for output in outputs:
                    if output.compared is None:  # an empty text has no positions
                        continue
                    positions.add(
                        number,
                        output.token_logprobs,
                        output.compared,
                        first_position=int(output.compared.positions[0]) if len(output.compared) else 0,
                        token_classes=classes.of(output.compared.targets),
                    )
        return positions

    def describe(self) -> dict[str, Any]:
        """All that decides what `kl` gives besides targets and documents, JSON-ready."""
        return deciding_facts(self._plain.session)

    @property
    def tokens_fed(self) -> int:
        """Tokens that were computed so far, recorded ones, too."""
        return sum(int(session.counters.tokens_fed) for session in self._sessions)

    def __enter__(self) -> Variants:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions:
            session.close()

    @property
    def _sessions(self) -> list[Session]:
        bound = [self._plain, *([self._cached] if self._cached is not None else [])]
        return [self.recorder, *(one.session for one in bound)]

    def _numbers(self, target: AnyTarget) -> Mapping[str, Matrix]:
        floats, quantized = self._graphs[target.part]
        return target.numbers(floats, self.alternatives.get(target, quantized))


def _sums(session: Session, documents: Sequence[Document]) -> Floats:
    return np.array(
        [
            sum(float(output.compared.kl.sum(dtype=np.float64)) for output in document if output.compared is not None)
            for document in _asked(session, documents)
        ]
    )


def _asked(session: Session, documents: Sequence[Document]) -> list[list[ScoringOutput | RollingOutput]]:
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
