"""A page of reports as one HTML file that needs nothing else; the only module with Jinja. Knows no model and no files.

For each candidate, the page opens with the verdict and the few numbers that a reader looks for first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from olive_ext.errors import counted
from olive_ext.report import changes, numbers, view
from olive_ext.report.changes import Figure
from olive_ext.report.comparison import Divergence
from olive_ext.report.diagnosis import Stage
from olive_ext.report.numbers import NO_VALUE, Bin
from olive_ext.report.page import Column, ComparedModels, Page, page_of
from olive_ext.report.report import Report
from olive_ext.report.verdict import Verdict
from olive_ext.report.view import cost_rows, costs_of, task_title

_TEMPLATES = Path(__file__).with_name("templates")
TONES: dict[str, str] = {
    "ok": "fine",
    "small_loss": "doubt",
    "unknown": "doubt",
    "loss": "loss",
    "cannot_tell": "loss",
    "asked": "loss",
    "place_unknown": "loss",
    "nothing_compared": "plain",
    "gain": "gain",
    "no_difference": "unclear",
    "place_same": "unclear",
}
"""CSS classes, which are colours."""

MARKERS = "●■▲◆▼✚"
"""Signs of the candidates in a chart, beside their colours."""


@dataclass(frozen=True)
class Lead:
    """The verdict on one model at the head of the page; `tone` is the CSS class."""

    name: str
    against: str
    basis: str
    """How much was compared."""

    tone: str
    sentence: str
    evidence: Sequence[str]
    """Further findings, a sentence each."""

    tiles: Sequence[Figure]
    stages: Sequence[tuple[str, float, str]] = ()
    """One bar: what each stage between the reference and the model moved, as its name, part in per cent and numbers."""

    next_step: str = ""


def to_html(report: Report) -> str:
    """The page of one evaluation."""
    return render(page_of(report))


def render(page: Page) -> str:
    """The page as HTML."""
    measured = [column for column in page.columns if cost_rows([column])]
    reports = {column.name: column.report for column in page.columns if column.report is not None}
    flip_head, flip_chunks = flip_data(page.compared)
    return filled(
        "page.html.j2",
        page=page,
        leads=[_lead(models, page.columns) for models in page.compared] or [_scores_only(page)],
        rows=view.scores(page.columns),
        differences=view.differences(page.compared),
        matters=page.compared[0].comparison.matters if page.compared else None,
        divergences=view.divergences(page.compared),
        charts=list(_charts(page)),
        legend=list(zip(MARKERS, (models.candidate for models in page.compared), strict=False)),
        flip_head=flip_head,
        flip_chunks=flip_chunks,
        cost_names=[column.name for column in measured],
        costs=cost_rows(measured),
        tasks=list(_task_rows(list(reports.values()))),
        setup=_fact_tables(list(reports.values())),
        names=list(reports),
        several=len(page.compared) > 1,
        view=view,
        numbers=numbers,
        changes=changes,
    )


def filled(template: str, *folders: Path, **values: Any) -> str:
    """A template of this room's, or of `folders`, which come first."""
    text: str = _environment(*folders).get_template(template).render(**values)
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates


@cache
def _environment(*folders: Path) -> Any:
    """Keeps the templates that it has compiled, which takes longer than to fill them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, _TEMPLATES]), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(count=numbers.count, moment=numbers.moment, nats=numbers.nats, breakable=_breakable)
    return environment


def _breakable(name: str) -> Any:
    """A task's or model's name that may be broken only after its joints."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_/.-])(?=\w)", r"\1<wbr>", str(escape(name))))


def _lead(models: ComparedModels, columns: Sequence[Column]) -> Lead:
    judged = models.verdict
    headline, *evidence = (_sentence(text) for text in (judged.headline, *judged.evidence))
    names = [(item.name.partition(" ")[0].isalpha(), item) for item in judged.figures]  # a task's name stays as it is
    tiles = [
        item._replace(name=f"{item.name[:1].upper()}{item.name[1:]}") if is_word else item for is_word, item in names
    ]
    tiles += _sizes(columns, models.candidate, models.reference)
    stages = list(_stage_parts(models.comparison.stages))
    lead = (models.candidate, models.reference, _basis(models), tone_of(judged), headline)
    return Lead(*lead, evidence, tiles, stages, judged.next_step)


def tone_of(judged: Verdict) -> str:
    """The class of a headline's code, else of its status."""
    return TONES.get(judged.code, TONES[judged.status])


