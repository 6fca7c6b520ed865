"""The loss map: what each quantized weight costs, with intervals, as data, as JSON, as text and as a page.

Knows no model and no session. All losses are KL(float || variant) in nats a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olive_ext.errors import counted
from olive_ext.plugins.diagnose.remedy.race import Estimate
from olive_ext.report import numbers
from olive_ext.report.html.render import filled
from olive_ext.report.plain_text import markdown_page, print_cells, print_lines
from olive_ext.report.report import to_json
from olive_ext.report.report_files import write_texts
from olive_ext.report.tables import Table

FILE_NAME, TABLE_NAME, PAGE_NAME = "loss_map.json", "loss_map.md", "loss_map.html"

MOST_ROWS = 20
"""Entries that a terminal shows."""

SAYS_NOTHING = 20.0
"""Beyond so many times the mean, the upper end of an interval is not printed: a few documents have nearly all of the
loss."""

DOUBTED = 0.01
"""From this share of numbers beyond rounding on, it is reported."""

MOST_SHADE = 70
"""Per cent of the accent's colour in the darkest cell: text on it stays readable."""

TEMPLATES = Path(__file__).with_name("templates")
"""The pages' templates, beside those of report.html, whose style sheet is shared."""

_MADE_UP = 4.0
"""From so many times the loss of all weights together on, others make up for an entry's loss: it was changed with them.
"""


@dataclass(frozen=True)
class Entry:
    """A weight, activations that nodes read, or a group of either, with what it loses when it alone is quantized."""

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

    gained: float | None
    """How much less the whole model loses where this entry alone is kept float; None where not measured.
    Negative where its error cancels another one's."""

    float_bytes: int
    bytes: int
    """Its bytes in the float model's files and in the quantized model's; 0 for activations."""


@dataclass(frozen=True)
class LossMap:
    """All entries, worst first, and the checks by which they may be believed."""

    model: str
    reference: str
    tasks: tuple[str, ...]
    by: str
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

    passes: float
    """Positions computed for the entries, in passes over all documents. Beside these the float model, the quantized one
    and all weights together take a pass each, and what is gained takes one for each certain entry."""

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
        sentences = [self.certainty, self.additivity, self.rest, *unpaired_sentences(self.unpaired)]
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

    def to_json(self) -> str:
        """The map as JSON: `entries` worst first, `total`, `sum` and the facts."""
        return to_json(self)


def show(loss_map: LossMap) -> None:
    """The largest entries and the sentences, on stdout."""
    print_cells(table(loss_map, MOST_ROWS))
    hidden = len(loss_map.entries) - MOST_ROWS
    print_lines([f"and {counted(hidden, 'smaller one')}"] if hidden > 0 else [])
    print_lines(loss_map.sentences)


def to_markdown(loss_map: LossMap) -> str:
    """All entries as a table, and the sentences."""
    return markdown_page(loss_map.sentences, table(loss_map))


def table(loss_map: LossMap, most: int | None = None) -> Table:
    """The `most` largest entries, or all."""
    title = f"Where {loss_map.model} loses, against {loss_map.reference}"
    return Table(title, HEADS, [row(entry, loss_map) for entry in loss_map.entries[:most]], HEADS[:1])


HEADS = (
    "quantized alone",
    "KL, nats",
    "95 % interval",
    "share of the sum",
    "among the largest",
    "bytes",
    "kept float gains",
)


def interval(entry: Entry | Estimate) -> str:
    """The 95 % interval as words; a divergence is not below 0."""
    mean, low = (entry.kl if isinstance(entry, Entry) else entry.mean), numbers.nats(max(0.0, entry.low))
    return f"{low} to {numbers.nats(entry.high)}" if entry.high <= SAYS_NOTHING * mean else f"from {low} on"


def row(entry: Entry, loss_map: LossMap) -> tuple[str, ...]:
    """The entry's cells in a table."""
    share = entry.kl / loss_map.sum.mean if loss_map.sum.mean > 0 else 0.0
    return (
        entry.name,
        numbers.nats(entry.kl),
        interval(entry),
        f"{100 * share:.0f} %",
        "certainly" if entry.is_certain else "",
        numbers.size(entry.bytes),
        "" if entry.gained is None else numbers.signed_minus(numbers.nats(entry.gained)),
    )


def unpaired_sentences(unpaired: dict[str, str]) -> Sequence[str]:
    """The nodes without a counterpart in the float model, in at most one sentence."""
    if not unpaired:
        return ()
    name, why = next(iter(unpaired.items()))
    return (f"Not compared: '{name}' ({why}){_and_others(unpaired)}.",)


def _and_others(named: dict[str, str]) -> str:
    return f", and {counted(len(named) - 1, 'other')}" if len(named) > 1 else ""


def heat(loss_map: LossMap) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Kinds, and for each layer (and what is outside of the layers) the entries by kind."""
    inside = [entry for entry in loss_map.entries if entry.layer is not None]
    kinds = list(dict.fromkeys(entry.kind for entry in inside))
    layers = sorted({entry.layer for entry in inside if entry.layer is not None})
    return kinds, [(str(n), {e.kind: e for e in inside if e.layer == n}) for n in layers]


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
    texts = {FILE_NAME: loss_map.to_json(), TABLE_NAME: to_markdown(loss_map), PAGE_NAME: to_html(loss_map)}
    paths = {Path(folder) / name: text for name, text in texts.items()}
    write_texts(paths, Path(folder), "the loss map")
    return tuple(paths)


def to_html(loss_map: LossMap) -> str:
    """The page: the sentences, a heat map of layers by kinds, and all entries."""
    kinds, layers = heat(loss_map)
    largest = max((entry.kl for entry in loss_map.entries), default=0.0)
    return filled(
        "loss_map.html.j2",
        TEMPLATES,
        map=loss_map,
        kinds=kinds,
        layers=layers,
        outside=[entry for entry in loss_map.entries if entry.layer is None] if layers else (),
        shade=lambda entry: _shade(entry, largest),
        interval=interval,
        nats=numbers.nats,
        count=numbers.count,
        heads=HEADS,
        rows=[row(entry, loss_map) for entry in loss_map.entries],
    )


def _shade(entry: Entry, largest: float) -> int:
    """Per cent, over three powers of ten below the largest loss: one hue, so that lightness alone shows it."""
    if entry.kl <= 0 or largest <= 0:
        return 0
    return round(MOST_SHADE * max(0.0, 1 + math.log10(entry.kl / largest) / 3))
