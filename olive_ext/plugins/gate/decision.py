"""Compares an evaluation with a baseline: pairs the documents of both, and judges as every comparison does. Each
outcome becomes a bound with its decision and its figures. The result is for people and machines: lines, markdown, JUnit
XML, annotations of GitHub and Azure Pipelines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

from pydantic import ConfigDict, TypeAdapter

from olive_ext.config import RECIPE_SUFFIXES, EvaluationConfig
from olive_ext.errors import (
    ConfigError,
    ContradictionError,
    MissingError,
    NotComparableError,
    TaskError,
    counted,
    first_line,
    keys_once,
    listed,
    printable,
    special_kind,
)
from olive_ext.report import Metric, PackedAnswers, Report, to_json, write_texts
from olive_ext.report.changes import changes_of, deciding_changes, difference_texts
from olive_ext.report.comparison import ALL, TRIALS, Comparison, Outcome, Status
from olive_ext.report.metrics import LENGTHS, non_finite_requests
from olive_ext.report.next_step import next_step
from olive_ext.report.page import LONGEST_CONTEXT, TASK_HELPERS, TEMPLATE_DATE, check_comparable, model_name
from olive_ext.report.plain_text import literal
from olive_ext.report.report import validated
from olive_ext.report.verdict import EXIT_STATUS, LOST_TOO, Verdict, possible_loss, reason_of, verdict
from olive_ext.run import check_complete, evaluate
from olive_ext.run.earlier_reports import Named, is_report, load, other_choices
from olive_ext.run.model_facts import STOP_FACTS, UNJUDGED, damage_of, stops_of
from olive_ext.run.reference.answers import Answers, reads_all_columns, unpacked
from olive_ext.run.reference.pairing import compare_answers, compare_texts, without_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GateBound:
    """One metric of one task by one filter, or all answers together, with what was decided of it."""

    name: str
    status: Status
    text: str
    """The figures: difference, interval, documents, flips, p-value."""


def bounds_of(comparison: Comparison, found: Verdict) -> list[GateBound]:
    """Every outcome with its decision."""
    changes = changes_of(comparison)
    deciding, bounds = deciding_changes(changes), []
    for change in changes:
        status: Status = "ok"
        note = "" if change in deciding else "of first answers: the mean of all decides"
        if found.code == "cannot_tell":
            status, note = "unknown", found.headline
        elif change.is_lost:
            status = "loss" if change.may_lose(comparison.matters) else "small_loss"
            note = f"loss of less than {comparison.matters:g} {change.unit}" * (status == "small_loss")
        elif change.is_unclear:
            status, note = "unknown", "nothing says whether more is better (`higher_is_better`)"
        elif change in deciding and found.code != "no_difference" and change.may_lose(comparison.matters):
            status, note = "unknown", possible_loss(reason_of("too_few", change, -change.low, change.advice))
        text = f"perplexity {change.figure.value} ({change.figure.note})"
        name, figures = (change.name, text) if change.outcome is None else _named(change.outcome)
        bounds.append(GateBound(name, status, "; ".join(filter(None, [figures, note]))))
    return bounds


def _named(item: Outcome) -> tuple[str, str]:
    """ "arc_easy acc", "gsm8k exact_match (strict-match)", "accuracy over all tasks"; and its figures."""
    name = f"{item.metric} over all tasks"
    if item.task != ALL:
        name = f"{item.task} {item.metric}" + ("" if item.filter == "none" else f" ({item.filter})")
    shown, interval = difference_texts(item)
    percent, unit = (100, "") if item.is_share else (1, " %")
    text = f"{percent * item.reference:.4g} to {percent * item.candidate:.4g}, difference {shown}{unit} ({interval})"
    flips = f", flips {item.right_to_wrong} lost / {item.wrong_to_right} won, p {item.mcnemar_p:.3g}"
    return name, f"{text}, {counted(item.num_documents, 'document')}{flips if item.is_binary else ''}"


_DIRECTIONS = {True: "", False: " (less is better)", None: " (without `higher_is_better`)"}
_NO_FAULTS = Comparison({})


@dataclass(frozen=True)
class GateResult:
    """The gate's decision on an evaluation."""

    status: Status
    verdict: Verdict
    bounds: tuple[GateBound, ...]
    notes: tuple[str, ...] = ()
    """Sentences on what the numbers do not cover."""


