"""The search for the smallest model that keeps a bound, or the best one in a size, among mended models that are written
to be measured, each once.

A menu predicts by adding up what single weights lose; errors that meet make a model lose less or more than that. So
models are written and measured, and the next one is chosen by what the last one lost for each nat of its prediction.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from olive_ext.errors import RequirementError
from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import size_on_disk
from olive_ext.plugins.diagnose.remedy.bill import Trial, with_interval
from olive_ext.plugins.diagnose.remedy.choices import Answer, Menu
from olive_ext.plugins.diagnose.remedy.documents import Document
from olive_ext.plugins.diagnose.remedy.mended_graph import alternative
from olive_ext.plugins.diagnose.remedy.mended_package import Package, copy_of, mended
from olive_ext.plugins.diagnose.remedy.race import Estimate, Floats, estimate
from olive_ext.plugins.diagnose.remedy.sources import Sources
from olive_ext.plugins.diagnose.remedy.variants import Material, Measurements, nats_by_document
from olive_ext.report import numbers

MOST_ROUNDS = 6
"""Models that are measured for a bound. The last one has every weight in its finest precision."""

WORTH_MEASURING = 0.01
"""Share of the loss that is allowed from which on an estimated one is measured before it is chosen."""

WORTH_WRITING = 0.99
"""Share of a model's bytes below which a smaller one is tried, too."""

NEXT = 0.98
"""Share of the smallest prediction that broke the bound up to which the next one may go."""


class Search:
    """One search, on the documents that choose."""

    def __init__(self, menu: Menu, drafts: Drafts, own_size: int, choosing: Sequence[int], goal: str) -> None:
        """`own_size`: bytes of the quantized model; `choosing`: numbers of documents; `goal`: in words."""
        self._menu, self._drafts, self._choosing, self._goal = menu, drafts, choosing, goal
        self._others = own_size - menu.num_bytes(menu.unchanged)
        self.trials: dict[Answer, Trial] = {}

    def best_in(self, size: int) -> Answer:
        """The choices with the least loss in at most so many bytes; the model as it is where nothing fits."""
        room = size
        while True:
            answer = self._priced(partial(self._menu.best, room - self._others))
            over = self._drafts.num_bytes(answer) - size
            if over <= 0 or answer == self._menu.cured:
                return answer
            room -= over

    def smallest(self, most_kl: float, size: int | None, before: Estimate) -> Answer:
        """The choices with the fewest bytes of a model that keeps the bound, and the size. `before`: what the quantized
        model loses. Raises `RequirementError` where none does."""
        menu = self._menu
        kept = menu.unchanged if before.high <= most_kl and not any(menu.cured) else None
        if kept is not None and not menu.can_shrink:
            return kept
        ratio = _ratio(before, menu.kl(menu.unchanged))
        for rounds in range(1, MOST_ROUNDS + 1):
            broken = [NEXT * menu.kl(one) for one, trial in self.trials.items() if trial.measured.high > most_kl]
            limit = min([most_kl / ratio, *broken])
            answer = menu.finest
            if rounds < MOST_ROUNDS or kept is not None:
                answer = self._priced(partial(menu.smallest, limit), limit)
            wanted = self._drafts.num_bytes(answer)
            last = f"every weight in its finest precision ({numbers.size(wanted)})" if answer == menu.finest else ""
            if size is not None and wanted > size:
                answer = self.best_in(size)
                last = f"the least loss in {numbers.size(size)} (the bound is predicted to take {numbers.size(wanted)})"
            if kept is not None and menu.num_bytes(answer) >= WORTH_WRITING * menu.num_bytes(kept):
                break
            trial = self._tried(answer)
            if trial.measured.high <= most_kl:
                kept = answer
            elif last:
                measured = f"with {last} kl_mean is {with_interval(trial.measured)}"
                raise RequirementError(f"{self._goal}: not reached; {measured}{self._stuck(answer)}")
            ratio = _ratio(trial.measured, menu.kl(answer))
        assert kept is not None  # the last round is of the finest
        return kept

    def _stuck(self, answer: Answer) -> str:
        """The weight that loses most, where it has no other choice."""
        chosen = [self._menu.of_target(number)[choice].kl for number, choice in enumerate(answer)]
        worst = max(range(len(chosen)), key=chosen.__getitem__)
        if len(self._menu.of_target(worst)) > 1 or not chosen[worst]:
            return ""
        target, lost = self._menu.targets[worst], numbers.nats(chosen[worst])
        return f"; '{target.name}', which loses {lost}, has no finer form that can be written"

    def _tried(self, answer: Answer) -> Trial:
        if answer not in self.trials:
            loss = self._drafts.loss(answer, self._choosing)
            self.trials[answer] = Trial(self._drafts.num_bytes(answer), self._menu.kl(answer), loss)
        return self.trials[answer]

    def _priced(self, solve: Callable[[], Answer], limit: float | None = None) -> Answer:
        """The answer, with the estimates that matter for it measured."""
        menu = self._menu
        while True:
            answer = solve()
            wanted = WORTH_MEASURING * (menu.kl(answer) if limit is None else limit)
            chosen = [(number, choice, menu.of_target(number)[choice]) for number, choice in enumerate(answer)]
            unsure = [(number, choice) for number, choice, one in chosen if not one.is_measured and one.kl > wanted]
            if not unsure:
                return answer
            for number, choice in unsure:
                self._drafts.learn(number, choice, self._choosing)


