"""The loss map (what each quantized weight costs) and the bill of a mended model (what each weight costs in bytes and
loss, what was chosen, predicted and measured): as data, as JSON, as text and as a page.

Knows no model and no session. All losses are KL(float || variant) in nats a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from olive_ext.errors import RequirementError, counted
from olive_ext.report import numbers
from olive_ext.report.comparison import Status
from olive_ext.report.html.render import TONES, filled
from olive_ext.report.plain_text import Table, markdown_page, print_cells, print_lines
from olive_ext.report.report import plain, to_json
from olive_ext.report.report_files import write_texts

MOST_ROWS = 20
"""Entries that a terminal shows."""

SAYS_NOTHING = 20.0
"""Beyond so many times the mean, an interval's upper end is not printed: few documents have nearly all of the loss."""

DOUBTED = 0.01
"""From this share of numbers beyond rounding on, it is reported."""

MOST_SHADE = 70
"""Per cent of the accent's colour in the darkest cell: text on it stays readable."""

TEMPLATES = Path(__file__).with_name("templates")
"""The pages' templates, beside those of report.html, whose style sheet is shared."""

_MADE_UP = 4.0
"""From so many times the loss of all weights together on, an entry was changed with others, which make up for it."""


@dataclass(frozen=True)
class Estimate:
    """A mean over positions, with a 95 % interval of its own."""

    mean: float
    low: float
    high: float
    num_documents: int


@dataclass(frozen=True)
class Entry:
    """A weight, with what it loses when it alone is quantized."""

    name: str
    layer: int | None
    kind: str
    nodes: tuple[str, ...]
    """The quantized graph's nodes that use it."""

    kl: float
    low: float
    high: float
    """The 95 % interval of `kl`, for this entry alone."""

    num_documents: int
    """How many documents it was measured on."""

    is_certain: bool
    """Whether it is certainly among the largest. All entries for which this is said are so together."""

    float_bytes: int
    bytes: int
    """Its bytes in the float model's files and in the quantized model's."""


