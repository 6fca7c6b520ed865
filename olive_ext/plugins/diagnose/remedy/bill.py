"""The bill of a mended model: what each weight costs in bytes and loss, what was chosen, predicted and measured, as
data, as text and as a page.

Knows no model and no session. All losses are KL(float || model) in nats a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.errors import RequirementError, counted
from olive_ext.plugins.diagnose.remedy.loss_map import TEMPLATES, doubt, interval
from olive_ext.plugins.diagnose.remedy.race import Estimate
from olive_ext.report import numbers
from olive_ext.report.comparison import Status
from olive_ext.report.html.render import TONES, filled
from olive_ext.report.plain_text import markdown_page, print_cells, print_lines
from olive_ext.report.report import plain, to_json
from olive_ext.report.tables import Table

FILE_NAME, TABLE_NAME, PAGE_NAME, SETTINGS_NAME = "bill.json", "bill.md", "bill.html", "olive_settings.json"


@dataclass(frozen=True)
class Option:
    """One way in which a weight may be stored."""

    precision: str
    bytes: int
    kl: float
    is_measured: bool
    """Whether `kl` is measured, else estimated by the weight's error."""


@dataclass(frozen=True)
class Line:
    """One weight."""

    name: str
    nodes: tuple[str, ...]
    """The quantized graph's nodes that use it."""

    layer: int | None
    kind: str
    choices: tuple[Option, ...]
    chosen: int

    @property
    def choice(self) -> Option:
        """What was chosen."""
        return self.choices[self.chosen]


@dataclass(frozen=True)
class Point:
    """A whole model: bytes of graph and weights, and predicted loss."""

    name: str
    bytes: int
    kl: float


@dataclass(frozen=True)
class Measured:
    """A whole model's loss on the documents that chose it, and on others."""

    choosing: Estimate
    held_out: Estimate


@dataclass(frozen=True)
class Trial:
    """A model that was measured on the documents that choose, to choose the next one by."""

    bytes: int
    predicted: float
    measured: Estimate