def _ratio(measured: Estimate, predicted: float) -> float:
    """What was lost for each nat that was predicted; 1 where either is none, as of a constant that no text reaches."""
    return measured.high / predicted if predicted and measured.high else 1.0


AS_IT_IS = "the quantized model"


class Drafts:
    """The models that a menu's answers give, in a working folder. What they lose is kept in the material's journal."""

    def __init__(
        self,
        model: ResolvedModel,
        sources: Mapping[str, Sources],
        menu: Menu,
        material: Material,
        folder: Path,
        told: Callable[[Package], None],
    ) -> None:
        """`sources` by part of the package; `told` is given each package before it is written."""
        self._model, self._sources, self._menu, self._material = model, sources, menu, material
        self._folder, self._told = folder, told
        self._measurements = Measurements(material.variants, material.documents, material.journal)
        self._beside = size_on_disk(model.files) - mended(model, sources, {}).graph_bytes
        self._places: dict[Answer, Path] = {}
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was ended by force

    def package(self, answer: Answer) -> Package:
        """The model with these choices, not written yet."""
        precisions = self._menu.precisions(answer)
        chosen = {target: precision for target, precision in precisions.items() if precision is not None}
        return mended(self._model, self._sources, chosen)

    def num_bytes(self, answer: Answer) -> int:
        """Of graph and weights, at most."""
        return self._beside + self.package(answer).graph_bytes

    def place(self, answer: Answer) -> Path:
        """The folder with this model, which is written where it is not there yet; the others are dropped."""
        if answer not in self._places:
            for other in self._places.values():
                shutil.rmtree(other, ignore_errors=True)  # a system may hold its files yet
            package = self.package(answer)
            self._told(package)
            self._places = {answer: self._folder / str(len(list(self._folder.glob("*"))))}
            package.write(self._places[answer])
        return self._places[answer]

    def loss(self, answer: Answer, numbers: Sequence[int]) -> Estimate:
        """What the model with these choices loses by itself, with its own kernels, on documents by their numbers."""

        def measure(documents: Sequence[Document]) -> Floats:
            model = copy_of(self._model, self.place(answer)) if any(answer) else self._model
            return nats_by_document(self._material.variants.compared(model, documents), len(documents))

        changed = [
            f"{target.name} as {precision.name}"
            for target, precision in self._menu.precisions(answer).items()
            if precision is not None
        ]
        sums = self._measurements.kept(repr(sorted(changed) or AS_IT_IS), numbers, measure)
        return estimate(sums, self._material.positions[list(numbers)].astype(np.float64))

    def learn(self, number: int, choice: int, numbers: Sequence[int]) -> None:
        """Measures one weight in one precision, on documents by their numbers, and puts its loss into the menu."""
        one = self._menu.of_target(number)[choice]
        target, precision = one.together or self._menu.targets[number], one.precision
        assert precision is not None
        other, weights = alternative(target, precision, self._sources[target.part])
        alternatives = self._material.variants.alternatives

        def measure(documents: Sequence[Document]) -> Floats:
            alternatives[other] = weights
            try:
                return self._material.variants.kl([other], documents)
            finally:
                del alternatives[other]

        lost = self._measurements.kept(other.name, numbers, measure).sum()
        self._menu.learn(number, choice, float(lost / self._material.positions[list(numbers)].sum()))
