"""A run of Olive's engine from its refusals to its outcome, also in a container of Olive's Docker system; and
`olive-ext run`: `olive run` with this package's types, and with failures that count. Knows no model."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from olive_ext.check.recipe import mistakes, plain_path
from olive_ext.config.yaml_files import read_recipe
from olive_ext.errors import ConfigError, OliveExtError, RequirementError, RunError, one_line, printable, raised_at
from olive_ext.registry import hooks
from olive_ext.report import Report, from_json
from olive_ext.report.page import PASSES
from olive_ext.report.plain_text import print_lines, print_verdicts
from olive_ext.report.report_files import page_of_report
from olive_ext.report.verdict import EXIT_STATUS, Verdict, worst_status
from olive_ext.workflow.current_run import OUTCOME, Run, logger, running
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.passes import publish
from olive_ext.workflow.preflight import has_only_costs, is_ours, our_evaluators, our_passes, references, refuse

_FILES = ("chain.md", "chain.json", "metrics.json", "footprint.json")

_watchers: list[list[Run]] = []


@contextmanager
def watched_runs() -> Iterator[list[Run]]:
    """All engine runs that end within, in any thread."""
    runs: list[Run] = []
    _watchers.append(runs)
    try:
        yield runs
    finally:
        _watchers.remove(runs)


def note_ended(run: Run) -> None:
    """Tells whoever watches of a run that has ended."""
    for runs in _watchers:
        runs.append(run)


def run(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine.run`: refuses what cannot work before it runs, and raises errors that Olive only logs."""
    output_dir = Path(arguments.get("output_dir") or ".").resolve()
    model = arguments["input_model_config"]
    if isinstance(path := model.config.get("model_path"), Mapping):
        model = model.model_copy(update={"config": {**model.config, "model_path": plain_path(path)}})
    answers = str(engine.cache.dirs.evaluations / "answers")
    begun = Run(model, output_dir, answers=answers, is_search=bool(engine.search_strategy))
    evaluates_input = arguments.get("evaluate_input_model", True)
    token = running.set(begun)
    try:
        refuse(engine, begun.input_model, evaluate_input_model=evaluates_input)
        begun.watch(reference for _, reference in references(engine))
        with _logged(engine, begun):
            output = original(input_model_config=model)
            if any(our_passes(engine)):
                publish(engine, begun, output)
            note_unmeasured(engine, begun, output)
    except RequirementError:  # of a pass, whose model and report are saved
        print_results(begun)
        begun.hand_over()
        raise
    except SystemExit as end:  # else it ends the command with its own status, 0 for one
        raise RunError(f"code that the recipe runs ended the process: {one_line(end)}{raised_at(end)}") from end
    finally:
        running.reset(token)
    print_results(begun)
    if engine.input_passes_configs:  # Olive logs every error but a user's, and goes on without model or numbers
        begun.gave_up = not output.has_output_model()
    elif engine.evaluator_config and evaluates_input:
        begun.gave_up = output.get_input_model_metrics() is None
    note_ended(begun)
    begun.hand_over()
    if begun.gave_up and begun.failures:
        raise begun.failures[0]  # a search logs every failure and ends well
    if begun.is_search:
        refuse_no_output(engine, output)
    if begun.broken is not None:
        raise begun.broken
    return output


def print_results(run: Run) -> None:
    """Prints the verdicts and the pages' paths after a run. The report of a pass is next to the output model; of
    passes, those on the output model have their verdicts printed, else the last one; and `failed_gates`."""
    beside = sorted(run.artifacts.glob("report*.html"), key=lambda file: file.stat().st_mtime_ns)
    results: dict[Any, tuple[Report, Path | None]] = {}
    failed = failed_gates(run)
    for number, report in enumerate(run.reports):
        own = page_of_report(report)
        is_failed = report in failed
        place = number if is_failed else max(number, run.num_earlier)
        results[own or place] = report, own or (beside[-1] if beside and not is_failed else None)
    print_verdicts(list(results.values()))
    if run.unmeasured:
        print_lines([f"the output model was not evaluated {run.unmeasured}"])


