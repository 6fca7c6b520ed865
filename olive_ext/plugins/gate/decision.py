"""Holds an evaluation against a baseline: pairs the documents of both, and judges as every comparison does.

Knows no form of a result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from olive_ext.config import Certain, EvaluationConfig
from olive_ext.errors import ConfigError, MissingError, NotComparableError, TaskError, counted
from olive_ext.plugins.gate.baseline import (
    Baseline,
    baseline_of,
    complete_answers,
    keyed,
    read_baseline,
    refuse_other_definitions,
)
from olive_ext.plugins.gate.bounds import CLAIMED, Bound, Decision, bounds_of, of_claim
from olive_ext.report import Report, to_json, write_texts
from olive_ext.report.comparison import Comparison
from olive_ext.report.metrics import LENGTHS, non_finite_requests, read_metrics
from olive_ext.report.numbers import joined
from olive_ext.report.page import TEMPLATE_DATE
from olive_ext.report.sampled import certain_comparison
from olive_ext.report.verdict import EXIT_STATUS, Status, Verdict, verdict
from olive_ext.run import check_complete, evaluate
from olive_ext.run.earlier_reports import Named, load
from olive_ext.run.models import stops_of
from olive_ext.run.reference.answers import Answers
from olive_ext.run.reference.pairing import compare_answers, compare_texts, without_value
from olive_ext.run.sample_logs import Logs

_DECISIONS: Mapping[Status, Decision] = {
    "ok": "passed",
    "small_loss": "passed",
    "loss": "loss",
    "unknown": "cannot tell",
}
STATUS: Mapping[Decision, int] = {decision: EXIT_STATUS[status] for status, decision in _DECISIONS.items()}
"""Exit status of a decision."""

_SETTINGS = (".json", ".yaml", ".yml")
_ALL_DOCUMENTS = 1 << 31
_NO_FAULTS = Comparison({})


@dataclass(frozen=True)
class Gated:
    """What the gate says of an evaluation."""

    decision: Decision
    verdict: Verdict
    bounds: tuple[Bound, ...]
    notes: tuple[str, ...] = ()
    """What the numbers do not cover."""


def gate(run: str, file: str, within: float | None = None, *, update: bool = False) -> Gated | Baseline:
    """The decision on the evaluation `run`, a report's folder or a file of settings, or with `update` the baseline that
    `file` now holds. Raises `ConfigError` for what cannot be paired.

    `within`: points of accuracy whose loss is too much; None takes the run's `matters`.
    """
    path = Path(run)
    baseline = None if update else read_baseline(Path(file))
    if path.name == "report.json" or path.suffix.lower() not in _SETTINGS:
        return _of_folder(run, file, baseline, within)
    from olive_ext.check import read_recipe

    values = dict(read_recipe(path))
    matters = {} if within is None else {"matters": within}
    if values.get("documents") == "enough":
        claim = values.pop("certain", None)
        values.pop("documents")
        values.pop("reference", None)  # the baseline's answers stand for it
        config = EvaluationConfig.of({**values, **matters}, {}).as_job()
        if baseline is not None:
            certain = Certain(within=config.matters / 100) if claim is None else Certain.parse(claim, where="certain")
            return _of_drawn(config, certain, baseline)
    with tempfile.TemporaryDirectory() as scratch:
        given = {"output_dir": scratch, **values, **matters, "sample_log_num": _ALL_DOCUMENTS}
        config = _recorded(EvaluationConfig.of({**given, "sample_log_dir": given["output_dir"]}, {}).as_job())
        check_complete(evaluate(config, progress=True), config.on_error)
        return _of_folder(str(config.output_dir), file, baseline, within)


def _recorded(config: EvaluationConfig) -> EvaluationConfig:
    """With a reference that is asked once for its content, and not beside every commit's model."""
    if (reference := config.reference) is None or reference.mode != "auto":
        return config
    return config.model_copy(update={"reference": reference.model_copy(update={"mode": "recorded"})})


