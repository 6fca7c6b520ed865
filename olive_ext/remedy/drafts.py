"""Mended models that are written to be measured, each once, and what they lose.

Knows choices, a folder and documents; no bound and no bill.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import size_on_disk
from olive_ext.remedy.choices import Answer, Menu
from olive_ext.remedy.documents import Document
from olive_ext.remedy.measurements import Material, Measurements
from olive_ext.remedy.mended_graph import alternative
from olive_ext.remedy.mended_package import Package, copy_of, mended
from olive_ext.remedy.race import Estimate, Floats, estimate
from olive_ext.remedy.sources import Sources
from olive_ext.remedy.variants import nats_by_document

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
