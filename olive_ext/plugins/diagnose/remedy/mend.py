"""`mend`: the quantized model with some weights in a finer precision, chosen by what they lose, written and measured.

Half of each task's documents, by a hash of their requests, choose; the other half say what was reached. A bound counts
as kept by the documents that choose where the upper end of the 95 % interval keeps it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from olive_ext.backends.progress import say
from olive_ext.errors import ConfigError, MissingError, OliveExtError, RequirementError, RunError
from olive_ext.model.files.content import size_on_disk
from olive_ext.model.files.locate import locate as locate_files
from olive_ext.plugins.diagnose.remedy.bill import Bill, Line, Measured, Point, Priced
from olive_ext.plugins.diagnose.remedy.choices import CANDIDATES, Answer, Menu
from olive_ext.plugins.diagnose.remedy.documents import Document, document_key
from olive_ext.plugins.diagnose.remedy.locate import Location, opened_location
from olive_ext.plugins.diagnose.remedy.mended_package import Package, copy_of, moved, refuse_filled, refuse_inside
from olive_ext.plugins.diagnose.remedy.olive_settings import olive_settings
from olive_ext.plugins.diagnose.remedy.page import bill_texts
from olive_ext.plugins.diagnose.remedy.search import Drafts, Search
from olive_ext.plugins.diagnose.remedy.variants import Material
from olive_ext.plugins.diagnose.settings import MendingConfig
from olive_ext.report import numbers
from olive_ext.report.report_files import write_texts

LEAST_DOCUMENTS = 4
"""On either side of the split: fewer have no interval that is worth its name."""

FRONT_POINTS = 24


def mend(config: MendingConfig | Mapping[str, Any] | str | Path, *, progress: bool = False, **settings: Any) -> Bill:
    """Writes the mended model into `output_dir`, with its bill, which is returned.

    `config` is the model's path with the other keys as keywords
    (`mend("int4", reference="float", tasks=["mmlu"], within={"kl_mean": 0.01}, output_dir="mended")`), a mapping of all
    keys, or a `MendingConfig`. Every failure but an interruption is an `OliveExtError`: `RequirementError` where no
    model keeps the bound, within the size. Nothing is left behind then. Whether documents that chose nothing confirm
    the bound is the bill's `verdict`.

    What has been measured lies in a hidden folder beside `output_dir` until the call ends: one that was interrupted, or
    that the machine made fail, goes on from it when it is made again.
    """
    config = MendingConfig.of(config, settings) if settings or not isinstance(config, MendingConfig) else config
    output = Path(config.output_dir).absolute()
    refuse_filled(output)
    work = config.unfinished
    was_there = work.exists()
    try:
        bill = _mended(config, output, progress)
    except OliveExtError as error:
        if isinstance(error, RequirementError) or not (was_there or isinstance(error, RunError)):
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    return bill


def _mended(config: MendingConfig, output: Path, progress: bool) -> Bill:
    size = config.at_most if config.like is None else size_on_disk(locate_files(config.like))
    with opened_location(config.location(), progress) as location:
        refuse_inside(location.model, output)
        own_size = size_on_disk(location.with_whole_experts().model.files)
        given = f"'{'at_most' if config.like is None else 'like'}' = {numbers.size(size or 0)}"
        told = f"{given}: the quantized model itself takes {numbers.size(own_size)}"
        if size is not None and own_size > size and not location.tables:
            raise ConfigError(told)
        with location.measuring() as material:
            mender = Mender(config.most_kl, size, location, material, config.unfinished / "drafts", progress)
            if size is not None and (least := mender.least) > size:
                raise ConfigError(f"{told}, and {numbers.size(least)} with its table and its head as one")
            draft, bill = mender.run()
            write_texts({draft / name: text for name, text in bill_texts(bill).items()}, draft, "the bill")
            moved(draft, output)
    return bill


class Mender:
    """One call of `mend`: what weights lose is measured when it is made."""

    def __init__(
        self,
        most_kl: float | None,
        size: int | None,
        location: Location,
        material: Material,
        folder: Path,
        progress: bool,
    ) -> None:
        """Bound and size, of which one may be None; `folder` is for models that are measured."""
        self._most_kl, self._size, self.location = most_kl, size, location
        self.model = location.model
        self.own_size = size_on_disk(location.model.files)
        self.choosing, self.held_out = split(material.documents, material.tasks)
        self._map = location.map(material.part(self.choosing), with_gains=False)
        losses = {entry.name: entry.kl for entry in self._map.entries}
        kernels = self._map.kernels.mean if self._map.kernels.low > 0 else 0.0
        by_target = {target: losses[target.name] for target in location.targets}
        self.menu = Menu.of(by_target, location.tables, location.sources, kernels, self._map.damaged)

        def told(package: Package) -> None:
            if progress:
                say(f"writing {numbers.size(package.num_bytes)} to {folder}")

        self.drafts = Drafts(location.model, location.sources, self.menu, material, folder, told)
        self._measure_tables()
        self.search = Search(self.menu, self.drafts, self.own_size, self.choosing, self._goal)

    @property
    def least(self) -> int:
        """Bytes of the smallest model that the choices give, nearly."""
        return self.own_size + self.menu.num_bytes(self.menu.least) - self.menu.num_bytes(self.menu.unchanged)

    def _measure_tables(self) -> None:
        """Measures what a head loses with its table in its precision: nothing tells it beforehand."""
        for number in range(len(self.menu.targets)):
            for choice, one in enumerate(self.menu.of_target(number)):
                if one.together is not None and not one.is_measured:
                    self.drafts.learn(number, choice, self.choosing)

    def run(self) -> tuple[Path, Bill]:
        """Chooses, measures what was chosen; the folder with the model, and its bill."""
        menu, drafts, before = self.menu, self.drafts, self._map.model_kl
        unchanged = Measured(before, drafts.loss(menu.unchanged, self.held_out))
        if self._most_kl is not None:
            answer = self.search.smallest(self._most_kl, self._size, before)
        else:
            assert self._size is not None  # `MendingConfig`
            answer = self.search.best_in(self._size)
        loss = unchanged
        if any(answer):
            loss = Measured(drafts.loss(answer, self.choosing), drafts.loss(answer, self.held_out))
        draft = drafts.place(answer)
        bill = Bill(
            model=self.model.name,
            reference=self.location.reference.name,
            tasks=self._map.tasks,
            goal=self._goal,
            bound=self._most_kl,
            lines=tuple(self._lines(answer)),
            front=tuple(self._point("", one) for one in menu.front(FRONT_POINTS)),
            uniform=tuple(self._uniform()),
            unchanged=self._point("as it was", menu.unchanged),
            unchanged_loss=unchanged,
            chosen=Point("mended", size_on_disk(copy_of(self.model, draft).files), menu.kl(answer)),
            chosen_loss=loss,
            trials=tuple(self.search.trials.values()),
            unpaired=dict(self.location.pairing.unpaired),
            beyond_rounding=self._map.beyond_rounding,
            damaged=self._map.damaged,
            olive=asdict(self._settings(answer)),
        )
        return draft, bill

    def _point(self, name: str, answer: Answer) -> Point:
        grown = self.menu.num_bytes(answer) - self.menu.num_bytes(self.menu.unchanged)
        return Point(name, self.own_size + grown, self.menu.kl(answer))

    def _uniform(self) -> list[Point]:
        """All weights in each of the precisions that at least one may have."""
        answers = [(precision.name, self.menu.uniform(precision)) for precision in CANDIDATES]
        return [self._point(f"all {name}", answer) for name, answer in answers if any(answer)]

    def _lines(self, answer: Answer) -> list[Line]:
        return [
            Line(
                name=target.name,
                nodes=tuple(use.node.name for use in target.quantized),
                layer=target.layer,
                kind=target.kind,
                choices=tuple(
                    Priced(one.name, one.bytes, one.kl, one.is_measured) for one in self.menu.of_target(number)
                ),
                chosen=answer[number],
            )
            for number, target in enumerate(self.menu.targets)
        ]

    def _settings(self, answer: Answer) -> Any:
        precisions = self.menu.precisions(answer)
        own = {target: precision for target, precision in precisions.items() if not target.part}
        made = olive_settings(own, self.location.sources[""])
        others = sorted({target.part for target, precision in precisions.items() if precision and target.part})
        return replace(
            made,
            notes=(*made.notes, *(f"the settings are the decoder's, not the graph's of {part}" for part in others)),
        )

    @property
    def _goal(self) -> str:
        """What was asked for, in words."""
        parts = [] if self._most_kl is None else [f"kl_mean of at most {numbers.nats(self._most_kl)}"]
        parts += [] if self._size is None else [f"at most {numbers.size(self._size)}"]
        return " in ".join(parts)


def split(documents: Sequence[Document], tasks: Sequence[str]) -> tuple[list[int], list[int]]:
    """Numbers of the documents that choose and of those that check: of each task the half with the smaller hashes of
    their requests, and the others; equal documents are on one side. Raises `ConfigError` where either are too few."""
    digests = [document_key(document) for document in documents]
    choosing: list[int] = []
    for task in dict.fromkeys(tasks):
        own = sorted((n for n, one in enumerate(tasks) if one == task), key=digests.__getitem__)
        choosing += own[: (len(own) + 1) // 2]
    chosen = {digests[number] for number in choosing}
    choosing = [number for number, digest in enumerate(digests) if digest in chosen]
    held_out = [number for number, digest in enumerate(digests) if digest not in chosen]
    if min(len(choosing), len(held_out)) < LEAST_DOCUMENTS:
        raise MissingError(
            f"too few documents, {len(documents)} of which {len(set(digests))} differ: {len(choosing)} choose and "
            f"{len(held_out)} check, and {LEAST_DOCUMENTS} of each are needed; raise 'limit' or name more tasks"
        )
    return choosing, held_out
