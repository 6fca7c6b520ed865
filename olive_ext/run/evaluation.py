"""`evaluate`: tasks are checked, the model is opened, lm-eval runs, the report is made and written. And `record`, which
keeps a model's answers to tasks in one file, for comparisons elsewhere."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from olive_ext.backends.task_files import refuse_unknown, task_folders
from olive_ext.config import RECORDS_SUFFIX, SAME_MODEL, EvaluationConfig, ReferenceConfig
from olive_ext.config.base import takes
from olive_ext.errors import (
    ConfigError,
    ContradictionError,
    IncompleteError,
    MissingError,
    ModelError,
    RequirementError,
    RunError,
    TaskError,
    UnwrittenError,
    counted,
)
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.model.types import MEDIA_PARTS
from olive_ext.records.files import read_index
from olive_ext.records.journal import read_facts
from olive_ext.records.store import REQUEST, TARGET
from olive_ext.records.travelling import pack
from olive_ext.registry import hook, hooks
from olive_ext.report import Metric, Report, check_writable, write
from olive_ext.report.comparison import GENERATED, GRAPH, KV_CACHE, NAME, SHARED, TOKENIZER, VARIANT, Comparison
from olive_ext.report.metrics import MISSING, NON_FINITE, comparison_metrics, read_metrics
from olive_ext.report.numbers import size
from olive_ext.report.page import SIZE
from olive_ext.report.report import plain
from olive_ext.report.report_files import refuse_filled
from olive_ext.run.bounds import broken_bounds, cost_metrics, kept_bounds, refuse_names, requested_tasks, with_costs
from olive_ext.run.machine import Clock, PeakMemory, describe_hardware
from olive_ext.run.model_facts import STOP_FACTS, UNJUDGED, damage_of
from olive_ext.run.models import PICTURES, Models, OtherPromptsError, pictures_of
from olive_ext.run.reference.answers import packed
from olive_ext.run.reference.comparison_run import TaskRun, is_own_reference, mode_of
from olive_ext.run.reference.observer import Weights
from olive_ext.run.reference.sampled_run import refuse_unanswerable, sampled_metrics
from olive_ext.run.sample_logs import write_samples
from olive_ext.run.task_fit import refuse_misfits, refuse_texts

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval.instances import LostRequest
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks


logger = logging.getLogger(__name__)


@takes(EvaluationConfig)
def evaluate(
    config: EvaluationConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    lm: LM | None = None,
    progress: bool | None = None,
    names: Mapping[str, str | None] = MappingProxyType({}),
    **settings: Any,
) -> Report:
    """Runs an evaluation and returns its report; writes the report and sample logs where `config` names folders.

    `config` is a model's path with the other keys as keywords (`evaluate("model.onnx", tasks=["mmlu"], limit=50)`), a
    mapping of all keys, or an `EvaluationConfig`; keywords are laid over the last two, and alone are all keys.
    `settings` are all other keys of a recipe's evaluator. `lm` stands in for the model that `config` names, and stays
    open. `names` are those that people use for the "model" and the "reference", where these are not their paths.
    `progress` shows bars on a terminal, else a line a minute on stderr; None shows it on a terminal only. Every
    failure but an interruption is an `OliveExtError`; what does not exist (model, provider, folder, task) is noticed
    before the model is opened. Answers are journaled as they come; all else is written when all is done. A broken
    bound (`fail_on_loss`, `require`) is a `RequirementError` that has the `report`.
    """
    config = EvaluationConfig.of(config, settings) if settings or not isinstance(config, EvaluationConfig) else config
    report = evaluate_models(Models(with_costs(config), progress), lm, names)
    if report.broken:
        raise RequirementError(f"a bound is broken: {'; '.join(item.words for item in report.broken)}", report)
    return report


def evaluate_models(
    models: Models, lm: LM | None = None, names: Mapping[str, str | None] = MappingProxyType({})
) -> Report:
    """As `evaluate`, of the models of a configuration."""
    config, progress = models.config, models.progress
    log_folder = _log_folder(config)
    if (opened := getattr(lm, "resolved", None)) is not None:
        models.given_candidate = opened
    if lm is None:
        _refuse_missing(config, models)
    from olive_ext.session.tokenizer import each_loaded_once

    on_hub = offline_if_unreachable(models.names() if lm is None else ())
    file = nullcontext() if models.records_file is None else models.records_file.in_use()
    with models.clock.reporting(progress), on_hub, each_loaded_once(), ExitStack() as logging_runs, file:
        name = Path(config.model.path).name
        runs = [logging_runs.enter_context(logged(name)) for logged in hooks("logged_run").values()]
        report, task_run = _evaluate(models, lm)
        has_files = lm is None or opened is not None
        if has_files and models.unjudged:
            report = replace(report, model={**report.model, UNJUDGED: models.unjudged})
        if has_files and task_run is not None and report.comparison is not None:
            report = replace(report, comparison=_with_constants(report.comparison, report.model, models, task_run))
            for finished in hooks("finish_report").values() if lm is None else ():
                report = finished(report, models, task_run, partial(_compared, models, task_run.weights))
        report = _judged(report, config, names)
        try:
            if log_folder is not None and task_run is not None:
                write_samples(task_run.samples, config.sample_log_num, log_folder, task_run.fields())
            if config.output_dir is not None:
                write(report, config.output_dir)
        except RunError as error:
            raise UnwrittenError(str(error), report) from error
        for run in runs:
            run.log(report, config.output_dir, None if log_folder is None else str(log_folder))
    return report


def _with_constants(comparison: Comparison, model: Mapping[str, Any], models: Models, task_run: TaskRun) -> Comparison:
    """The comparison, with what it has reached of the model, and with the constants of its files, reached or not."""
    observer, vocab_size, is_alone, length, contexts = task_run.observer, None, False, None, None
    with suppress(ModelError):  # neither need be known, where the evaluation itself names a length
        if models.candidate.kind == "onnx":
            spec = models.candidate.spec
            untried = bool(spec.cross) and model.get("encoder_failure") is None
            vocab_size, is_alone = spec.vocab_size, bool(spec.alone) or untried
        contexts, length = models.contexts, models.candidate.context_length
    reach = None if observer is None else observer.reach(contexts[1] if contexts else length, vocab_size)
    taken = () if models.candidate.media is None else models.candidate.media.modalities
    unseen = [] if observer is None else [one for one in taken if one not in observer.modalities]
    overall = comparison.overall_divergence()
    nats = None if overall is None else overall.kl.mean
    continues = observer is not None and any(len(one.target.target) > 1 for one in observer.generated)
    unreached = [part for part, one in MEDIA_PARTS.items() if one in unseen]
    constants = models.damage(nats, unreached, continues=continues)
    if reach is not None:
        kinds = [*(one.kind for one in unseen), *([] if continues else [GENERATED])]
        kinds += [SHARED] if is_alone else []
        for kind, name in (("image", "pictures"), ("sound", "sounds")):  # an encoder may mix up those of one run
            if model.get(f"{kind}_encoder_runs") == model.get(f"{kind}s_encoded", 0) > 0:
                kinds.append(f"two {name} encoded together")
        reach = replace(reach, unseen=tuple(kinds), judged=constants.judged, uncompared=constants.uncompared)
    known = {UNJUDGED: models.unjudged_of_reference} if UNJUDGED in model else {}
    damaged = damage_of({**comparison.reference, **known}, model) | constants.findings
    is_given = bool(models.candidate.settings.engine.adapters)  # which change a model on purpose
    if nats is not None and nats > constants.rounding and not is_given:
        damaged[GRAPH] = f"computes otherwise than the reference's, whose weights it has ({nats:.2g} nats)"
    asked = None if task_run.reference is None else task_run.reference.observer
    search = () if comparison.stops is None else comparison.stops.search
    may_write_all = not any("suppress_tokens [" in item for item in search)  # as it scores them
    if observer is not None and asked is not None and may_write_all and (cache := observer.contradicted(asked)):
        damaged = {KV_CACHE: cache} | damaged
    if observer is not None and (text := models.other_text(one.target.target for one in observer.generated)):
        damaged = {TOKENIZER: text} | damaged
    return replace(comparison, damaged=damaged, reach=reach, contexts=contexts)


def _compared(models: Models, weights: Weights | None, config: EvaluationConfig) -> Comparison | None:
    """The comparison of a part of the evaluation of `models`, on the documents that the whole has drawn."""
    return _evaluate(Models(config, models.progress, models.clock), None, weights)[0].comparison


def _judged(report: Report, config: EvaluationConfig, names: Mapping[str, str | None]) -> Report:
    """The report with the bounds that are broken and kept, and the `names` of its models."""
    broken = tuple(broken_bounds(config.bounds, report.metrics, report.comparison))
    name, reference_name = ({NAME: names[key]} if names.get(key) else {} for key in ("model", "reference"))
    comparison = report.comparison
    if comparison is not None:
        facts, kept = {**reference_name, **comparison.reference}, tuple(kept_bounds(config.bounds, report.metrics))
        comparison = replace(comparison, reference=facts, kept_bounds=kept)
    return replace(report, model={**name, **report.model}, comparison=comparison, broken=broken)


def _evaluate(models: Models, lm: LM | None, weights: Weights | None = None) -> tuple[Report, TaskRun | None]:
    """The report, and the tasks' run, if any. `weights`: of documents that an earlier run drew, evaluated alone."""
    if lm is not None and not hasattr(lm, "session") and models.config.use_cache is not None:
        problem = "lm-eval's own model keeps no answers: leave it out, or wrap the model in lm_eval.api.model.CachingLM"
        raise ConfigError(problem, "use_cache", models.config.use_cache)
    tasks = load_requested_tasks(models, lm)
    if tasks is None:
        return _report(models, lm, {"results": {}}, 0, None), None
    if weights is not None:
        tasks = tasks.of(weights)
    task_run = TaskRun(models, mode_of(models, lm), tasks, weights)
    try:
        return _run(task_run, models, lm), task_run
    except OtherPromptsError as other:  # before anything is computed, but for a reference that was already asked
        models.prompt_diff = other.diff
    return _evaluate(models, lm, weights)