def _of_folder(run: str, file: str, baseline: Baseline | None, within: float | None) -> Gated | Baseline:
    named = load([run])
    if len(named) != 1:
        raise ConfigError(f"'{run}' holds {len(named)} reports: give one")
    if baseline is not None:
        return gate_report(named[0], file, baseline, within)
    if named[0].report.comparison is not None and named[0].report.comparison.certainty is not None:
        raise MissingError(f"'{run}' has drawn documents alone: a baseline needs all of them ('documents' = \"all\")")
    answers = complete_answers(named[0])
    if faults := len(named[0].report.missing) + non_finite_requests(named[0].report.metrics):
        without = counted(faults, "request")
        raise MissingError(f"'{run}' has {without} without a finite answer: a baseline needs an answer to each")
    made = baseline_of(named[0].report, answers)
    write_texts({Path(file): to_json(made)}, Path(file).parent, "the baseline")
    return made


def gate_report(run: Named, file: str, baseline: Baseline, within: float | None = None) -> Gated:
    """The decision on a report with its logs."""
    report, logs = run.report, run.logs
    if report.comparison is not None and report.comparison.certainty is not None:
        raise NotComparableError(f"'{run.name}' has drawn documents by another reference: give its settings file")
    own = [keyed(item) for item in complete_answers(run) if item.judged]
    if not own:
        raise MissingError(f"'{run.folder}' has no sample logs: evaluate with 'sample_log_num' of all documents")
    matters = float(report.config.get("matters", Comparison.matters)) if within is None else within
    faults = Comparison({}, (), (), (), {}, len(report.missing), non_finite_requests(report.metrics), matters=matters)
    faults = replace(faults, stops=stops_of(baseline.model, report.model), metrics=report.results)
    date = report.results.get(TEMPLATE_DATE)
    dates = f": the chat template prints the date, {date}, and the baseline is of {baseline.created[:10]}"
    gated = gate_answers(baseline.answers(), own, faults, (file, run.name), logs, dates if date else "")
    refuse_other_definitions(baseline, report.results)
    silent = _not_held(report, own)
    notes = [f"{joined(silent)}: not held, there is no value for each document"] if silent else []
    return replace(gated, notes=(*gated.notes, *notes))


def _not_held(report: Report, own: Sequence[Answers]) -> list[str]:
    """Metrics that are no means over documents (F1 over a corpus) beside others of their task that are."""
    held = {item.task: {name for other in own if other.task == item.task for name in other.judged} for item in own}
    texts = {item.task for item in own if item.text_metric}  # of one log-likelihood all
    known = [item for item in read_metrics(report.results) if item.task in held.keys() - texts]
    return [*dict.fromkeys(f"{item.task} {item.metric}" for item in known if item.metric not in held[item.task])]


def gate_answers(
    before: Sequence[Answers],
    after: Sequence[Answers],
    faults: Comparison = _NO_FAULTS,
    names: tuple[str, str] = ("the baseline", "the run"),
    logs: Logs | None = None,
    dates: str = "",
) -> Gated:
    """The decision on answers under the digests of baselines. Documents are paired where number and content are the
    same. `faults` has what matters, and requests without an answer. Raises `ConfigError` where tasks or metrics
    differ, or a task has no common document, which `dates` explains."""
    _refuse_others(before, after, names)
    theirs = {(item.task, item.filter): item for item in before}
    pairs = [(theirs[item.task, item.filter], item) for item in after]
    notes, common = [], []
    lacking: set[tuple[str, int]] = set()
    for first, second in pairs:
        numbers = _common(first, second)
        if not numbers:
            raise NotComparableError(f"task '{second.task}': '{names[0]}' and '{names[1]}' share no documents{dates}")
        one, two = first.of(numbers), second.of(numbers)
        common.append((one, two))
        most = max(len(first.by_document), len(second.by_document))
        if len(numbers) < most:
            notes.append(f"{second.task}: {len(numbers):,} of {most:,} documents are the same in both")
        absent = {(second.task, number) for number in first.by_document.keys() - second.by_document.keys()}
        if unanswered := absent | without_value([one], [two]):
            told = counted(len(unanswered), "document")
            notes.append(f"{second.task}: {told} of the baseline without a value in the run")
        lacking |= unanswered
    samples = {item.task: [] for item in after} if logs is None else logs.samples
    tasks = {} if logs is None else logs.tasks
    try:
        both = [one for one, _ in common], [two for _, two in common]
        outcomes, _, lengths = compare_answers(*both, samples, tasks, faults.matters)
    except TaskError as error:
        raise NotComparableError(f"cannot compare '{names[0]}' and '{names[1]}': {error}") from error
    missing, texts = max(faults.missing, len(lacking)), tuple(compare_texts(*both))
    comparison = replace(faults, outcomes=outcomes, texts=texts, lengths=lengths, missing=missing)
    return _decided(comparison, tuple(dict.fromkeys(notes)))


