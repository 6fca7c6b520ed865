"""Compares earlier reports: reads them and pairs the documents that both models have answered. Runs no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.config import LossBound
from olive_ext.errors import ConfigError, ContradictionError, NotComparableError, TaskError, listed
from olive_ext.report import Report, from_json
from olive_ext.report.comparison import LEAST_ANSWERS, VARIANT, Comparison
from olive_ext.report.metrics import COMPARISON_NAMES, comparison_metrics, non_finite_requests
from olive_ext.report.numbers import joined
from olive_ext.report.page import COMPARISON, PASSES, ComparedModels, Page, check_comparable, column_of, model_name
from olive_ext.report.report_files import report_number
from olive_ext.report.verdict import BANDS
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.model_facts import damage_of, stops_of
from olive_ext.run.reference.answers import Answers, Sample, unpacked
from olive_ext.run.reference.pairing import compare_answers, compare_texts
from olive_ext.run.sample_logs import read_logs

REPORT_FILE = "report.json"
_MOST_IN_TITLE = 4


@dataclass(frozen=True)
class Named:
    """A report, its name in the table, and its folder."""

    name: str
    report: Report
    folder: Path

    @property
    def matters(self) -> float:
        """The loss that matters, as the evaluation had it."""
        return float(self.report.config.get("matters", Comparison.matters))

    @property
    def answers(self) -> list[Answers]:
        """The value of each document's answer; empty for reports of versions that kept none."""
        try:
            return unpacked(self.report.answers)
        except ValueError as error:
            raise ConfigError(
                f"the report in '{self.folder}' is no report of olive-ext: {error}", code="damaged"
            ) from error

    @cached_property
    def logs(self) -> tuple[list[Answers], dict[str, list[Sample]]]:
        """The same with the texts of sample logs. Raises `ConfigError` for those of another run."""
        return read_logs(self.folder, self.answers)


def compare(given: Sequence[str], baseline: str | None = None) -> Page:
    """One page over the reports at `given`: folders with a report.json, folders of such folders, or the files.

    NAME=PATH gives a report its name. The first is the baseline, or the one whose name or path `baseline` is. Paired
    differences and flips come from the answers in both, their texts from sample logs; where a report holds a comparison
    with a reference, its divergences are kept. Raises `ConfigError` for reports that cannot be read or compared.
    """
    reports = _baseline_first(load(given), baseline)
    if len(reports) < 2:
        raise NotComparableError(f"'{given[0]}' holds one report: give two or more")
    _refuse_strangers(reports)
    check_comparable([(item.name, item.report) for item in reports])
    columns = tuple(column_of(item.name, item.report) for item in reports)
    first, *others = reports
    created = max(item.report.created for item in reports)
    names = [item.name for item in others]
    candidates = joined(names) if len(names) <= _MOST_IN_TITLE else f"{len(names)} models"
    return Page(f"{candidates} against {first.name}", columns, tuple(_compared(first, others)), created, COMPARISON)


def load(words: Sequence[str]) -> list[Named]:
    """The reports in the order given; those of a folder of folders in the order they were made."""
    reports = [each for text in words for each in _reports(text)]
    names = [model_name(report) for _, _, report in reports if PASSES in report.model]
    if len(set(names)) < len(reports):  # else a chain's passes, whose folders by Olive are digests
        names = _short_names([place.resolve().parts for _, place, _ in reports])
    lines = zip(reports, names, strict=True)
    named = [
        Named(given_name or name, report, place if place.is_dir() else place.parent)
        for (given_name, place, report), name in lines
    ]
    twice = [item.name for item in named if sum(other.name == item.name for other in named) > 1]
    if twice:
        raise ContradictionError(f"two reports are named '{twice[0]}': give others with NAME=PATH")
    return named


def _short_names(paths: Sequence[Sequence[str]]) -> list[str]:
    """A name for each report from the parts of its folder's path: the last, or as many as make it unique."""
    for count in range(1, max((len(parts) for parts in paths), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts)} ({rank})" for rank, parts in enumerate(paths, 1)]