def _run(task_run: TaskRun, models: Models, lm: LM | None) -> Report:
    task_run.run_reference_alone()
    with PeakMemory() as memory:
        model: Any = lm or task_run.open_candidate()
        try:
            models.keep_answers(model)
            with models.clock.phase("candidate"):
                results = task_run.run(model)
            peak_memory = memory.bytes
            task_run.read(results["samples"])
            comparison = task_run.finish(model)
            return replace(_report(models, model, results, peak_memory, comparison), answers=packed(task_run.answers))
        finally:
            if lm is None:
                model.close()
            elif hasattr(lm, "session"):
                lm.session.keep_answers(None)


def load_requested_tasks(models: Models, lm: LM | None) -> LoadedTasks | None:
    """The tasks, refused where the model cannot do what they ask; None where only costs are measured."""
    from olive_ext.backends.lm_eval.arguments import refuse_generations
    from olive_ext.backends.task_checks import refuse_shots
    from olive_ext.backends.task_loading import declared_metrics, load_tasks, loaded_metrics

    config, names = models.config, requested_tasks(models.config)
    if not names:
        refuse_names(config, {})
        return None
    is_own = is_own_reference(config, models.given_candidate.kind if lm is None else "hf")
    with models.clock.phase("tasks"):
        more: dict[str, Any] = {"runs_code": config.confirm_run_unsafe_code, "repeats": config.repeats}
        more["thinks"] = config.thinks if lm is None else getattr(lm, "thinks", False)
        with suppress(TaskError):  # of a file: loading says it better
            declared = declared_metrics(names, config.include_path, config.repeats, thinks=more["thinks"])
            refuse_names(config, declared, is_own=is_own)
        tasks = load_tasks(names, config.include_path, config.seed, config.metadata, **more)
    refuse_names(config, loaded_metrics(tasks), is_own=is_own)
    if models.records_file is not None:
        models.records_file.refuse_other_tasks(tasks.tasks)
    refuse_shots(tasks.tasks, config.num_fewshot)
    if config.documents == "enough":
        refuse_unanswerable(config.claim, tasks)
    if lm is not None:
        refuse_generations({}, config.gen_kwargs)
    else:
        model = models.given_candidate
        refuse_misfits(model, tasks.configs)
        refuse_generations(tasks.configs, config.gen_kwargs, model.context_length, config.model_args)
        refuse_texts(model, config)
    return tasks


