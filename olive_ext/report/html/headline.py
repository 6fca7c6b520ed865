"""The first thing on the page: for each candidate what was found, and the few numbers that a reader looks for first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from olive_ext.report.comparison import ALL
from olive_ext.report.html import numbers as numbers
from olive_ext.report.html.scores import Z95
from olive_ext.report.page import Column, Contrast, Page
from olive_ext.report.verdict import Kind, headline, overall, verdict

_TONES: dict[Kind, str] = {"loss": "loss", "gain": "gain", "no_loss_found": "unclear", "nothing_compared": "plain"}


@dataclass(frozen=True)
class Tile:
    """A number with its name; `note` is set smaller."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Lead:
    """What is said of one model; `tone` is the CSS class."""

    name: str
    against: str
    basis: str
    """How much was compared."""

    tone: str
    sentence: str
    tiles: tuple[Tile, ...]


def leads(page: Page) -> list[Lead]:
    """One for each comparison; of a page without any one that says what was measured."""
    columns = {column.name: column for column in page.columns}
    found = [_lead(contrast, columns.get(contrast.candidate)) for contrast in page.contrasts]
    return found or [_scores_only(page)]


def _lead(contrast: Contrast, column: Column | None) -> Lead:
    said = verdict(contrast.comparison)
    sentence = said.line.partition(": ")[0]
    tiles = (*_tiles(contrast), *_costs(column))
    sentence = re.sub(r"-(?=\d)(?<!\w-)", numbers.MINUS, f"{sentence[:1].upper()}{sentence[1:]}")
    return Lead(contrast.candidate, contrast.reference, _basis(contrast), _TONES[said.kind], sentence, tiles)


def _basis(contrast: Contrast) -> str:
    documents = {item.task: item.num_documents for item in contrast.comparison.outcomes if item.task != ALL}
    for item in contrast.comparison.divergences:
        if item.task != ALL:
            documents.setdefault(item.task, item.num_documents)
    total = numbers.count(sum(documents.values()))
    parts = [f"{total} documents of {len(documents)} task{'s' * (len(documents) != 1)}"]
    whole = overall(contrast.comparison)
    if whole is not None:
        parts.append(f"{numbers.count(whole.num_positions)} token positions")
    if contrast.note:
        parts.append(contrast.note)
    return ", ".join(parts)


def _tiles(contrast: Contrast) -> Iterator[Tile]:
    outcome, whole = headline(contrast.comparison), overall(contrast.comparison)
    if outcome is not None and max(abs(outcome.reference), abs(outcome.candidate)) <= 1:
        half = (outcome.high - outcome.low) / 2 / Z95
        low, high = numbers.points(outcome.low, half), numbers.points(outcome.high, half)
        tasks = {item.task for item in contrast.comparison.outcomes} - {ALL}
        name = "Accuracy" if outcome.task == ALL or len(tasks) == 1 else f"{outcome.task} {outcome.metric}"
        yield Tile(f"{name}, points", numbers.points(outcome.difference, half), f"{low} to {high}")
    lost = sum(flip.direction == "right_to_wrong" for flip in contrast.comparison.flips)
    if any(item.is_binary for item in contrast.comparison.outcomes):
        yield Tile("Flips, lost / won", f"{lost} / {len(contrast.comparison.flips) - lost}")
    if whole is None:
        return
    mean, stderr = numbers.nats_with_error(whole.kl.mean, whole.kl.stderr)
    yield Tile("Mean KL, nats", mean, f"± {stderr}" if stderr else "")
    yield Tile("Same top token", numbers.percent(whole.top1_agreement, whole.top1_agreement_stderr))
    ratio, error = numbers.with_error(whole.perplexity_ratio, whole.perplexity_ratio_stderr)
    yield Tile("Perplexity ratio", ratio, f"± {error}" if error else "")


def _costs(column: Column | None) -> Iterator[Tile]:
    for metric in column.metrics if column is not None else ():
        if metric.task == "size_on_disk":
            yield Tile("Size on disk", numbers.size(metric.value))


def _scores_only(page: Page) -> Lead:
    tasks = dict.fromkeys(metric.task for column in page.columns for metric in column.metrics if metric.n is not None)
    measured = f"{len(tasks)} task{'s' * (len(tasks) != 1)}" if tasks else "No task"
    models = f" on {len(page.columns)} models" if len(page.columns) > 1 else ""
    why = "without per-document logs of both nothing says which answers changed" if models else "without a reference"
    tiles = tuple(_costs(page.columns[0])) if len(page.columns) == 1 else ()
    return Lead(page.columns[0].name, "", "Scores only", "plain", f"{measured}{models}, {why}", tiles)