def _stage_parts(stages: Sequence[Stage]) -> Iterator[tuple[str, float, str]]:
    """A part for each stage, by its share of their mean KL."""
    total = sum(stage.kl_mean for stage in stages)
    for stage in stages if math.isfinite(total) and total > 0 else ():
        mean = numbers.nats_with_error(stage.kl_mean, stage.kl_stderr)
        flips = f"flips lost / won {stage.right_to_wrong} / {stage.wrong_to_right}"
        agreement = f"same top token {numbers.percent(stage.top1_agreement, stage.top1_agreement_stderr)}"
        text = f"KL {mean.value} nats {mean.margin}".rstrip()
        yield stage.name, round(100 * stage.kl_mean / total, 2), f"{text}, {agreement}, {flips}"


def _sentence(text: str) -> str:
    text = re.sub(r"(?<=\d) (?=%|pt)", "\N{NO-BREAK SPACE}", f"{text[:1].upper()}{text[1:]}".replace("`", ""))
    return re.sub(r"-(?=\d)(?<!\w-)", numbers.MINUS, text)


def _basis(models: ComparedModels) -> str:
    comparison = models.comparison
    documents = comparison.documents()
    parts = [f"{numbers.count(sum(documents.values()))} documents of {counted(len(documents), 'task')}"]
    overall = comparison.overall_divergence()
    if overall is not None:
        parts.append(f"{numbers.count(overall.num_positions)} token positions")
    return ", ".join([*parts, *([models.note] if models.note else [])])


def _sizes(columns: Sequence[Column], candidate: str, reference: str = "") -> list[Figure]:
    known = {column.name: costs_of(column).get("size_on_disk") for column in columns}
    sizes = {name: numbers.size(size) for name, size in known.items() if size is not None}
    note = f"of {sizes[reference]}" if reference in sizes else ""
    return [Figure("Size on disk", sizes[candidate], note)] if candidate in sizes else []


def _scores_only(page: Page) -> Lead:
    tasks = dict.fromkeys(metric.task for column in page.columns for metric in column.metrics if metric.n is not None)
    measured = counted(len(tasks), "task") if tasks else "No task"
    models = f" on {len(page.columns)} models" if len(page.columns) > 1 else ""
    why = "without per-document logs of both nothing says which answers changed" if models else "without a reference"
    name, report = page.columns[0].name, page.columns[0].report
    tiles = [] if models else _sizes(page.columns, name)
    broken = [] if report is None else [f"Bound broken: {item.words}" for item in report.broken]
    sentence, *others = [*broken, f"{measured}{models}, {why}"]
    return Lead(name, "", "Scores only", "loss" if broken else "plain", sentence, others, tiles)


_DECADE = re.compile(r"1(0*|e.*)|0\.0*1")
"""Lower edges of the histogram's bins at which a row begins: a row holds a decade."""

_HISTOGRAM = "histogram"
_CHARTS = (
    ("How far apart", _HISTOGRAM, "% of positions, by their KL in nats"),
    ("Where in the text", "by_position", "mean KL in nats, by the number of tokens in front"),
    ("How far into the answer", "along_answer", "mean KL in nats along the reference's answer, by its tokens in front"),
    ("On which tokens", "by_class", "mean KL in nats, by what comes next"),
)
"""Captions of the charts, the fields of `Divergence` that they show, and the unit of each."""

Chart = tuple[str, str, list[tuple[str, list[tuple[float, str]]]]]
"""A caption; the unit, with what has no row; and rows: a label, and for each candidate the width of its bar in per cent
of the widest, and its number as a text."""


def _charts(page: Page) -> Iterator[tuple[str, list[Chart]]]:
    for group in view.divergences(page.compared):
        if len(group) == len(page.compared):
            divergences = [item for _, item in group]
            yield task_title(divergences[0].task), list(_kl_charts(divergences))


def _kl_charts(divergences: Sequence[Divergence]) -> Iterator[Chart]:
    """The charts of one task, in each the candidates of `divergences` in their order; those that all have bins for."""
    for caption, name, note in _CHARTS:
        bins: list[Sequence[Bin]] = [getattr(item, name) for item in divergences]
        if not all(bins):
            continue
        is_share = name == _HISTOGRAM
        shown: Callable[[float], str] = "{:.1f} %".format if is_share else numbers.nats
        values = [_decades(own) if is_share else {item.label: item.mean for item in own} for own in bins]
        labels = dict.fromkeys(label for own in values for label in own)
        rows = [(label, [own.get(label, 0.0 if is_share else None) for own in values]) for label in labels]
        while is_share and rows and not any(rows[-1][1]):
            rows.pop()
        absent = [label for label, row in rows if all(value is None for value in row)]
        widest = max((value for _, row in rows for value in row if value is not None), default=0.0) or 1.0
        bars = [(label, [_bar(one, widest, shown) for one in row]) for label, row in rows if label not in absent]
        yield caption, note + (f"; none of {numbers.joined(absent)}" if absent else ""), bars


def _bar(value: float | None, widest: float, shown: Callable[[float], str]) -> tuple[float, str]:
    return (0.0, NO_VALUE) if value is None else (round(100 * max(value, 0) / widest, 1), shown(value))