def check_complete(report: Report, on_error: str) -> None:
    """Raises `IncompleteError` for requests without an answer, unless they are only to be reported."""
    if report.missing and on_error == "stop":
        first = report.missing[0]
        unanswered = counted(len(report.missing), "request has", "requests have")
        raise IncompleteError(
            f"{unanswered} no answer, and such a document counts in no metric; the first, of document "
            f"{first['doc_id']} of '{first['task']}': {first['reason']} ('on_error' = \"report\" accepts this)"
        )


def _refuse_missing(config: EvaluationConfig, models: Models) -> None:
    """Refuses paths that do not exist or cannot be written, and providers that are missing, before lm-eval is imported
    for seconds. Models come first: a user who mistypes one has no folder of tasks there."""
    if models.records_file is not None:
        _ = models.records_file.manifest
    models.refuse_providers()
    for model in (one for one in models.given_models if one.kind == "onnx"):
        given, tokenizer = Path(model.settings.model).resolve(), model.files.tokenizer
        if Path(tokenizer) in (given if given.is_dir() else given.parent).parents:
            where = model.files.origins.get("tokenizer")  # above the folder that was asked for: maybe another model's
            logger.warning("the tokenizer is in '%s', %s '%s': 'tokenizer' names another", tokenizer, where, given)
    if (workers := models.given_candidate.settings.workers) is not None:
        hook("workers", "'workers'")(None, workers, ())
    if 0 < (loss := config.fail_on_loss or 0) < 0.1:  # which may be meant as a share
        logger.warning("'fail_on_loss' = %g is %g points: 1 is one point, a hundredth of the documents", loss, loss)
    refuse_unknown(requested_tasks(config), task_folders(config.include_path))
    written = {"output_dir": config.output_dir, "sample_log_dir": config.sample_log_dir}
    written["use_cache"] = None if config.use_cache is None else str(Path(config.use_cache).parent)
    if config.reference is not None:
        written |= {f"reference.{key}": getattr(config.reference, key) for key in ("records_dir", "repro")}
    for setting, folder in written.items():
        if folder is not None:
            (refuse_filled if setting == "reference.repro" else check_writable)(Path(folder), setting)
    if models.config.reference is not None and models.config.reference.float_model is not None:
        hook("refuse_stages", "'reference.float_model'")(models)