def _reports(text: str) -> list[tuple[str, Path, Report]]:
    """Each report that one argument means, with its name (empty where none is given) and its place: its folder, or its
    file without the suffix."""
    name, separator, given = text.partition("=")
    if not separator or Path(text).exists():
        name, given = "", text
    path = Path(given)
    if path.is_file():
        return [(name, path.parent if path.name == REPORT_FILE else path.with_suffix(""), _read(path))]
    folders = [path] if (path / REPORT_FILE).is_file() else [file.parent for file in path.glob(f"*/{REPORT_FILE}")]
    if not folders:
        problem = f"give a folder with {REPORT_FILE}, or the file" if path.exists() else "no such file or folder"
        raise ConfigError(f"'{given}': {problem}", code="not_found")
    reports = sorted(((folder, _last_of(folder)) for folder in folders), key=lambda pair: (pair[1].created, pair[0]))
    is_one = len(reports) == 1 or not name
    return [(name if is_one else f"{name}/{folder.name}", folder, report) for folder, report in reports]


def is_report(path: Path) -> bool:
    """Whether a file is called as evaluations and passes call their reports."""
    return path.suffix == ".json" and report_number(path) is not None


def _last_of(folder: Path) -> Report:
    """The report of the model that lies in the folder. Of a workflow's output that is the last one: those before it are
    of models that later passes have changed."""
    reports = {file: _read(file) for file in folder.iterdir() if is_report(file)}
    last = max(reports, key=lambda file: (reports[file].created, report_number(file)))
    return reports[last]


def _read(file: Path) -> Report:
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read '{file}': {error.strerror or error}", code="no_access") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"'{file}' is no report of olive-ext: {error}", code="damaged") from error


def _baseline_first(reports: list[Named], baseline: str | None) -> list[Named]:
    if baseline is None:
        return reports
    path = Path(baseline).resolve()
    for index, item in enumerate(reports):
        if item.name == baseline or path in (item.folder.resolve(), item.folder.resolve() / REPORT_FILE):
            return [item, *reports[:index], *reports[index + 1 :]]
    names = ", ".join(f"'{item.name}'" for item in reports)
    raise ConfigError(f"give one of {names}", "--baseline", baseline)


def _refuse_strangers(reports: Sequence[Named]) -> None:
    """Raises `ConfigError` for a report that has none of the baseline's tasks: nothing can be compared."""
    scored = ((one.name, [item for item in one.report.metrics if item.n is not None]) for one in reports)
    (first, asked), *others = (
        (name, dict.fromkeys(item.task for item in own if item.metric not in COMPARISON_NAMES)) for name, own in scored
    )
    for name, own in others:
        if (asked or own) and not asked.keys() & own.keys():
            both = "; ".join(", ".join(tasks) or "none" for tasks in (asked, own))
            raise NotComparableError(f"cannot compare '{first}' and '{name}': they have no task in common ({both})")


def _compared(first: Named, others: Sequence[Named]) -> Iterator[ComparedModels]:
    """The comparison of each report with the first, where there is any; `is_same` where its own reference was that."""
    model = first.report.model
    facts = {key: model[key] for key in ("path", "kind", "content_hash") if key in model}
    for item in others:
        own, paired, notes = item.report.comparison or Comparison({}), _paired(first, item), []
        kept: dict[str, Any] = {name: getattr(own, name) for name in ("divergences", "over_all")}
        kept["damaged"] = {**damage_of(model, item.report.model), **paired.damaged, **own.damaged}
        if is_same := _is_model(own.reference, model):
            kept |= {name: getattr(own, name) for name in ("asked", "reach", "contexts", "changed_answers")}
            kept |= {} if paired.outcomes else {name: getattr(own, name) for name in ("outcomes", "flips", "lengths")}
            kept |= {"texts": ()} if own.divergences else {}
        comparison = replace(paired, reference=facts, **kept)
        if own.divergences and not is_same:
            rows = ", as 'perplexity, change'," * any(one.is_text for one in own.divergences)
            theirs = own.reference.get("path", "its own reference")
            notes.append(f"divergence{rows} is from {theirs}, not from {first.name}")
        asked = {*item.report.results.get("n-samples", {})}
        if lacking := [task for task in first.report.results.get("n-samples", {}) if task not in asked]:
            notes.append(f"without {listed(lacking)}, which {first.name} alone has")
        if not (is_same or comparison.is_same_content):
            notes.append("the models' files were not compared, as an evaluation with a reference does")
        if own.certainty is not None:
            notes.append("of the drawn documents alone, which do not stand for all alike")
        if not first.matters == item.matters == Comparison.matters:
            notes.append(f"a loss of {item.matters:g} pt or % matters, as in the evaluation of {item.name}")
        if comparison.metrics["configs"]:
            models = ComparedModels(item.name, first.name, comparison, "; ".join(notes), is_of_another=not is_same)
            loss, judged = item.report.config.get("fail_on_loss"), models.for_verdict
            bounds = [LossBound.of(float(loss))] if loss and own.certainty is None else []
            broken = tuple(broken_bounds(bounds, comparison_metrics(judged), judged))
            yield replace(models, broken=broken, is_of_reports=True)


