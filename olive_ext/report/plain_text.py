"""Reports as plain text: the one table of a page, and the one of a chain of passes, as cells; tables and verdicts on a
terminal, reports and chains as GitHub markdown, scores as YAML for the Hugging Face Hub. Knows where cells stand, not
how they are made."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from olive_ext.errors import counted, printable
from olive_ext.report import view
from olive_ext.report.changes import OVER_ALL, difference_texts, perplexity_change
from olive_ext.report.comparison import ALL
from olive_ext.report.metrics import COMPARISON_NAMES, Metric, non_finite_requests
from olive_ext.report.numbers import count_of, fact, joined, nats_with_error, number, percent
from olive_ext.report.page import COMPARISON, Page, joined_passes, page_of
from olive_ext.report.report import Report
from olive_ext.report.view import COSTS, SIGNS, WORDS, changed_documents, cost_rows, with_filter

_CHAIN_COSTS = ("size_on_disk", "tokens_per_second", "peak_memory")
_CHAIN_DISTANCES = ("kl_mean", "top1_agreement", "perplexity_ratio")
"""Columns of a chain that stand before its tasks' columns; the distances are over all tasks."""

_KL, _REVERSE, _TOP, _TEXT = "mean KL, nats ↓", "reverse KL, nats ↓", "same top token ↑", "perplexity, change ↓"