def gate(run: str, file: str, within: float | None = None, *, update: bool = False) -> GateResult | Baseline:
    """The decision on the evaluation `run`, a report's folder or a file of settings, or with `update` the baseline that
    `file` now holds. Raises `ConfigError` for what cannot be paired.

    `within`: points of accuracy whose loss is too much; None takes the run's `matters`.
    """
    baseline = None if update else read_baseline(Path(file))
    given = _given(run, within)
    compared = given.report.comparison
    if compared is not None and compared.certainty is not None:
        raise NotComparableError(f"'{given.name}' has drawn documents alone: evaluate all ('documents': \"all\")")
    return _written(given, file) if baseline is None else gate_report(given, file, baseline, within)


def _given(run: str, within: float | None) -> Named:
    """The report in the folder or file `run`, or of the evaluation by the settings there."""
    path = Path(run)
    if is_report(path) or path.suffix.lower() not in RECIPE_SUFFIXES:
        if len(named := load([run])) != 1:
            raise ConfigError(f"'{run}' holds {len(named)} reports: give one")
        return named[0]
    from olive_ext.check import read_recipe

    values = dict(read_recipe(path))
    if bounds := {"require", "fail_on_loss"} & values.keys():
        raise ContradictionError("the gate holds a model to its baseline: `evaluate` holds it to bounds", min(bounds))
    if values.get("documents") == "enough":
        raise ContradictionError("a gate asks all documents: leave it out, or give a 'limit'", "documents", "enough")
    config = EvaluationConfig.of(values | ({} if within is None else {"matters": within}), {}).as_job()
    if (reference := config.reference) is not None and reference.mode == "auto":
        # It is asked once for its content, and not beside every commit's model.
        config = config.model_copy(update={"reference": reference.model_copy(update={"mode": "recorded"})})
    report = evaluate(config, progress=True)
    check_complete(report, config.on_error)
    return Named(model_name(report), report, path.parent)


def _written(run: Named, file: str) -> Baseline:
    """The baseline of a run, in its file. Raises `MissingError` where it has no finite answer to each request."""
    report = run.report
    if faults := len(report.missing) + non_finite_requests(report.metrics):
        without = counted(faults, "request")
        raise MissingError(f"'{run.name}' has {without} without a finite answer: a baseline needs an answer to each")
    made = baseline_of(report)
    write_texts({Path(file): to_json(made)}, Path(file).parent, "the baseline")
    judged, found = report.verdict, report.unjudged_damage
    # Not what is only undecided.
    if judged is not None and {item.code for item in judged.reasons} & {"damaged", "distant", *LOST_TOO}:
        found = (judged.finding,)
    if found:
        logger.warning("the baseline is of a model whose evaluation says: %s", "; ".join(found))
    return made


def gate_report(run: Named, file: str, baseline: Baseline, within: float | None = None) -> GateResult:
    """The decision on a report, by the answers that it keeps."""
    report = run.report
    compared = report.comparison or Comparison({})
    if not (own := run.answers):
        raise MissingError(f"'{run.name}' has no value for any document: evaluate it anew")
    alike = [name for name, what in compared.damaged.items() if baseline.damaged.get(name) == what]
    found = {name: what for name, what in compared.damaged.items() if name not in alike}
    faults = Comparison(
        {"limit": report.config.get("limit")},
        metrics=report.results,
        missing=len(report.missing),
        non_finite=non_finite_requests(report.metrics),
        damaged={**found, **damage_of(baseline.model, report.model)},
        matters=run.matters if within is None else within,
        arguments=compared.arguments,
        stops=stops_of(baseline.model, report.model),
        is_same_content=baseline.model.get("content_hash", "") == report.model.get("content_hash"),
    )
    contexts = {LONGEST_CONTEXT: baseline.model["max_length"]} if "max_length" in baseline.model else {}
    check_comparable([(file, dict.fromkeys(baseline.definitions, contexts)), (run.name, report)])
    date = report.results.get(TEMPLATE_DATE)
    dates = f": the chat template prints the date, {date}, and the baseline is of {baseline.created[:10]}"
    gated = gate_answers(unpacked(baseline.documents), own, faults, (file, run.name), dates if date else "")
    refuse_other_definitions(baseline, report.results)
    same = [f"the baseline is damaged alike: {listed(alike)}"] if alike else ()
    return replace(gated, notes=(*gated.notes, *same))