def _is_model(reference: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the facts of a reference are a model's: by content where both are known, else by path and variant."""
    content = reference.get("content_hash") or (reference.get("facts") or {}).get("model")
    if content and model.get("content_hash"):
        return bool(content == model["content_hash"])
    paths = [str(facts.get("path") or "") for facts in (reference, model)]
    variants = {facts[VARIANT] for facts in (reference, model) if facts.get(VARIANT)}
    return all(paths) and len(variants) < 2 and len({Path(path).resolve() for path in paths}) == 1


def _paired(first: Named, other: Named) -> Comparison:
    """The comparison of the documents that both have answered, with the results of the tasks that both have, and with
    the requests of either model, or of the other's reference, without an answer or a finite output."""
    theirs = {(item.task, item.filter): item for item in first.logs[0]}
    answers, samples = other.logs
    both = [item for item in answers if (item.task, item.filter) in theirs]
    pair = [theirs[item.task, item.filter] for item in both], both
    reports, own = (first.report, other.report), other.report.comparison or Comparison({})
    asked, configs = (report.results.get("configs", {}) for report in reports)
    models = [report.model for report in reports]
    comparison = Comparison(
        {},
        texts=tuple(compare_texts(*pair)),
        metrics={**other.report.results, "configs": {task: configs[task] for task in configs if task in asked}},
        missing=max(own.missing, sum(len(report.missing) for report in reports)),
        non_finite=max(own.non_finite, sum(non_finite_requests(report.metrics) for report in reports)),
        stops=stops_of(*models),
        matters=other.matters,
        is_same_content=models[0].get("content_hash", "") == models[1].get("content_hash"),
        damaged={} if own.divergences else other_choices(zip(*pair, strict=True)),
    )
    try:
        return compare_answers(comparison, *pair, samples)
    except TaskError as error:
        raise NotComparableError(f"cannot compare '{first.name}' and '{other.name}': {error}") from error


_ALIKE = 0.95
"""Correlation of two models' margins between the right choice and the best other one from which on they answer alike:
of the quickstart's 0.998 and more at 4 bits, 0.67 to 0.94 with two heads of one layer exchanged. Margins near 0 are
mostly rounding: only choices that are as far apart as with weights of 3 bits count."""

_WIDER = 1.5
"""How many times wider or narrower margins may be: of the quickstart's 0.98 to 1.00 at 4 bits. Logits times a factor
keep every answer, and have its margins."""


def other_choices(pairs: Iterable[tuple[Answers, Answers]]) -> dict[str, str]:
    """How far the second model's choices are from the first one's, by task, where it is another model. Where a task's
    answer key is wrong and both are right as often, this still shows the difference."""
    distances = {}
    for first, second in pairs:
        theirs, own = first.by_document, second.by_document
        both = [(theirs[number], own[number]) for number in own if number in theirs]
        known = [pair for pair in both if None not in (pair[0].margin, pair[1].margin)]
        if len(known) < LEAST_ANSWERS or not first.metrics:
            continue
        metric = next(iter(first.metrics))
        is_right = np.array([[item.values.get(metric) == 1 for item in pair] for pair in known]).T
        margins_2D = np.array([[item.margin for item in pair] for pair in known], np.float64).T.clip(-99, 99)
        margins_2D = np.where(is_right, margins_2D, -margins_2D)
        logs = [-np.logaddexp(0, sign * margins_2D) for sign in (-1, 1)]  # of the right choice, and of another
        nats = float(np.mean(sum(np.exp(log_2D[0]) * (log_2D[0] - log_2D[1]) for log_2D in logs)))
        with np.errstate(invalid="ignore", divide="ignore"):  # of margins that are all alike
            correlation, wider = np.corrcoef(margins_2D)[0, 1], np.divide(*margins_2D.std(axis=1)[::-1])
            is_wider = _WIDER < max(wider, 1 / wider) < np.inf
        if nats > BANDS[1].most_kl and not correlation >= _ALIKE:
            apart = f"are {nats:.2g} nats from the baseline's, and their margins correlate by {correlation:.2f}"
        elif is_wider:
            apart = f"have margins {wider:.2g} times as wide as the baseline's"
        else:
            continue
        distances[f"choices of {second.task}"] = f"{apart}: the model is another, whatever its accuracy"
    return distances