def note_unmeasured(engine: Any, run: Run, output: Any) -> None:
    """Notes what a recipe that evaluates leaves out: Olive runs no evaluator on the output model but the last pass's.
    Costs say nothing of answers."""
    best = output.get_best_candidate() if run.made_by else None
    if best is None or not (made := run.made_by.get(best.model_id)):
        return
    evaluators = list(our_evaluators(engine))
    last = [*engine.input_passes_configs.values()][-1][0].evaluator or engine.evaluator_config
    of_output = (report.comparison for report in run.reports[run.num_earlier :])
    is_decided = "fail_on_loss" in _bounds(last) or any(one is not None and one.over_all for one in of_output)
    unheld = ((where, key) for where, one in evaluators if one != last for key in _bounds(one))
    if bound := next((item for item in unheld if not (is_decided and item[1] == "fail_on_loss")), None):
        run.unmeasured, run.is_undecided = "by '{}', which has '{}'".format(*bound), True
    elif run.measured is not None or not all(has_only_costs(one) for _, one in evaluators):
        later = made[len(run.measured or ()) :]
        is_measured = not later or (is_ours(last) and not has_only_costs(last))
        run.unmeasured = "" if is_measured else f"after {run.described(later)}"


def _bounds(evaluator: Any) -> list[str]:
    """The keys of an evaluator of ours by which it fails an output model."""
    keys = evaluator.type_args if is_ours(evaluator) else {}
    return [key for key in ("fail_on_loss", "require", "certain") if keys.get(key) not in (None, [])]


@contextmanager
def _logged(engine: Any, run: Run) -> Iterator[None]:
    """A run of MLflow for the workflow, the parent of those of its evaluations."""
    is_ours = any(our_evaluators(engine)) or any(our_passes(engine))
    with ExitStack() as logging_runs:
        for logged_run in hooks("logged_run").values() if is_ours else ():
            logged = logging_runs.enter_context(logged_run(run.artifacts.name, is_parent=True))
            logged.files += [run.artifacts / name for name in _FILES]
        yield


def refuse_no_output(engine: Any, output: Any) -> None:
    """Raises `RequirementError` where candidates were evaluated and none meets our evaluators' goals: Olive 0.13 ends a
    search without a model as a success."""
    if output.has_output_model() or not any(our_evaluators(engine)):
        return
    nodes = [node for node in output.footprint.nodes.values() if node.metrics and node.parent_model_id is not None]
    goals = {name: item for name, item in output.footprint.objective_dict.items() if item.get("goal") is not None}
    if nodes and goals:
        near = []
        for name, item in goals.items():
            values = [node.metrics.value[name].value for node in nodes]
            best, sign = (max(values), ">=") if item["higher_is_better"] else (min(values), "<=")
            near.append(f"{name} {sign} {item['goal']:g} (best {best:g})")
        raise RequirementError(f"none of {len(nodes)} candidates of the search meets all goals: {', '.join(near)}")


def deciding(run: Run) -> Iterator[Verdict]:
    """The verdicts on the output model, or the last one on an earlier model, that are a loss or that `fail_on_loss`
    asks for: where nothing else is decided, the model is made. And those of `failed_gates`."""
    for report in [*failed_gates(run), *(run.reports[run.num_earlier :] or run.reports[-1:])]:
        verdict, comparison = report.verdict, report.comparison
        if verdict is not None and comparison is not None and (verdict.status == "loss" or comparison.over_all):
            yield verdict


def failed_gates(run: Run) -> list[Report]:
    """The reports of passes with `fail_on_loss` or a claim that found a loss in a model that a later pass changed: the
    output model was made of it."""
    of_passes = [] if run.is_search else [one for one in run.reports[: run.num_earlier] if PASSES in one.model]
    lost = [one for one in of_passes if one.verdict is not None and one.verdict.status == "loss"]
    return [one for one in lost if one.comparison and (one.comparison.over_all or one.comparison.certainty)]


