"""`mend`: the quantized model with some weights in a finer precision, chosen by what they lose, written and measured.

Half of each task's documents, by a hash of their requests, choose; the other half say what was reached. A bound counts
as kept by the documents that choose where the upper end of the 95 % interval keeps it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.backends.progress import is_shown, say
from olive_ext.config.base import takes
from olive_ext.errors import (
    ConfigError,
    MissingError,
    ModelError,
    OliveExtError,
    RequirementError,
    RunError,
    named_failures,
)
from olive_ext.model.files.content import size_on_disk
from olive_ext.model.files.model_package import refuse_shared
from olive_ext.model.files.package_config import real_path
from olive_ext.plugins.diagnose.remedy.choices import Selection, WeightChoices, choices_of, front
from olive_ext.plugins.diagnose.remedy.locate import Floats, Location, estimate, opened_location
from olive_ext.plugins.diagnose.remedy.mended_package import Package, alternative, copy_of, mended, refuse_inside
from olive_ext.plugins.diagnose.remedy.pages import (
    Bill,
    Estimate,
    Line,
    Measured,
    Option,
    Point,
    Trial,
    bill_texts,
    with_interval,
)
from olive_ext.plugins.diagnose.remedy.variants import Document, Material, document_key
from olive_ext.plugins.diagnose.settings import MendingConfig
from olive_ext.report import numbers
from olive_ext.report.report_files import refuse_filled, take_place, write_texts

LEAST_DOCUMENTS = 4
"""The fewest documents on either side of the split: fewer have no useful interval."""

FRONT_POINTS = 24


@takes(MendingConfig)
def mend(
    config: MendingConfig | Mapping[str, Any] | str | Path, *, progress: bool | None = None, **settings: Any
) -> Bill:
    """Writes the mended model into `output_dir`, with its bill, which is returned.

    `config` is the model's path with the other keys as keywords
    (`mend("int4", reference="float", tasks=["mmlu"], within={"kl_mean": 0.01}, output_dir="mended")`), a mapping of all
    keys, or a `MendingConfig`. Every failure but an interruption is an `OliveExtError`: `RequirementError` where no
    model keeps the bound, within the size. Then nothing is left behind. Whether documents that chose nothing confirm
    the bound is the bill's `verdict`.

    What has been measured lies in a hidden folder beside `output_dir` until the call ends: one that was interrupted, or
    that the machine made fail, goes on from it when it is made again.
    """
    config = MendingConfig.of(config, settings) if settings or not isinstance(config, MendingConfig) else config
    output = Path(config.output_dir).absolute()
    refuse_filled(output)
    work = config.unfinished
    was_there = work.exists()
    size = config.at_most
    try:
        with opened_location(config.location(), is_shown(progress)) as location:
            refuse_inside(location.model, output)
            files = location.with_whole_experts().model.files
            for part in {target.part for target in location.targets}:
                graph = files.companions[part].graph if part else files.decoder
                refuse_shared(real_path(location.model.settings.model), graph)
            problem = f"the quantized model itself takes {numbers.size(size_on_disk(files))}"
            if size is not None and size_on_disk(files) > size and not location.tables:
                raise ConfigError(problem, "at_most", size)
            with location.measuring() as material:
                mender = Mender(config.most_kl, size, location, material, work / "drafts", is_shown(progress))
                if size is not None and (least := mender.least) > size:
                    problem += f", and {numbers.size(least)} with its table and its head as one"
                    raise ConfigError(problem, "at_most", size)
                draft, bill = mender.run()
                write_texts({draft / name: text for name, text in bill_texts(bill).items()}, draft, "the bill")
                with named_failures(f"cannot put the mended model at '{output}'"):
                    take_place(draft, output)
    except OliveExtError as error:
        if isinstance(error, RequirementError) or not (was_there or isinstance(error, RunError)):
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    return bill


MOST_ROUNDS = 6
"""The most models that are measured for a bound. The last one has every weight in its finest precision."""

WORTH_MEASURING = 0.01
"""An estimated loss of more than this share of the allowed loss is measured before it is chosen."""

WORTH_WRITING = 0.99
"""A model that is smaller by at least this share of bytes is tried, too."""

NEXT = 0.98
"""The next prediction is at most this share of the smallest one that broke the bound."""


class Mender:
    """One call of `mend`: the smallest model that keeps a bound, or the best one in a size. What weights lose is
    measured when it is made.

    A menu predicts the loss of a model as the sum of the losses of single weights. Errors interact, so the real loss is
    smaller or larger. So models are written and measured, each once, on the documents that choose. The ratio of the
    last model's measured loss to its predicted one corrects the next prediction.
    """

    def __init__(
        self,
        most_kl: float | None,
        size: int | None,
        location: Location,
        material: Material,
        folder: Path,
        progress: bool,
    ) -> None:
        """One of bound and size may be None; `folder` is for models that are measured. With `progress` each is
        announced before it is written."""
        self._most_kl, self._size, self._location = most_kl, math.inf if size is None else size, location
        self._material, self._folder, self._progress = material, folder, progress
        self.model = location.model
        self.own_size = size_on_disk(location.model.files)
        self.choosing, self.held_out = split(material.documents, material.tasks)
        self._map = location.map(material.part(self.choosing))
        for name, how in material.variants.cache_damage.items():
            problem = f"'{self.model.name}' is damaged: {name} {how}; export it again: other weights do not mend that"
            raise ModelError(problem, code="damaged")
        losses = {entry.name: entry.kl for entry in self._map.entries}
        kernels = self._map.kernels.mean if self._map.kernels.low > 0 else 0.0
        tables, damaged = location.tables, self._map.damaged
        choices = {
            one: [*choices_of(one, losses[one.name], tables.get(one), location.sources[one.part], one.name in damaged)]
            for one in location.targets
        }
        self.menu = WeightChoices(choices, kernels, damaged)
        self._others = self.own_size - self.menu.num_bytes(self.menu.unchanged)  # bytes beside the weights
        self._beside = self.own_size - mended(self.model, location.sources, {}).graph_bytes
        self._trials: dict[Selection, Trial] = {}
        self._places: dict[Selection, Path] = {}
        self._num_written = 0
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was ended by force
        for number, offered in enumerate(self.menu.choices):
            for choice, option in enumerate(offered):
                if option.together and not option.is_measured:  # a head with its table: nothing predicts its loss
                    self._learn(number, choice)

    @property
    def least(self) -> int:
        """Bytes of the smallest model that the choices give, nearly."""
        return self._others + self.menu.num_bytes(self.menu.least)

    def run(self) -> tuple[Path, Bill]:
        """Chooses, measures what was chosen; the folder with the model, and its bill."""
        menu, before = self.menu, self._map.model_kl
        unchanged = Measured(before, self._loss(menu.unchanged, self.held_out))
        selection = self.best_in(self._size) if self._most_kl is None else self._smallest(self._most_kl)
        loss = unchanged
        if any(selection):
            loss = Measured(self._loss(selection, self.choosing), self._loss(selection, self.held_out))
        draft = self._place(selection)
        lines = [
            Line(
                name=target.name,
                nodes=target.nodes,
                layer=target.layer,
                kind=target.kind,
                choices=tuple(Option(one.name, one.bytes, one.kl, one.is_measured) for one in offered),
                chosen=chosen,
            )
            for target, offered, chosen in zip(menu.targets, menu.choices, selection, strict=True)
        ]
        bill = Bill(
            model=self.model.name,
            reference=self._location.reference.name,
            tasks=self._map.tasks,
            goal=self._goal,
            bound=self._most_kl,
            lines=tuple(lines),
            front=tuple(self._point("", one) for one in front(menu.losses, menu.sizes, FRONT_POINTS)),
            unchanged=self._point("as it was", menu.unchanged),
            unchanged_loss=unchanged,
            chosen=Point("mended", size_on_disk(copy_of(self.model, draft).files), menu.kl(selection)),
            chosen_loss=loss,
            trials=tuple(self._trials.values()),
            unpaired=dict(self._location.pairing.unpaired),
            beyond_rounding=self._map.beyond_rounding,
            damaged=self._map.damaged,
        )
        return draft, bill

    def _point(self, name: str, selection: Selection) -> Point:
        return Point(name, self._others + self.menu.num_bytes(selection), self.menu.kl(selection))

    def best_in(self, size: float) -> Selection:
        """The choices with the least loss in at most so many bytes; the model as it is where nothing fits."""
        room = size
        while True:
            selection = self._priced(partial(self.menu.best, room - self._others))
            over = self.num_bytes(selection) - size
            if over <= 0 or selection == self.menu.cured(self.menu.unchanged):
                return selection
            room -= over

    def _smallest(self, most_kl: float) -> Selection:
        """The choices with the fewest bytes of a model that keeps the bound, and the size. Raises `RequirementError`
        where none does."""
        menu, size, before = self.menu, self._size, self._map.model_kl
        kept = menu.unchanged if before.high <= most_kl and not any(menu.cured(menu.unchanged)) else None
        if kept is not None and not any(menu.least):
            return kept
        ratio = _ratio(before, menu.kl(menu.unchanged))
        for rounds in range(1, MOST_ROUNDS + 1):
            broken = [NEXT * menu.kl(tried) for tried, trial in self._trials.items() if trial.measured.high > most_kl]
            limit = min([most_kl / ratio, *broken])
            selection = menu.finest
            if rounds < MOST_ROUNDS or kept is not None:
                selection = self._priced(partial(menu.smallest, limit), limit)
            wanted = self.num_bytes(selection)
            last = f"every weight in its finest precision ({numbers.size(wanted)})" if selection == menu.finest else ""
            if wanted > size:
                selection = self.best_in(size)
                last = f"the least loss in {numbers.size(size)} (the bound is predicted to take {numbers.size(wanted)})"
            if kept is not None and menu.num_bytes(selection) >= WORTH_WRITING * menu.num_bytes(kept):
                break
            if selection not in self._trials:
                loss = self._loss(selection, self.choosing)
                self._trials[selection] = Trial(self.num_bytes(selection), menu.kl(selection), loss)
            trial = self._trials[selection]
            if trial.measured.high <= most_kl:
                kept = selection
            elif last:
                each = zip(menu.targets, menu.choices, selection, strict=True)
                worst, offered, choice = max(each, key=lambda one: one[1][one[2]].kl)
                lost, stuck = offered[choice].kl, ""
                if len(offered) == 1 and lost:
                    stuck = f"; '{worst.name}', which loses {numbers.nats(lost)}, has no finer form that can be written"
                measured = f"with {last} kl_mean is {with_interval(trial.measured)}"
                raise RequirementError(f"{self._goal}: not reached; {measured}{stuck}")
            ratio = _ratio(trial.measured, menu.kl(selection))
        assert kept is not None  # the last round is of the finest
        return kept

    def _priced(self, solve: Callable[[], Selection], limit: float | None = None) -> Selection:
        """The selection, with the estimates that matter for it measured."""
        menu = self.menu
        while True:
            selection = solve()
            wanted = WORTH_MEASURING * (menu.kl(selection) if limit is None else limit)
            options = [(number, choice, menu.choices[number][choice]) for number, choice in enumerate(selection)]
            unsure = [(n, choice) for n, choice, option in options if not option.is_measured and option.kl > wanted]
            if not unsure:
                return selection
            for number, choice in unsure:
                self._learn(number, choice)

    def _learn(self, number: int, choice: int) -> None:
        """Measures one weight in one precision on the documents that choose, and puts its loss into the menu."""
        one = self.menu.choices[number][choice]
        target, precision = one.together or self.menu.targets[number], one.precision
        assert precision is not None
        other, weights = alternative(target, precision, self._location.sources[target.part])
        variants, positions = self._material.variants, self._material.positions[self.choosing]
        sums = self._material.kept(other.name, self.choosing, lambda some: variants.kl([other], some, weights))
        self.menu.learn(number, choice, float(sums.sum() / positions.sum()))

    def package(self, selection: Selection) -> Package:
        """The model with these choices, not written yet."""
        precisions = self.menu.precisions(selection)
        chosen = {target: precision for target, precision in precisions.items() if precision is not None}
        return mended(self.model, self._location.sources, chosen)

    def num_bytes(self, selection: Selection) -> int:
        """The bytes of graph and weights, at most."""
        return self._beside + self.package(selection).graph_bytes

    def _place(self, selection: Selection) -> Path:
        """The folder with this model, which is written where it is missing; other models are removed."""
        if selection not in self._places:
            for other in self._places.values():
                shutil.rmtree(other, ignore_errors=True)  # a system may hold its files yet
            package = self.package(selection)
            self._num_written += 1
            folder = self._folder / str(self._num_written)
            if self._progress:
                say(f"writing {numbers.size(package.num_bytes)} to {folder}")
            self._places = {selection: folder}
            package.write(folder)
        return self._places[selection]

    def _loss(self, selection: Selection, documents: Sequence[int]) -> Estimate:

        def measure(some: Sequence[Document]) -> Floats:
            model = copy_of(self.model, self._place(selection)) if any(selection) else self.model
            return self._material.variants.compared(model, some)

        changed = [
            f"{target.name} as {precision.name}"
            for target, precision in self.menu.precisions(selection).items()
            if precision is not None
        ]
        sums = self._material.kept(repr(sorted(changed) or AS_IT_IS), documents, measure)
        return estimate(sums, self._material.positions[list(documents)].astype(np.float64))

    @property
    def _goal(self) -> str:
        parts = [] if self._most_kl is None else [f"kl_mean of at most {numbers.nats(self._most_kl)}"]
        parts += [] if self._size == math.inf else [f"at most {numbers.size(self._size)}"]
        return " in ".join(parts)


AS_IT_IS = "the quantized model"
"""Its name in the journal."""


def split(documents: Sequence[Document], tasks: Sequence[str]) -> tuple[list[int], list[int]]:
    """Numbers of the documents that choose and of those that check: of each task the half with the smaller hashes of
    their requests, and the others; equal documents are on one side. Raises `ConfigError` where either are too few."""
    digests = [document_key(document) for document in documents]
    choosing: list[int] = []
    for task in dict.fromkeys(tasks):
        numbers = sorted((n for n, one in enumerate(tasks) if one == task), key=digests.__getitem__)
        choosing += numbers[: (len(numbers) + 1) // 2]
    chosen = {digests[number] for number in choosing}
    choosing = [number for number, digest in enumerate(digests) if digest in chosen]
    held_out = [number for number, digest in enumerate(digests) if digest not in chosen]
    if min(len(choosing), len(held_out)) < LEAST_DOCUMENTS:
        raise MissingError(
            f"too few documents, {len(documents)} of which {len(set(digests))} differ: {len(choosing)} choose and "
            f"{len(held_out)} check, and {LEAST_DOCUMENTS} of each are needed; raise 'limit' or name more tasks"
        )
    return choosing, held_out


def _ratio(measured: Estimate, predicted: float) -> float:
    """Measured nats for each predicted one; 1 where either is 0, as for a constant that no text reaches."""
    return measured.high / predicted if predicted and measured.high else 1.0
