"""One session of a float model whose weights and switches are bound, with those of its upper parts. Knows targets and
requests, no tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from olive_ext.engine.reference.kernels import DivergenceKernels
from olive_ext.engine.reference.recorded import ReadingTap
from olive_ext.engine.runners.ort.bound_weights import BoundWeights, MissingStatesError
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.errors import ModelError
from olive_ext.model import ResolvedModel
from olive_ext.plugins.diagnose.remedy.borders import Border, Borders
from olive_ext.plugins.diagnose.remedy.documents import Document
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
        """Of the whole graph's multiplications those that are above the highest border below all of `targets`."""
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