@dataclass(frozen=True)
class Bill:
    """All that decided a mended model, and what it came to."""

    model: str
    reference: str
    tasks: tuple[str, ...]
    goal: str
    """What was asked for, in words."""

    bound: float | None
    """The largest loss that was asked for."""

    lines: tuple[Line, ...]
    front: tuple[Point, ...]
    """Models that nothing beats in both bytes and predicted loss, small to large."""

    uniform: tuple[Point, ...]
    """Models with all weights in one precision."""

    unchanged: Point
    unchanged_loss: Measured
    chosen: Point
    chosen_loss: Measured
    trials: tuple[Trial, ...]
    """Models that were measured until one kept the bound in the fewest bytes, in their order."""

    unpaired: dict[str, str]
    beyond_rounding: dict[str, float]
    damaged: dict[str, str]
    """Both as the loss map's."""

    olive: dict[str, Any]
    """Settings with which Olive makes the model again, and what they cannot say."""

    @property
    def changed(self) -> tuple[Line, ...]:
        """The weights that are stored otherwise than in the quantized model."""
        return tuple(line for line in self.lines if line.chosen)

    @property
    def verdict(self) -> Status | None:
        """Whether the bound is kept on documents that chose nothing (95 %); None where there is no bound."""
        if self.bound is None:
            return None
        loss = self.chosen_loss.held_out
        return "ok" if loss.high <= self.bound else "loss" if loss.low > self.bound else "unknown"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The choices, their loss, and whether the bound is kept."""
        grown = self.chosen.bytes / self.unchanged.bytes
        held, before = self.chosen_loss.held_out, self.unchanged_loss.held_out
        sizes = f"{numbers.size(self.chosen.bytes)}, {grown:.3f} times the quantized model's"
        sentences = [f"{counted(len(self.changed), 'weight')} of {len(self.lines)} in another precision: {sizes}."]
        if not self.changed:
            sentences = [
                f"The quantized model already meets the goal ({self.goal}) on the documents that choose: it is handed "
                "on unchanged."
            ]
        sentences.append(
            f"kl_mean: predicted {numbers.nats(self.chosen.kl)}, measured {with_interval(held)} on "
            f"{counted(held.num_documents, 'document')} that chose nothing, where it was {with_interval(before)}."
        )
        sentences = [*doubt(self.damaged, self.beyond_rounding), *sentences]
        notes = [f"olive_settings.json: {note}." for note in self.olive.get("notes", ())]
        return (*notes, *sentences, *self._trials_sentence(), *self._verdict_sentence())

    def _trials_sentence(self) -> tuple[str, ...]:
        if not self.trials:
            return ()
        each = (f"{numbers.nats(trial.measured.mean)} for {numbers.nats(trial.predicted)}" for trial in self.trials)
        models = counted(len(self.trials), "model")
        return (f"Measured for predicted on the documents that choose, of {models} tried: {', '.join(each)}.",)

    def _verdict_sentence(self) -> tuple[str, ...]:
        if self.bound is None or self.verdict is None:
            return ()
        words = {
            "ok": "is kept (95 %).",
            "loss": "is broken (95 %).",
            "unknown": "lies inside of the interval: not decided; more documents decide it (`limit`).",
        }
        return (f"The bound kl_mean = {numbers.nats(self.bound)} {words[self.verdict]}",)


def refuse_broken(bill: Bill) -> None:
    """Raises `RequirementError` for a model that certainly breaks its bound on documents that chose nothing."""
    if bill.verdict == "loss":
        loss = bill.chosen_loss.held_out
        raise RequirementError(
            f"{bill.goal}: kept on the documents that choose, and broken on {counted(loss.num_documents, 'document')} "
            f"that chose nothing: kl_mean is {with_interval(loss)}; more documents choose better"
        )


def with_interval(loss: Estimate) -> str:
    """The mean and the 95 % interval."""
    return f"{numbers.nats(loss.mean)} ({interval(loss)})"


def changes_table(bill: Bill) -> Table:
    """The weights that changed, those that gain most first."""
    heads = ("weight", "bytes before", "precision now", "bytes now", "KL, nats")
    lines = sorted(bill.changed, key=lambda line: line.choice.kl - line.choices[0].kl)
    rows = [
        (
            line.name,
            numbers.size(line.choices[0].bytes),
            line.choice.precision,
            numbers.size(line.choice.bytes),
            f"{numbers.nats(line.choices[0].kl)} to {numbers.nats(line.choice.kl)}",
        )
        for line in lines
    ]
    return Table(f"{bill.model} mended: {bill.goal}", heads, rows, heads[:1])


def points_table(bill: Bill, *, with_front: bool = False) -> Table:
    """Whole models: as it was, uniform ones, and the one that was chosen; or these with the front, small to large."""
    heads = ("model", "bytes", "KL predicted on the documents that choose, nats")
    points = [bill.unchanged, *bill.uniform, bill.chosen]
    if with_front:
        points = sorted([*bill.front, *points], key=lambda point: point.bytes)
    return Table("", heads, [(one.name, numbers.size(one.bytes), numbers.nats(one.kl)) for one in points], heads[:1])


def to_markdown(bill: Bill) -> str:
    """The sentences and both tables."""
    return markdown_page(bill.sentences, changes_table(bill), points_table(bill))


def show(bill: Bill, wording: Callable[[str], str] = str) -> None:
    """Both tables and the sentences, on stdout; `wording` gives these another form."""
    if bill.changed:
        print_cells(changes_table(bill))
    print_cells(points_table(bill))
    print_lines(map(wording, bill.sentences))


def bill_texts(bill: Bill) -> dict[Path, str]:
    """The files beside a mended model, by their names."""
    return {
        Path(FILE_NAME): to_json({**plain(bill), "verdict": bill.verdict}),
        Path(TABLE_NAME): to_markdown(bill),
        Path(PAGE_NAME): filled(
            "bill.html.j2",
            TEMPLATES,
            bill=bill,
            tone=TONES[bill.verdict] if bill.verdict else "",
            changed=changes_table(bill),
            points=points_table(bill, with_front=True),
        ),
        Path(SETTINGS_NAME): to_json(bill.olive),
    }