def _log_folder(config: EvaluationConfig) -> Path | None:
    if not config.sample_log_num:
        return None
    folder = config.sample_log_dir or config.output_dir
    if folder is None:
        raise MissingError(f"'sample_log_num' = {config.sample_log_num} needs 'sample_log_dir' or 'output_dir'")
    return Path(folder)


def _report(
    models: Models, lm: LM | None, results: Mapping[str, Any], peak_memory: int, comparison: Comparison | None
) -> Report:
    from olive_ext.backends.code_eval import CODE

    config, session = models.config, getattr(lm, "session", None)
    execution = {} if session is None else dict(session.describe_execution())
    execution.pop("reference", None)
    counters = execution.setdefault("counters", getattr(lm, "counters", {}))
    costs = cost_metrics(
        config.tasks,
        size=lambda: models.size(lm),
        peak_memory=peak_memory,
        counters=counters,
        seconds=models.clock.spent("candidate"),
    )
    lost: Sequence[LostRequest] = getattr(lm, "lost", ())
    missing = [Metric(MISSING, "requests", "none", float(len(lost)), higher_is_better=False)] if lost else []
    metrics: tuple[Metric, ...] = (*read_metrics(results), *costs, *missing)
    if comparison is not None:
        finite = [metric for metric in metrics if metric.task != NON_FINITE]
        metrics = (*sampled_metrics(finite, comparison, results), *comparison_metrics(comparison))
    report = report_of(metrics, _identity(models, lm), execution, models.clock, comparison)
    return replace(
        report,
        results={name: value for name, value in results.items() if name != "samples"},
        hardware={**report.hardware, **results.get(CODE, {})},
        config=config.model_dump(mode="json", exclude_unset=True),
        missing=tuple({"task": item.task, "doc_id": item.doc_id, "reason": item.reason} for item in lost),
    )


def report_of(
    metrics: Sequence[Metric],
    model: Mapping[str, Any],
    execution: Mapping[str, Any],
    clock: Clock,
    comparison: Comparison | None,
) -> Report:
    """The report of numbers that were just measured on this machine. `execution` is a session's, as it describes it."""
    from olive_ext.package_versions import versions

    known = {"providers": (), "counters": {}, **execution}
    providers, counters = known.pop("providers"), known.pop("counters")
    return Report(
        metrics=tuple(metrics),
        model={**model, **known},
        providers=tuple({"name": item} if isinstance(item, str) else item for item in providers),
        versions=versions(),
        hardware=describe_hardware(),
        engine={**counters, **clock.seconds()},
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        comparison=comparison,
    )