def gate_answers(
    before: Sequence[Answers],
    after: Sequence[Answers],
    faults: Comparison = _NO_FAULTS,
    names: tuple[str, str] = ("the baseline", "the run"),
    dates: str = "",
) -> GateResult:
    """The decision on answers under the digests of baselines. Documents are paired where prompts, choices and target
    are the same. `faults` has what matters, and requests without an answer. Raises `ConfigError` where tasks or metrics
    differ, or a task has no common document, which `dates` explains."""
    _refuse_others(before, after, names)
    theirs = {(item.task, item.filter): item for item in before}
    pairs = [(theirs[item.task, item.filter], item) for item in after]
    notes, common, number_other = [], [], 0
    lacking: set[tuple[str, int]] = set()
    for first, second in pairs:
        one = _renumbered(first, second, faults.metrics.get("configs", {}).get(second.task, {}))
        two, number = second.of(one.by_document), len(one.by_document)
        if not number:
            raise NotComparableError(f"task '{second.task}': '{names[0]}' and '{names[1]}' share no documents{dates}")
        common.append((one, two))
        most = max(len(first.by_document), len(second.by_document))
        if number < most:
            notes.append(f"{second.task}: {number:,} of {most:,} documents are the same in both")
        others = _asked_otherwise((first, one), (second, two))
        less = max(len(first.by_document) - len(second.by_document), others)
        number_other += others
        absent = {(second.task, -place) for place in range(1, 1 + less)}
        if unanswered := absent | without_value([one], [two]).keys():
            many = counted(len(unanswered), "document")
            notes.append(f"{second.task}: {many} of the baseline without a value in the run")
        lacking |= unanswered
    both = [one for one, _ in common], [two for _, two in common]
    missing, damaged = max(faults.missing, len(lacking)), {**faults.damaged, **other_choices(common)}
    texts, is_same = tuple(compare_texts(*both)), faults.is_same_content and not notes
    comparison = replace(faults, texts=texts, missing=missing, damaged=damaged, is_same_content=is_same)
    try:
        comparison = compare_answers(comparison, *both)
    except TaskError as error:
        raise NotComparableError(f"cannot compare '{names[0]}' and '{names[1]}': {error}") from error
    limit = faults.reference.get("limit")
    if (limit or number_other) and not faults.missing and all(place < 0 for _, place in lacking):
        many = counted(missing, "document of the baseline was", "documents of the baseline were")
        how = "asked otherwise, or not at all" if number_other else f"not asked (limit {limit})"
        comparison = replace(comparison, reference={"not_asked": f"{many} {how}"})
    judged = verdict(comparison)
    judged = replace(judged, next_step=next_step(judged.reasons, comparison, is_gated=True))
    notes += [reason.words for reason in judged.reasons if reason.code == "uncompared"]
    return GateResult(judged.status, judged, tuple(bounds_of(comparison, judged)), tuple(dict.fromkeys(notes)))


def _asked_otherwise(*pairs: tuple[Answers, Answers]) -> int:
    """How many documents two models were both asked, but by other prompts, choices or targets: of each model all
    answers, and those to documents that were asked alike."""

    def documents(answers: Answers) -> Counter[str]:
        return Counter(answer.digest.split(" ")[0] for answer in answers.by_document.values())

    first, second = (documents(everything) - documents(alike) for everything, alike in pairs)
    return (first & second).total()


def _renumbered(first: Answers, second: Answers, config: Mapping[str, Any]) -> Answers:
    """The answers of `first` to questions of `second`, under its numbers: in order where one is asked several times.
    `config`: the task's definition, as lm-eval dumps it."""
    numbers: dict[str, list[int]] = {}
    begin = 0 if reads_all_columns(config) else -1
    for number in [*second.by_document][::-1]:
        numbers.setdefault(" ".join(second.by_document[number].digest.split(" ")[begin:]), []).append(number)
    asked = ((numbers.get(" ".join(one.digest.split(" ")[begin:])), one) for one in first.by_document.values())
    return replace(first, by_document={own.pop(): answer for own, answer in asked if own})


def _refuse_others(before: Sequence[Answers], after: Sequence[Answers], names: tuple[str, str]) -> None:
    """Raises where only one side has a metric: it would go unnoticed."""
    one, two = (
        {
            f"{item.task}/{name},{item.filter}{_DIRECTIONS[better]}"
            for item in own
            for name, better in item.judged.items()
            if name not in LENGTHS
        }
        for own in (before, after)
    )
    if one != two:
        others = [listed(sorted(own - other)) or "no other" for own, other in ((one, two), (two, one))]
        raise NotComparableError(
            f"--baseline = '{names[0]}' has the metrics {others[0]}, and '{names[1]}' {others[1]}: evaluate the same, "
            "or write the baseline anew with --update-baseline",
            "--baseline",
            names[0],
        )


FORMAT = 3
_DEFINITION = (
    "output_type", "doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "process_results",
    "generation_kwargs", "repeats", "filter_list", "metric_list",
)  # fmt: skip
"""Keys of a task in lm-eval's results that say how it is asked and scored."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the name of a function whose source lm-eval cannot read."""