def _common(first: Answers, second: Answers) -> set[int]:
    one, two = first.by_document, second.by_document
    return {number for number in one.keys() & two.keys() if one[number].digest == two[number].digest}


def _refuse_others(before: Sequence[Answers], after: Sequence[Answers], names: tuple[str, str]) -> None:
    """Metrics that only one has would go unnoticed, by a gate of all things."""
    one, two = (
        {
            f"{item.task}/{name},{item.filter}{'' if better else ' (less is better)'}"
            for item in own
            for name, better in item.judged.items()
            if name not in LENGTHS
        }
        for own in (before, after)
    )
    if one != two:
        tasks = [", ".join(sorted({item.task for item in own})) or "none" for own in (before, after)]
        what = "tasks" if tasks[0] != tasks[1] else "metrics"
        both = (
            tasks
            if what == "tasks"
            else [", ".join(sorted(item - other)) or "no other" for item, other in ((one, two), (two, one))]
        )
        raise NotComparableError(
            f"'--baseline' = '{names[0]}' has the {what} {both[0]}, and '{names[1]}' {both[1]}: evaluate the same, or "
            "write the baseline anew with --update-baseline",
            "--baseline",
            names[0],
        )


def _of_drawn(config: EvaluationConfig, certain: Certain, baseline: Baseline) -> Gated:
    """Evaluates as many documents as make the claim certain; the baseline's answers are the reference's."""
    from olive_ext.backends.task_loading import Seeds
    from olive_ext.run.evaluation import asked_task_objects
    from olive_ext.run.models import Models
    from olive_ext.run.reference.answers import read_answers
    from olive_ext.run.reference.claims import BatchAnswers, Values, question_of
    from olive_ext.run.reference.sampled_run import SampledRun

    if certain.metric != "accuracy_difference":
        raise ConfigError("a baseline has answers alone: 'accuracy_difference'", "certain.metric", certain.metric)
    config = config.model_copy(update={"documents": "enough", "certain": certain})
    models, seeds = Models(config, progress=True), Seeds.of(config.seed)
    before = [item for item in baseline.answers() if item.metrics]  # a claim is about answers alone
    tasks = asked_task_objects(models, None, seeds)
    asked = set() if tasks is None else set(tasks.tasks)
    if tasks is None or asked != {item.task for item in before}:
        raise NotComparableError(
            f"the baseline has the tasks {', '.join(sorted({item.task for item in before}))}, and the settings "
            f"{', '.join(sorted(asked)) or 'none'}: evaluate the same, or write it anew with --update-baseline"
        )
    question = question_of(certain, before, None, [])

    def values(batch: BatchAnswers) -> Values:
        return question.values(replace(batch, answers=[keyed(item) for item in batch.answers]))

    lm = models.candidate()
    try:
        run = SampledRun(config, tasks, seeds, replace(question, values=values), [], models.progress)
        results, drawn = run.run(lm, None)
        lost = len(getattr(lm, "lost", ()))
    finally:
        lm.close()
    refuse_other_definitions(baseline, results)
    own = [keyed(item) for item in read_answers(results["samples"], tasks.tasks)]
    answers = before, own, results["samples"], tasks.tasks
    outcomes, _, lengths = compare_answers(*answers, config.matters, drawn.weights)
    comparison = Comparison({}, (), outcomes, (), missing=lost, matters=config.matters, lengths=lengths)
    return _decided(certain_comparison(comparison, drawn.certainty), ())


def _decided(comparison: Comparison, notes: tuple[str, ...]) -> Gated:
    """A claim about drawn documents decides by itself: it is about the baseline's documents, all of which are known."""
    found, certainty = verdict(comparison), comparison.certainty
    decision = _DECISIONS[found.status]
    if certainty is not None and found.code != "cannot_tell":
        decision = CLAIMED[certainty.verdict]
        found = replace(found, headline=certainty.sentence(), evidence=())
        return Gated(decision, found, (of_claim(certainty, comparison),), notes)
    return Gated(decision, found, tuple(bounds_of(comparison, found)), notes)