def cli_run(argv: Sequence[str]) -> int:
    """Runs `olive run` with `argv` and returns its exit code; 1 where Olive logged a failure and went on; where no
    search tried models, that of the verdicts: 1 for a loss, 3 where `fail_on_loss` is not decided.

    Raises `OliveExtError` for a user's error, in one line.
    """
    from olive.cli.launcher import main

    with watched_runs() as runs, _logged_errors() as reasons:
        try:
            main(["run", *argv])
        except SystemExit as end:  # argparse: --help, or wrong arguments, which it has printed
            return end.code if isinstance(end.code, int) else 1
        except ValidationError as error:
            raise ConfigError(f"the recipe is not valid: {_problems(error)}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"the recipe is not valid JSON: {error}", code="damaged") from error
        except FileNotFoundError as error:
            raise ConfigError(f"'{error.filename}': no such file", code="not_found") from error
    if not any(run.gave_up for run in runs):
        status = worst_status(verdict for run in runs if not run.is_search for verdict in deciding(run))
        return status or (EXIT_STATUS["unknown"] if any(run.is_undecided for run in runs) else 0)
    logger.error("Olive went on without a model or its metrics: %s", reasons[-1] if reasons else "see its log")
    return 1


def end_in_lines() -> None:
    """In the process of `olive run`, an error of this package is one line, without a traceback, and any other is
    followed by the mistakes that the recipe's text shows. `OLIVE_EXT_DEBUG` keeps Python's tracebacks."""
    script = Path(sys.argv[0])
    if "olive" not in (script.stem, script.parent.name) or os.environ.get("OLIVE_EXT_DEBUG", "") not in ("", "0"):
        return
    hook = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        lines = [str(error)]
        if not isinstance(error, OliveExtError):
            hook(kind, error, trace)
            lines = []
            parser = ArgumentParser(add_help=False, allow_abbrev=False)
            parser.add_argument("--config", "--run-config", dest="config", default="")
            with suppress(OliveExtError):
                recipe = read_recipe(parser.parse_known_args(sys.argv[1:])[0].config)
                lines = [f"the recipe is wrong: {mistake}" for mistake in mistakes(recipe)]
        for line in lines:
            sys.stderr.write(f"olive-ext: error: {printable(' '.join(line.split()))}\n")

    sys.excepthook = end


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    reasons: list[str] = []
    handler, olive = logging.Handler(logging.WARNING), logging.getLogger("olive")

    def emit(record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))

    handler.emit = emit  # type: ignore[method-assign]
    olive.addHandler(handler)
    try:
        yield reasons
    finally:
        olive.removeHandler(handler)


def _problems(error: ValidationError) -> str:
    """Each problem with its place; Olive repeats a broken evaluator as "Invalid evaluators" of the engine."""
    problems = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    ]
    real = [problem for problem in problems if not problem.endswith(": Invalid evaluators")]
    return "; ".join(real or problems)


def run_in_container(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> None:
    """The hook of `DockerSystem.run_workflow`: this machine's process runs no engine and sees a log; what the container
    has found comes back in a file, through a mounted folder, counts here, and is printed. Where there is none
    (olive_ext there is another release, or missing), the workflow is not decided. Raises `RequirementError` for a
    container that failed and has found a loss, `RunError` for any other that failed."""
    recipe = arguments["run_config"]
    asked = SimpleNamespace(evaluator_config=recipe.engine.evaluator, input_passes_configs=recipe.passes)
    if not any(our_evaluators(asked)) and not any(our_passes(asked)):
        original()
        return
    run_container, environment = system._run_container, system._prepare_environment
    place, stopped = system.work_dir / "olive_ext", None
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as folder:

        def run_mounted(command: str, volumes: list[str], device: Any = None) -> None:
            run_container(command, [*volumes, f"{folder}:{place}"], device=device)

        system._run_container = run_mounted
        system._prepare_environment = lambda given: {**environment(given), OUTCOME: str(place / "outcome.json")}
        try:
            with surfaced("the workflow in the container stopped"):
                original()
        except RunError as error:
            stopped = error
        ended = Run(recipe.input_model, Path(recipe.engine.output_dir or "."))
        file = Path(folder, "outcome.json")
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            ended.reports = [from_json(text) for text in known.pop("reports")]
            vars(ended).update(known)
        elif stopped is None:
            ended.unmeasured, ended.is_undecided = "by this release of olive_ext, which the container has not", True
    print_results(ended)
    note_ended(ended)
    if stopped is not None:
        is_lost = not ended.is_search and any(verdict.status == "loss" for verdict in deciding(ended))
        raise RequirementError(str(stopped), ended.reports[-1]) if is_lost else stopped