def _identity(models: Models, lm: LM | None) -> dict[str, Any]:
    """Path and kind as resolved, and the digest of the content, which a model of lm-eval's own lacks."""
    path = models.config.model.path
    kind = models.given_candidate.kind if lm is None or models.export_note(path) else getattr(lm, "kind", "hf")
    resolved = models.given_candidate if lm is None else getattr(lm, "resolved", None)
    variant = None if resolved is None else resolved.files.variant or None
    known = {SIZE: models.known_size(lm), VARIANT: variant, "content_hash": getattr(lm, "content_hash", None)}
    facts = {"path": path, "kind": kind, **models.export_note(path), **known}
    return {name: value for name, value in facts.items() if value is not None}


_ANSWER_BYTES = 16
"""About the bytes of a generated token in the journal."""


def record(config: EvaluationConfig, file: str | Path, *, progress: bool = False) -> tuple[Report, int]:
    """Evaluates the model that `config` names, and writes its answers to `file` at the end, as a whole. Returns its
    report and the bytes written. The file's size is predicted before the model is asked. Raises as `evaluate`."""
    file = Path(file)
    if file.suffix != RECORDS_SUFFIX or file.is_dir():
        raise ConfigError(f"a file whose name ends with {RECORDS_SUFFIX}", "--output", file)
    if config.reference is not None:
        raise ContradictionError("a model that is recorded is a reference itself", "reference")
    if config.bounds:
        raise ContradictionError("a model that is recorded is held to no bounds", "require")
    if not requested_tasks(config):
        raise ConfigError("'tasks' ask nothing of a model: there is nothing to record", "tasks")
    check_writable(file.parent, "--output")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".olive-ext-") as root:
        reference = ReferenceConfig(path=SAME_MODEL, mode="recorded", records_dir=root)
        changed = {"reference": reference, "output_dir": None, "sample_log_num": 0, "documents": "all"}
        models = Models(config.model_copy(update=changed), progress)
        models.recorder = partial(_announced, file, models.tell)
        report = evaluate_models(models)
        (folder,) = (path.parent for path in Path(root).glob("*/index.json"))
        return report, pack(folder, file, _manifest(folder, report, models))


def _manifest(folder: Path, report: Report, models: Models) -> dict[str, Any]:
    """The facts of a recording: model, versions, machine, tasks, and how the model was asked."""
    facts = (read_index(folder) or {})["facts"]
    shared = {name: plain(getattr(report, name)) for name in ("versions", "providers", "hardware", "created", "config")}
    shared["config"].pop("reference", None)
    names = ("path", "kind", "content_hash", SIZE, "max_length", UNJUDGED, *STOP_FACTS)
    return {
        "facts": facts,
        **{name: report.model[name] for name in names if name in report.model},
        **shared,
        "tasks": plain(report.results.get("n-samples", {})),
        **{name: value for made in hooks("recorded_facts").values() for name, value in made(models.candidate).items()},
        PICTURES: pictures_of(models.candidate)[0],
        "asking": asdict(models.prompt_format(models.given_candidate, reads_all=True)),
        "answers": {path.name: read_facts(path) for path in folder.glob("answers_*.jsonl")},
    }


def _announced(
    file: Path, tell: Callable[[str], None], lm: Any, requests: list[Any], ask: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """As `OrtLM.known_answers` of `lm`: says what the requests' records will take, then has them asked. Raises
    `RunError` where the disk has no room."""
    form, kind = lm.session.describe_execution()["records"], requests[0].request_type if requests else ""
    if kind == "loglikelihood":
        positions = sum(len(pending.request.target) for pending in lm.scoring_requests(enumerate(requests)))
    elif kind == "loglikelihood_rolling":
        positions = sum(len(lm.tok_encode(request.args[0])) for request in requests)
    else:
        positions = sum(int(request.args[1].get("max_gen_toks", lm.max_gen_toks)) for request in requests)
    each = form["bytes_per_position"] + TARGET.itemsize
    bytes_ = positions * each + len(requests) * REQUEST.itemsize
    if kind == "generate_until":
        bytes_ += positions * _ANSWER_BYTES
    share = 100 * form["share_of_logits"]
    what = f"{counted(positions, 'position')} of {counted(len(requests), 'request')} ({kind})"
    tell(f"{file}: at most {size(bytes_)} for {what}, {share:.3g} % of their logits")
    if 2 * bytes_ > shutil.disk_usage(file.parent).free:
        raise RunError(f"'{file}': {size(2 * bytes_)} are needed while it is written, and the disk has less")
    return ask(requests)
