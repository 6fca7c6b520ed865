"""Reports as plain text: tables and verdicts on a terminal, reports and chains as GitHub markdown, scores as YAML for
the Hugging Face Hub. Knows where cells stand, not how they are made."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from olive_ext.errors import counted, printable
from olive_ext.report.changes import OVER_ALL
from olive_ext.report.metrics import non_finite_requests
from olive_ext.report.numbers import fact, joined
from olive_ext.report.page import COMPARISON, Page, page_of
from olive_ext.report.report import Report
from olive_ext.report.tables import Table, page_table
from olive_ext.report.view import SIGNS, WORDS, changed_documents

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
    print_lines([*lines, *([] if page is None else [f"page: {page}"])], file)


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
    kept_results: dict[str, dict[str, Any]] = {}
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
        if is_on_hub and is_of_it and item.task not in kept_results:
            is_part = part not in (None, "", "main", "default") and item.task in configs and isinstance(part, str)
            scored = item.metric if item.filter == "none" else f"{item.metric} ({item.filter})"
            shots = [f"{number}-" for number in sorted({one.get("num_fewshot") or 0 for one in of_leaves})]
            notes = f"{scored}, {joined(shots)}shot, {item.documents} documents"
            of_dataset = {"id": dataset, "task_id": part if is_part else item.task}
            kept_results[item.task] = {
                "dataset": of_dataset,
                "value": item.value,
                "date": report.created,
                "notes": notes,
            }
            members.update(leaves[1:])
    entries = {name: one for name, one in kept_results.items() if name not in members}
    ids = [entry["dataset"] for entry in entries.values()]
    for name, one in entries.items():
        if ids.count(one["dataset"]) > 1:  # of one file with the same id, the Hub shows one
            one["dataset"] = {**one["dataset"], "task_id": name}
    return yaml.safe_dump([*entries.values()], sort_keys=False) if entries else ""


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