@dataclass(frozen=True)
class LossMap:
    """All entries, worst first, and the checks by which they may be believed."""

    model: str
    reference: str
    tasks: tuple[str, ...]
    num_documents: int
    num_positions: int
    num_largest: int
    entries: tuple[Entry, ...]
    total: Estimate
    """Loss with all of the entries quantized, in the float graph."""

    sum: Estimate
    """Sum of all entries' losses, on the documents on which all were measured."""

    model_kl: Estimate
    """Loss of the quantized model itself."""

    kernels: Estimate
    """`model_kl` less `total`, on the same documents: what other kernels than the float model's add, and all that is no
    entry."""

    unpaired: dict[str, str]
    """Nodes that were not compared, and why."""

    beyond_rounding: dict[str, float]
    """By weight the share of its numbers in blocks that lie farther from the float model's than rounding puts any."""

    damaged: dict[str, str]
    """Constants and weights that are not the float model's, beyond any rounding, and how: the first entries."""

    @property
    def num_certain(self) -> int:
        """How many of the largest entries are certain."""
        return sum(entry.is_certain for entry in self.entries)

    @property
    def additivity(self) -> str:
        """Whether the entries' losses add up to that of all weights together, in one sentence."""
        ratio = self.sum.mean / self.total.mean if self.total.mean > 0 else float("nan")
        words = "nearly add up" if 0.8 <= ratio <= 1.25 else "do not add up: errors meet"
        return (
            f"The entries' losses {words}: their sum is {numbers.nats(self.sum.mean)}, that of all of them together "
            f"{numbers.nats(self.total.mean)} nats."
        )

    @property
    def rest(self) -> str:
        """The loss of the quantized model that is no entry's, in one sentence."""
        low, high = numbers.nats(self.kernels.low), numbers.nats(self.kernels.high)
        whole = f"The quantized model itself loses {numbers.nats(self.model_kl.mean)} nats"
        if not math.isfinite(self.kernels.high - self.kernels.low):
            return f"{whole}: too few documents to know what other kernels add."
        if self.kernels.low <= 0 <= self.kernels.high:
            return f"{whole}: other kernels add nothing that shows ({low} to {high})."
        return (
            f"{whole}: other kernels, and what could not be compared, add {numbers.nats(self.kernels.mean)} ({low} to "
            f"{high}) to what the entries lose."
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """All that is to be said beside the entries."""
        sentences = [self.certainty, self.additivity, self.rest]
        if self.unpaired:
            name, why = next(iter(self.unpaired.items()))
            sentences.append(f"Not compared: '{name}' ({why}){_and_others(self.unpaired)}.")
        if self.kernels.mean > self.model_kl.mean / 2:
            sentences.insert(0, sentences.pop(2))
        made_up = {entry.name for entry in self.entries if entry.kl > _MADE_UP * self.total.mean}
        damaged = {name: what for name, what in self.damaged.items() if name not in made_up}
        beyond = {name: share for name, share in self.beyond_rounding.items() if name not in made_up}
        return (*doubt(damaged, beyond), *sentences)

    @property
    def certainty(self) -> str:
        """How many entries are certainly among the largest, in one sentence."""
        wanted = min(self.num_largest, len(self.entries))
        if self.num_certain == wanted:
            return f"The {wanted} largest are certain (95 %)."
        documents = counted(self.num_documents, "document")
        return (
            f"{self.num_certain} are certainly among the {wanted} largest (95 %, by differences on the same documents) "
            f"after {documents}, all that were asked: more would decide the others."
        )


def show_map(loss_map: LossMap) -> None:
    """The largest entries and the sentences, on stdout."""
    print_cells(table(loss_map, MOST_ROWS))
    hidden = len(loss_map.entries) - MOST_ROWS
    print_lines([f"and {counted(hidden, 'smaller one')}"] if hidden > 0 else [])
    print_lines(loss_map.sentences)


def table(loss_map: LossMap, most: int | None = None) -> Table:
    """The `most` largest entries, or all."""
    heads = ("quantized alone", "KL, nats", "95 % interval", "share of the sum", "among the largest", "bytes")
    whole = loss_map.sum.mean
    rows = [
        (
            entry.name,
            numbers.nats(entry.kl),
            interval(entry),
            f"{100 * (entry.kl / whole if whole > 0 else 0.0):.0f} %",
            "certainly" if entry.is_certain else "",
            numbers.size(entry.bytes),
        )
        for entry in loss_map.entries[:most]
    ]
    return Table(f"Where {loss_map.model} loses, against {loss_map.reference}", heads, rows, heads[:1])


def interval(entry: Entry | Estimate) -> str:
    """The 95 % interval as words; a divergence is not below 0."""
    mean, low = (entry.kl if isinstance(entry, Entry) else entry.mean), numbers.nats(max(0.0, entry.low))
    return f"{low} to {numbers.nats(entry.high)}" if entry.high <= SAYS_NOTHING * mean else f"from {low} on"


def _and_others(named: dict[str, str]) -> str:
    return f", and {counted(len(named) - 1, 'other')}" if len(named) > 1 else ""


def doubt(damaged: dict[str, str], shares: dict[str, float]) -> list[str]:
    """Whether weights are not the float model's, and whether the numbers of the others are farther off than rounding
    puts them; `shares` by weight. At most a sentence each."""
    sentences = []
    if damaged:
        name, what = next(iter(damaged.items()))
        sentences.append(f"Damaged: '{name}' {what}{_and_others(damaged)}.")
    rest = {name: share for name, share in shares.items() if name not in damaged}
    mean = sum(rest.values()) / max(1, len(rest))
    if mean > DOUBTED:
        worst = max(rest, key=rest.__getitem__)
        sentences.append(
            f"{100 * mean:.0f} % of the numbers, and {100 * rest[worst]:.0f} % of those of '{worst}', lie farther from "
            "the float model's than rounding to blocks puts any: it is of another checkpoint, or weights were changed "
            "before they were rounded (AWQ, GPTQ)."
        )
    return sentences


def write_loss_map(loss_map: LossMap, folder: str | Path) -> tuple[Path, ...]:
    """Writes loss_map.json, loss_map.md and loss_map.html into `folder`, all or none. Raises `RunError`."""
    shown, entries = table(loss_map), loss_map.entries
    largest = max((entry.kl for entry in entries), default=0.0)

    def shade(entry: Entry) -> int:
        """Per cent, over three powers of ten below the largest loss: one hue, so that lightness alone shows it."""
        if entry.kl <= 0:
            return 0
        return round(MOST_SHADE * max(0.0, 1 + math.log10(entry.kl / largest) / 3))

    inside = [entry for entry in entries if entry.layer is not None]
    layers = sorted({entry.layer for entry in inside if entry.layer is not None})
    page = filled(
        "loss_map.html.j2",
        TEMPLATES,
        map=loss_map,
        kinds=list(dict.fromkeys(entry.kind for entry in inside)),
        layers=[(str(n), {entry.kind: entry for entry in inside if entry.layer == n}) for n in layers],
        outside=[entry for entry in entries if entry.layer is None] if layers else (),
        shade=shade,
        interval=interval,
        nats=numbers.nats,
        count=numbers.count,
        heads=shown.heads,
        rows=shown.rows,
    )
    texts = {"json": to_json(loss_map), "md": markdown_page(loss_map.sentences, shown), "html": page}
    paths = {Path(folder, f"loss_map.{suffix}"): text for suffix, text in texts.items()}
    write_texts(paths, Path(folder), "the loss map")
    return tuple(paths)


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
        held, before = self.chosen_loss.held_out, self.unchanged_loss.held_out
        sentences = doubt(self.damaged, self.beyond_rounding)
        if self.changed:
            size = f"{numbers.size(self.chosen.bytes)}, {self.chosen.bytes / self.unchanged.bytes:.3f} times"
            changed = f"{counted(len(self.changed), 'weight')} of {len(self.lines)}"
            sentences.append(f"{changed} in another precision: {size} the quantized model's.")
        else:
            meets = f"already meets the goal ({self.goal}) on the documents that choose"
            sentences.append(f"The quantized model {meets}: it is handed on unchanged.")
        sentences.append(
            f"kl_mean: predicted {numbers.nats(self.chosen.kl)}, measured {with_interval(held)} on "
            f"{counted(held.num_documents, 'document')} that chose nothing, where it was {with_interval(before)}."
        )
        if self.bound is not None and self.verdict is not None:
            words = {
                "ok": "is kept (95 %).",
                "loss": "is broken (95 %).",
                "unknown": "lies inside of the interval: not decided; more documents decide it (`limit`).",
            }
            sentences.append(f"The bound kl_mean = {numbers.nats(self.bound)} {words[self.verdict]}")
        return tuple(sentences)


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
    """Whole models: as it was, and the one that was chosen; or these with the front, small to large."""
    heads = ("model", "bytes", "KL predicted on the documents that choose, nats")
    points = [bill.unchanged, bill.chosen]
    if with_front:
        points = sorted([*bill.front, *points], key=lambda point: point.bytes)
    return Table("", heads, [(one.name, numbers.size(one.bytes), numbers.nats(one.kl)) for one in points], heads[:1])


def show_bill(bill: Bill, wording: Callable[[str], str] = str) -> None:
    """Both tables and the sentences, on stdout; `wording` gives these another form."""
    if bill.changed:
        print_cells(changes_table(bill))
    print_cells(points_table(bill))
    print_lines(map(wording, bill.sentences))


def bill_texts(bill: Bill) -> dict[str, str]:
    """The files beside a mended model, by their names."""
    changed, tone = changes_table(bill), TONES[bill.verdict] if bill.verdict else ""
    points = points_table(bill, with_front=True)
    return {
        "bill.json": to_json({**plain(bill), "verdict": bill.verdict}),
        "bill.md": markdown_page(bill.sentences, changed, points_table(bill)),
        "bill.html": filled("bill.html.j2", TEMPLATES, bill=bill, tone=tone, changed=changed, points=points),
    }