@dataclass(frozen=True)
class Baseline:
    """The numbers and their origin: one small JSON file that a repository keeps."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int
    created: str
    model: Mapping[str, Any]
    """Path, kind and content digest of the model."""

    reference: Mapping[str, Any]
    """As `model`, with the key of its records; empty where the evaluation had none."""

    versions: Mapping[str, str]
    metrics: tuple[Metric, ...]
    documents: tuple[PackedAnswers, ...]
    definitions: Mapping[str, str]
    """By task, what `definitions` gives."""

    damaged: Mapping[str, str] = field(default_factory=dict)
    """What the comparison with the reference found damaged, as `Comparison.damaged`: a run that has it is no worse."""


def baseline_of(report: Report) -> Baseline:
    """The baseline of a report. Raises `ConfigError` where it has no answers."""
    if not report.answers:
        raise MissingError("a baseline needs a value for each document, which no task of the report has")
    facts = ("path", "kind", "content_hash", "mode", "max_length", UNJUDGED, *TRIALS, *STOP_FACTS)
    known = {**report.model, "max_length": report.results.get("max_length")}
    compared = report.comparison or Comparison({})
    records = {"records": Path(folder).name} if (folder := compared.reference.get("folder")) else {}
    return Baseline(
        format=FORMAT,
        created=report.created,
        model={key: known[key] for key in facts if key in known},
        reference={key: compared.reference[key] for key in facts if key in compared.reference} | records,
        versions=report.versions,
        metrics=tuple(item for item in report.metrics if item.n is not None),
        documents=report.answers,
        definitions=definitions(report.results),
        damaged=compared.damaged,
    )


def definitions(results: Mapping[str, Any]) -> dict[str, str]:
    """A digest of how each task is asked and scored: its version, what lm-eval says of its definition, and the files
    that its code imports from beside it. The shots and the template are in the prompts, which documents are paired
    by."""
    configs, versions = results.get("configs", {}), results.get("versions", {})
    helpers = {task: [digest] for task, digest in results.get(TASK_HELPERS, {}).items()}
    asked = {
        task: [versions.get(task), *map(config.get, _DEFINITION), *helpers.get(task, ())]
        for task, config in configs.items()
    }
    texts = {task: _ADDRESS.sub("", json.dumps(item, sort_keys=True, default=str)) for task, item in asked.items()}
    return {task: hashlib.sha256(text.encode()).hexdigest()[:12] for task, text in texts.items()}


def refuse_other_definitions(baseline: Baseline, results: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a task is no longer asked and scored as the baseline's."""
    now, known = definitions(results), baseline.definitions
    if other := [item.task for item in baseline.documents if now.get(item.task) != known.get(item.task)]:
        what = "asked or scored otherwise than the baseline's (version, choices, targets, generation settings, filters"
        what = f"{what}, metrics):" if other[0] in now else "in the baseline and not in the run: evaluate the same, or"
        raise NotComparableError(f"task '{other[0]}' is {what} write the baseline anew with --update-baseline")


def read_baseline(file: Path) -> Baseline:
    """The baseline in `file`. Raises `ConfigError` for anything else."""
    if kind := special_kind(file):
        raise ConfigError(f"it is {kind}: give a file", "--baseline", file, code="no_access")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=keys_once)
        read = validated(TypeAdapter(Baseline), content)
        if read.format != FORMAT:
            raise ValueError(f"'format' = {read.format}, this version reads {FORMAT}: --update-baseline writes it anew")
        unpacked(read.documents)  # raises `ValueError`
    except OSError as error:
        hint = ": --update-baseline writes it" if isinstance(error, FileNotFoundError) else ""
        reason = f"cannot read it: {error.strerror or error}{hint}"
        raise ConfigError(reason, "--baseline", file, code="no_access") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no baseline: {first_line(error)}", "--baseline", file, code="damaged") from error
    return read


SUMMARY = "GITHUB_STEP_SUMMARY"
LEVEL = (
    "Level: where nothing was lost, at most 5 % of comparisons find a loss, over all metrics and tasks together (2.5 % "
    "by the exact test of all answers, 2.5 % by Holm's correction of the others); where some metric of a task lost as "
    "much as matters, at most 2.5 % pass."
)
_WORDS: Mapping[Status, str] = {"ok": "passed", "small_loss": "passed", "loss": "loss", "unknown": "cannot tell"}
_SIGNS: Mapping[Status, str] = {"ok": "✅", "small_loss": "✅", "loss": "❌", "unknown": "❓"}