@dataclass(frozen=True)
class Table:
    """Cells by row, in the order of `heads`; columns in `texts` hold words, the others numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[str]


def page_table(page: Page, *, is_short: bool = False) -> Table:
    """A row for each paired difference, score, distance and cost, and a column for each model. A short table has no
    distances of single tasks except changes of their perplexity, no reverse KL, and no parts of costs."""
    heads = ("task", "metric", "n", *(column.name for column in page.columns))
    distances, costs = [*_distances(page)], cost_rows(page.columns)
    if is_short:
        kept = {(distances[0][0], _KL), (distances[0][0], _TOP)} if distances else set()
        distances = [row for row in distances if row[1] == _TEXT or (row[0], row[1]) in kept]
        costs = [row for row in costs if not row[0].startswith(("of which", "Tokens computed"))]
    rows = [*_differences(page), *_scores(page), *distances, *_counts(page)]
    rows += [("", name, "", *cells) for name, cells in costs]
    return Table(page.title, heads, rows, heads[:2])


def _scores(page: Page) -> Iterator[Sequence[str]]:
    for row in view.scores(page.columns):
        first, baseline = view.known(row)[0], row[0][0]
        changes = [view.change(metric, baseline, page.compared) for metric, _ in row]
        values = [str(view.shown(metric)) for metric, _ in row]
        cells = [f"{value} ({change})" if change else value for value, change in zip(values, changes, strict=True)]
        metric = f"{with_filter(first.metric, first.filter)} {view.ARROWS[first.higher_is_better]}"
        yield first.task, metric.rstrip(), view.score_documents(row), *cells


def _differences(page: Page) -> Iterator[Sequence[str]]:
    for group in view.differences(page.compared):
        cells, first = {}, group[0][1]
        for candidate, outcome, _ in group:
            shown, interval = difference_texts(outcome)
            unit = f"\N{NO-BREAK SPACE}{outcome.unit_name}"
            flips = f"lost {outcome.right_to_wrong}, won {outcome.wrong_to_right}" if outcome.is_binary else ""
            p = view.flips_p(outcome)
            parts = [f"{SIGNS[view.tone(outcome)]} {shown}{unit} ({interval})", flips, f"p {p}" if p else ""]
            cells[candidate] = ", ".join(filter(None, parts))
        metric = f"{with_filter(first.metric, first.filter)}, difference (95 %)"
        texts = (cells.get(item.name, "") for item in page.columns)
        outcomes = sorted((outcome for _, outcome, _ in group), key=lambda outcome: outcome.num_documents)
        counts = dict.fromkeys(count_of(item.num_documents, item.num_population) for item in outcomes)
        yield view.task_title(first.task), metric, "/".join(counts), *texts


def _distances(page: Page) -> Iterator[Sequence[str]]:
    for group in view.divergences(page.compared):
        task = view.task_title(group[0][1].task)
        lines: dict[str, dict[str, str]] = {line: {} for line in (_KL, _REVERSE, _TOP, _TEXT)}
        for name, item in group:
            about = f" ({estimate})" if (estimate := view.estimate(item)) else ""
            lines[_KL][name] = f"{nats_with_error(item.kl.mean, item.kl.stderr)}{about}"
            if item.kl_reverse is not None:
                lines[_REVERSE][name] = str(nats_with_error(item.kl_reverse, item.kl_reverse_stderr))
            lines[_TOP][name] = percent(item.top1_agreement, item.top1_agreement_stderr)
            if item.is_text:
                lines[_TEXT][name] = f"{SIGNS[view.tone(item)]} {perplexity_change(item)}"
        for line, cells in lines.items():
            if cells:
                yield task, line, "", *(cells.get(column.name, "") for column in page.columns)


def _counts(page: Page) -> Iterator[Sequence[str]]:
    compared = COMPARISON_NAMES if page.compared else ()
    metrics = [
        {(item.task, item.metric): item for item in column.metrics if item.n is None and item.metric not in compared}
        for column in page.columns
    ]
    for key in dict.fromkeys(key for own in metrics for key in own if not {*key} & COSTS.keys()):
        cells = (number(own[key].value) if key in own else "" for own in metrics)
        yield *key, "", *cells


@dataclass(frozen=True)
class ChainStep:
    """A model of a chain of passes: its name, and what was measured of it by column."""

    name: str
    values: dict[str, float]
    documents: dict[str, str] = field(default_factory=dict)
    """For columns of drawn documents, how many of how many they are."""


def chain_steps(reports: Sequence[Report]) -> list[ChainStep]:
    """A step for each report, in order: size in bytes, tokens per second, distances to the reference, and each task's
    first metric. What a report does not have is left out."""
    steps = []
    for report in reports:
        name = joined_passes(report, " -> ") or str(report.model.get("path", "model"))
        columns = dict(_chain_metrics(report))
        drawn = {column: metric.documents for column, metric in columns.items() if metric.num_population is not None}
        steps.append(ChainStep(name, {column: metric.value for column, metric in columns.items()}, drawn))
    return steps


def _chain_metrics(report: Report) -> Iterator[tuple[str, Metric]]:
    first: dict[str, Metric] = {}
    for metric in report.metrics:
        if metric.metric in _CHAIN_DISTANCES and metric.task == ALL:
            yield metric.metric, metric
        elif metric.task in _CHAIN_COSTS:
            if metric.task != "tokens_per_second" or metric.value > 0:  # a baseline counts no tokens
                yield metric.task, metric
        elif metric.task not in (ALL, "requests_per_second") and metric.metric not in COMPARISON_NAMES:
            first.setdefault(metric.task, metric)
    yield from ((f"{metric.task} {metric.metric}", metric) for metric in first.values())


def chain_table(steps: Sequence[ChainStep]) -> Table:
    """A row for each step; the columns that some step has: costs first, then distances, then tasks as they come."""
    seen = dict.fromkeys(name for step in steps for name in step.values)
    known = [name for name in (*_CHAIN_COSTS, *_CHAIN_DISTANCES) if name in seen]
    columns = [*known, *(name for name in seen if name not in known)]
    rows = [[step.name, *(_chain_cell(name, step) for name in columns)] for step in steps]
    return Table("The chain, step by step", ["step", *columns], rows, ("step",))


def _chain_cell(column: str, step: ChainStep) -> str:
    value = step.values.get(column)
    if value is None:
        return ""
    if column == "size_on_disk" and math.isfinite(value):
        return f"{value / 1e6:,.2f} MB"
    shown = f"{value:,.0f}" if column == "tokens_per_second" and math.isfinite(value) else number(value)
    return f"{shown} ({step.documents[column]})" if column in step.documents else shown


_MOST_EVIDENCE = 4
_NO_WRAP = 10_000
"""Width in characters, for a file or a pipe, which has none: 80 would fold cells."""


def print_cells(table: Table, file: TextIO | None = None) -> None:
    """Prints the table, and never cuts a cell; to stdout where no file is given, as all functions here."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text  # a plain string would be read as markup: "[a]" would vanish

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _NO_WRAP
    shown = rich_table.Table(title=Text(printable(table.title), style="table.title"), title_justify="left")
    for head in table.heads:
        shown.add_column(Text(printable(head)), justify="left" if head in table.texts else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console.print(shown)


def print_table(
    report: Report, page: Path | None = None, file: TextIO | None = None, wording: Callable[[str], str] = str
) -> None:
    """Prints the table of one evaluation, how its models were run, the verdict, and where its `page` is, which has all
    rows. `wording` gives the verdict's lines another form."""
    print_page(page_of(report), _notes(report), file, wording, is_short=page is not None)
    lines = [f"bound broken: {item.words}" for item in report.broken if report.comparison is None]
    print_lines([*lines, *report.unjudged_damage, *([] if page is None else [f"page: {page}"])], file)


def print_page(
    page: Page,
    notes: Iterable[str] = (),
    file: TextIO | None = None,
    wording: Callable[[str], str] = str,
    *,
    is_short: bool = False,
) -> None:
    """Prints the headline on each candidate, the table of all models, `notes`, and the whole verdicts."""
    lines = [wording(line) for line in verdict_lines(page)]
    print_lines([line for line in lines if not line.startswith("  ")], file)
    print_cells(page_table(page, is_short=is_short), file)
    if page.compared:
        kinds = f"{SIGNS['loss']} loss, {SIGNS['gain']} gain: the paired 95 % interval excludes zero"
        print_lines([f"{kinds}; {SIGNS['unclear']} {WORDS['unclear']}; {OVER_ALL}"], file)
    print_lines([*notes, *lines], file)


def print_verdicts(reports: Sequence[tuple[Report, Path | None]]) -> None:
    """Prints the verdict on each model that was compared, and its page; only the pages where none was. For more than
    `_MOST_EVIDENCE` models, only the headlines."""
    compared = [item for item in reports if item[0].comparison is not None]
    for report, page in compared or reports:
        lines = list(verdict_lines(page_of(report)))
        lines = lines if len(compared) <= _MOST_EVIDENCE else lines[:1]
        print_lines([*lines, *([] if page is None else [f"page: {page}"])])


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Prints lines as they are, but for control characters."""
    for line in lines:
        (file or sys.stdout).write(f"{printable(line)}\n")


def verdict_lines(page: Page) -> Iterator[str]:
    """The verdict on each candidate, and below it its evidence; of earlier reports the documents that changed, too."""
    for models in page.compared:
        headline, *evidence = models.verdict.lines
        yield f"{models.candidate}: {headline}"
        changed = changed_documents(models) if page.kind == COMPARISON else ()
        yield from (f"  {text}" for text in [*evidence, models.note, *changed] if text)


def _notes(report: Report) -> Iterator[str]:
    if names := ", ".join(str(provider.get("name", provider)) for provider in report.providers):
        yield f"providers: {names}"
    reference = report.comparison.reference if report.comparison is not None else {}
    for name, facts in (("the model", report.model), ("the reference", reference)):
        if facts.get("export"):
            yield f"{name} {facts['export']}"
    if earlier := (report.model.get("journal") or {}).get("answers_used"):
        yield f"answers to {counted(earlier, 'request')} are from an earlier run"


_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""Markup of GitHub's markdown within a line, with addresses of pages, which become links by themselves.
Between letters and digits `_` is none."""

_REFERENCE = re.compile(r"(?<=@)(?=\w)|(?<=#)(?=\d)|(?<=GH-)(?=\d)", re.IGNORECASE)
"""Where a mail address, a name or an issue becomes a link on GitHub, escaped or not; an empty comment splits it."""


_ESCAPED = re.compile(r"<!-- -->|\\(.)")


def to_markdown(report: Report) -> str:
    """The report as GitHub markdown: the verdict and the table first, then model, providers, engine and versions."""
    page = page_of(report)
    table = page_table(page)
    heads = ("name", "device", "options", "origin")
    providers = [[fact(provider.get(head, "")) for head in heads] for provider in report.providers]
    judged = [models.verdict for models in page.compared]
    parts = [
        f"# Evaluation of {literal(page.title)}",
        f"Created {literal(report.created)}." if report.created else "",
        *(f"**{_with_code(item.headline[:1].upper() + item.headline[1:])}.**" for item in judged),
        *(f"- {_with_code(text)}" for item in judged for text in item.evidence),
        *(f"Next: {_with_code(item.next_step)}." for item in judged if item.next_step),
        *(f"**Bound broken: {literal(item.words)}.**" for item in report.broken if not judged),
        *(literal(item) for item in report.unjudged_damage),
        markdown_table(table.heads, table.rows),
        _facts("Model", report.model),
        f"## Providers\n\n{markdown_table(heads, providers)}" if providers else "",
        _facts("Engine", report.engine),
        _facts("Versions", report.versions),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_eval_results(report: Report) -> str:
    """The YAML of `.eval_results` on the Hugging Face Hub: the first metric of each task over a dataset there. Empty
    without one, and where answers are missing or are no numbers.

    Of the tasks of a group that stands there, the group alone does. `task_id` should be an id of the dataset's
    eval.yaml: here it is the name of the dataset's configuration, if that has one of its own and one task alone, else
    lm-eval's name of the task.
    """
    configs, groups = report.results.get("configs", {}), report.results.get("group_subtasks", {})
    entries: dict[str, dict[str, Any]] = {}
    members: set[str] = set()
    is_whole = not report.missing and not non_finite_requests(report.metrics)
    for item in report.metrics if is_whole else ():
        leaves = [item.task]
        for name in leaves:  # grows by the members of groups
            leaves += [one for one in groups.get(name, ()) if one not in leaves]
        of_leaves = [configs[name] for name in leaves if name in configs]
        datasets, config = {str(leaf.get("dataset_path")) for leaf in of_leaves}, (of_leaves or [{}])[0]
        dataset, part = str(config.get("dataset_path")), config.get("dataset_name")
        is_on_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset) and not Path(dataset).exists()
        is_of_it = len(datasets) == 1 and item.n is not None and math.isfinite(item.value)
        if is_on_hub and is_of_it and item.task not in entries:
            is_part = part not in (None, "", "main", "default") and item.task in configs and isinstance(part, str)
            scored = item.metric if item.filter == "none" else f"{item.metric} ({item.filter})"
            shots = [f"{number}-" for number in sorted({one.get("num_fewshot") or 0 for one in of_leaves})]
            notes = f"{scored}, {joined(shots)}shot, {item.documents} documents"
            of_dataset = {"id": dataset, "task_id": part if is_part else item.task}
            entries[item.task] = {"dataset": of_dataset, "value": item.value, "date": report.created, "notes": notes}
            members.update(leaves[1:])
    kept = {name: entry for name, entry in entries.items() if name not in members}
    ids = [entry["dataset"] for entry in kept.values()]
    for name, entry in kept.items():
        if ids.count(entry["dataset"]) > 1:  # of one file with the same id, the Hub shows one
            entry["dataset"] = {**entry["dataset"], "task_id": name}
    return yaml.safe_dump([*kept.values()], sort_keys=False) if kept else ""


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """GitHub markdown of a table; cells may hold any text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(literal, line))} |" for line in lines)


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    cells = [(str(key), fact(value)) for key, value in facts.items()]
    return f"## {title}\n\n{markdown_table(('', ''), cells)}" if cells else ""


def literal(text: str) -> str:
    """Markdown of one line that shows exactly `text`: names and answers come from others, who could put links, pictures
    and HTML into them. Control characters are replaced, as on a terminal."""
    return _REFERENCE.sub("<!-- -->", _MARKUP.sub(r"\\\g<0>", " ".join(printable(text).split())))


def _with_code(text: str) -> str:
    """As `literal`, but what stands between two backticks is code."""
    return re.sub(r"\\`(.+?)\\`", lambda code: "`" + _ESCAPED.sub(r"\1", code[1]) + "`", literal(text))


def markdown_page(sentences: Iterable[str], *tables: Table) -> str:
    """A page titled as its first table: the sentences, and the tables."""
    texts = (markdown_table(table.heads, table.rows) for table in tables)
    return "\n\n".join([f"# {literal(tables[0].title)}", *map(literal, sentences), *texts]) + "\n"