def _decades(bins: Sequence[Bin]) -> dict[str, float | None]:
    total = sum(item.count for item in bins) or 1
    shares: dict[str, float | None] = {}
    label = ""
    for item in bins:
        if not label or _DECADE.fullmatch(item.label):
            label = f"from {item.label.replace('e-0', 'e-')}".replace("-", numbers.MINUS)
        shares[label] = (shares.get(label) or 0.0) + 100 * item.count / total
    return shares


CHUNK = 500
"""Flips in one piece of JSON."""

MAX_CHARACTERS = 4000
"""The most characters of one text of a flip; the sample logs have longer texts as a whole."""

_PICTURE = "data:image/jpeg;base64,"
"""How a thumbnail begins: the page shows nothing from outside itself."""

FactRow = tuple[str, tuple[str, ...], bool]
"""Name of a fact, its value in each report, and whether the values differ."""


def _fact_tables(reports: Sequence[Report]) -> dict[str, list[FactRow]]:
    facts: dict[str, list[Mapping[str, Any]]] = {
        "Model": [report.model for report in reports],
        "Hardware": [_hardware(report.hardware) for report in reports],
        "Providers": [{str(item.get("name", "")): _provider(item) for item in report.providers} for report in reports],
        "Versions": [report.versions for report in reports],
        "Configuration": [report.config for report in reports],
        "Engine": [report.engine for report in reports],
    }
    tables: dict[str, list[FactRow]] = {}
    for title, flat in ((title, [*map(numbers.flat, own)]) for title, own in facts.items()):
        for name in dict.fromkeys(name for item in flat for name in item):
            values = tuple(item.get(name, NO_VALUE) for item in flat)
            tables.setdefault(title, []).append((name, values, len({*values}) > 1))
    return tables


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(facts)
    if isinstance(shown.get("memory_bytes"), int | float):
        shown["memory"] = numbers.size(shown.pop("memory_bytes"))
    return shown


def _provider(provider: Mapping[str, Any]) -> str:
    parts = [numbers.fact(provider[key]) for key in ("device", "options") if provider.get(key)]
    origin = provider.get("origin")
    return "; ".join([*parts, *([f"from {origin}"] if origin else [])]) or "in use"


def _task_rows(reports: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    """Name, kind, version, shots and documents of each task, from the first report that ran it."""
    first = {task: report.results for report in reversed(reports) for task in report.results.get("n-samples", {})}
    for task in dict.fromkeys(task for report in reports for task in report.results.get("n-samples", {})):
        results = first[task]
        effective, original = (results["n-samples"][task].get(key) for key in ("effective", "original"))
        documents = numbers.count(effective) if effective is not None else NO_VALUE
        if original not in (None, effective):
            documents = f"{documents} of {numbers.count(original)}"
        kind = str((results.get("configs", {}).get(task) or {}).get("output_type", NO_VALUE)).replace("_", " ")
        version, shots = (numbers.fact(results.get(key, {}).get(task)) for key in ("versions", "n-shot"))
        yield task, kind, version, shots, documents


def flip_data(compared: Sequence[ComparedModels]) -> tuple[str, list[str]]:
    """Every flip of the comparisons, one after the other, as JSON that is safe inside a `<script>` element:
    names of tasks and candidates with numbers of flips, and chunks of flips that a browser reads when needed. A flip's
    fields come in the order that page.js.j2 reads."""
    flips = [(pair, flip) for pair, models in enumerate(compared) for flip in models.comparison.flips]
    names = list(dict.fromkeys((flip.task, flip.metric, flip.filter) for _, flip in flips))
    indexes = {name: index for index, name in enumerate(names)}
    rows = [
        [
            *(pair, indexes[flip.task, flip.metric, flip.filter]),
            *(flip.doc_id, int(flip.direction == "wrong_to_right")),
            *map(_cut, (flip.question, flip.target, flip.reference_answer, flip.candidate_answer)),
            [picture for picture in flip.pictures if picture.startswith(_PICTURE)],
        ]
        for pair, flip in flips
    ]
    head = {
        "tasks": [" · ".join(part for part in name if part not in ("", "none")) for name in names],
        "pairs": [[models.reference, models.candidate] for models in compared],
        "total": len(rows),
        "losses": sum(flip.direction == "right_to_wrong" for _, flip in flips),
        "chunk": CHUNK,
    }
    return _script_json(head), [_script_json(rows[begin : begin + CHUNK]) for begin in range(0, len(rows), CHUNK)]


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… [{len(text) - MAX_CHARACTERS} more characters]"


def _script_json(value: Any) -> str:
    """JSON in which nothing can end the `<script>` element or begin a comment, whatever the texts contain.

    Lone halves of surrogate pairs, which UTF-8 cannot hold, stay escaped.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