def lines(gated: GateResult) -> list[str]:
    """The decision, its figures, and a line a bound: a name of several lines would start a machine's command."""
    bounds = [f"  {_WORDS[bound.status]:11} {bound.name}: {bound.text}" for bound in gated.bounds]
    more = [f"  note: {note}" for note in gated.notes]
    if EXIT_STATUS[gated.status]:
        more.append(f"  next: {gated.verdict.next_step or 'evaluate more documents'}")
    return [text.replace("\n", " ") for text in (_headline(gated), *bounds, *more)]


def markdown(gated: GateResult) -> str:
    """A section with a table, a row a bound."""
    rows = [
        f"| {_SIGNS[bound.status]} {_WORDS[bound.status]} | {literal(bound.name)} | {literal(bound.text)} |"
        for bound in gated.bounds
    ]
    notes = [f"- {literal(note)}" for note in gated.notes]
    parts = [f"## {_SIGNS[gated.status]} {literal(_headline(gated))}", ""]
    return "\n".join([*parts, "| | bound | figures |", "|---|---|---|", *rows, "", *notes, "", LEVEL, ""])


def junit(gated: GateResult) -> str:
    """JUnit XML, which allows no control characters: a case for each bound. A loss is a failure, "cannot tell" an
    error, and what is not judged skipped."""
    counts = [sum(bound.status == status for bound in gated.bounds) for status in ("loss", "unknown")]
    tests = str(len(gated.bounds) + len(gated.notes))
    numbers = {"tests": tests, "failures": str(counts[0]), "errors": str(counts[1]), "skipped": str(len(gated.notes))}
    suites = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "olive-ext gate", **numbers})
    for bound in gated.bounds:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "gate", "name": printable(bound.name)})
        if EXIT_STATUS[bound.status]:
            kind = "failure" if bound.status == "loss" else "error"
            ElementTree.SubElement(case, kind, {"type": _WORDS[bound.status], "message": printable(bound.text)})
        ElementTree.SubElement(case, "system-out").text = printable(bound.text)
    for note in gated.notes:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "gate", "name": printable(note)})
        ElementTree.SubElement(case, "skipped", {"message": printable(note)})
    ElementTree.SubElement(suite, "system-out").text = printable(f"{_headline(gated)}\n{LEVEL}")
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def annotation_lines(gated: GateResult, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each bound that is lost or undecided, as the machine reads it from stdout; empty elsewhere."""
    for bound in (each for each in gated.bounds if EXIT_STATUS[each.status]):
        level = "error" if bound.status == "loss" else "warning"
        if environment.get("GITHUB_ACTIONS") == "true":
            title = _escaped(bound.name, {":": "%3A", ",": "%2C"})
            yield f"::{level} title={title}::{_escaped(f'{_WORDS[bound.status]}: {bound.text}')}"
        elif environment.get("TF_BUILD", "").lower() == "true":
            text = _escaped(f"{bound.name}: {_WORDS[bound.status]}: {bound.text}", {"%": "%AZP25"})
            yield f"##vso[task.logissue type={level}]{text}"


def _headline(gated: GateResult) -> str:
    word = _WORDS[gated.status]
    finding = gated.verdict.finding.removeprefix(f"{word}: ")
    return f"{word}: {finding} ({counted(gated.verdict.num_documents, 'document')})"


def _escaped(text: str, more: Mapping[str, str] | None = None) -> str:
    """As GitHub reads commands; `more` for properties, or instead."""
    codes = {"%": "%25", "\r": "%0D", "\n": "%0A", **(more or {})}
    return text.translate({ord(letter): code for letter, code in codes.items()})


def gate_command(arguments: Namespace) -> int:
    """Prints the decision on an evaluation, writes the JUnit file, and adds to the job's summary where the machine
    names one; 0: passed, 1: a loss, 3: it cannot be decided. Writes the baseline instead with `--update-baseline`."""
    gated = gate(arguments.run, arguments.baseline, arguments.within, update=arguments.update_baseline)
    if not isinstance(gated, GateResult):
        sys.stdout.write(f"baseline: {printable(arguments.baseline)}\n")
        return 0
    for line in (*lines(gated), *annotation_lines(gated, os.environ)):
        sys.stdout.write(f"{printable(line)}\n")
    if arguments.junit is not None:
        write_texts({Path(arguments.junit): junit(gated)}, Path(arguments.junit).parent, "the JUnit file")
    if summary := os.environ.get(SUMMARY):
        try:
            with Path(summary).open("a", encoding="utf-8") as added:
                added.write(markdown(gated))
        except OSError as error:
            problem = f"cannot write it: {error.strerror or error}"
            raise ConfigError(problem, SUMMARY, summary, code="no_access") from error
    return EXIT_STATUS[gated.status]
