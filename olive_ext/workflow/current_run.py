"""The run of Olive's engine that is in progress: state that passes and evaluators cannot reach from where Olive calls
them, and the model it starts from as `"reference": "input_model"`. Opens no session.

The processes of a PythonEnvironment system know Olive's own passes and nothing of the workflow. Hooks pass on to them
what is known of the run, and make this file run in place of Olive's script for passes: it registers our types and then
runs that script. The environment needs this package, too.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from olive_ext.check.recipe import of_input_model
from olive_ext.config import AT_HAND, EXPORT, INPUT_MODEL, EvaluationSettings, ModelSettings, ReferenceConfig
from olive_ext.errors import ConfigError, ContradictionError, MismatchError, OliveExtError, RequirementError, RunError
from olive_ext.graph.nodes import quantizing_operator
from olive_ext.model import resolve
from olive_ext.model.files.content import load_graph, read_files
from olive_ext.model.files.model_package import is_package
from olive_ext.report import Report, from_json, to_json
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import Reason

OUTCOME = "OLIVE_EXT_OUTCOME"
"""Names the variable that holds the path of a file for what a workflow has found: it runs in a container."""

IN_PROGRESS = "OLIVE_EXT_RUN"
"""Names the variable that holds the run in progress, as JSON: input model, `_KNOWN`, and the file of the report."""

_HANDED_OVER = ("gave_up", "is_search", "is_undecided", "num_earlier", "unmeasured")
_KNOWN = ("answers", "current", "is_search", "made_by", "model_id", "types")

logger = logging.getLogger("olive.olive_ext")
"""The logger of this package, a child of Olive's: its messages appear in Olive's log, at the recipe's severity."""


@dataclass
class Run:
    """One call of `Engine.run`."""

    input_model: Any
    """Olive's configuration of the model that the recipe starts from."""

    output_dir: Path = field(default_factory=Path)
    """Where Olive saves the output model: a folder, or a file in one."""

    answers: str | None = None
    """Path stem of the journal, in Olive's cache, of evaluations that name none and take no times; None keeps none."""

    begun: int = field(default_factory=time.time_ns)
    """When the run began, in nanoseconds."""

    is_anew: bool = False
    """Whether the pass that is running gives nothing of an earlier run."""

    is_search: bool = False
    failures: list[OliveExtError] = field(default_factory=list)
    """Errors of our passes and evaluations; a search logs them and goes on."""

    gave_up: bool = False
    """Whether the engine ended without a model or its numbers, and raised nothing."""

    reports: list[Report] = field(default_factory=list)
    """The reports of the evaluations, in their order."""

    report_file: str | None = None
    """Where another process, in which the workflow runs, reads the report."""

    num_earlier: int = 0
    """How many of the reports are of models that a later pass changed."""

    broken: RequirementError | None = None
    """Bounds that the output model breaks, to be raised once it is saved."""

    made_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model id to the names of the passes that made it, without ours, which change nothing."""

    measured: tuple[str, ...] | None = None
    """The passes before the output model's last measurement by a pass that had more than costs; None without one."""

    unmeasured: str = ""
    """By which evaluator, or after which passes, the output model was not evaluated."""

    is_undecided: bool = False
    """Whether the only evaluators with `fail_on_loss` did not run on the output model."""

    types: dict[str, str] = field(default_factory=dict)
    """Type of each pass that ran, by its name."""

    current: tuple[str, ...] = ()
    """The passes that made the model on which a pass is running."""

    lineages: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Model id to Olive's configurations of the models that it was made from, itself last."""

    model_id: str = ""
    """The id of the model that is evaluated, or that a pass is running on."""

    watched: dict[Path, tuple[int, ...] | None] = field(default_factory=dict)
    """The files that the recipe's references on this machine are read from, with what they were when the run began."""

    def watch(self, references: Iterable[ReferenceConfig]) -> None:
        """Notes the files of references before the first pass runs."""
        for reference in references:
            with suppress(ConfigError):  # which its evaluation says
                named = of_input_model(reference, self.input_model.type, self.input_model.config)
                models = [named, *([ReferenceConfig(path=named.float_model)] if named.float_model else [])]
                self.watched |= {file: _facts(file) for model in models for file in files_of(model)}

    @contextmanager
    def unchanged(self, reference: ReferenceConfig | None) -> Iterator[None]:
        """A block in which a model is compared with a reference. Raises `MismatchError` where, before the block or
        after it, a file is not what it was when the run began: a pass may have written the model over it, which would
        then be compared with itself."""
        self._refuse_changed(reference)
        yield
        self._refuse_changed(reference)

    def _refuse_changed(self, reference: ReferenceConfig | None) -> None:
        changed = [file for file, facts in self.watched.items() if _facts(file) != facts]
        if reference is not None and changed:
            problem = f"'{changed[0]}' has changed since the workflow began; give another copy's path"
            raise MismatchError(problem, "reference", reference.path)

    def add(self, report: Report) -> None:
        """Adds the report of an evaluation that has ended."""
        self.reports.append(report)
        if self.report_file is not None:
            Path(self.report_file).write_text(to_json(report), encoding="utf-8")

    def hand_over(self) -> None:
        """Writes what the workflow has found to the file that whoever started its container reads, if it is in one."""
        if path := os.environ.get(OUTCOME):
            outcome = {name: getattr(self, name) for name in _HANDED_OVER}
            text = json.dumps({**outcome, "reports": [to_json(report) for report in self.reports]})
            Path(path).write_text(text, encoding="utf-8")

    def described(self, passes: Sequence[str]) -> str:
        """What was done to a model by `passes`, each with its type and its name."""
        texts = [" ".join(dict.fromkeys([self.types.get(name, name), name])) for name in passes]
        return " → ".join(texts) or "input model"

    @property
    def lineage(self) -> tuple[Any, ...]:
        """Olive's configurations of the models that the current one was made from, itself last."""
        return self.lineages.get(self.model_id, (self.input_model,))

    def as_saved(self, comparison: Comparison) -> Comparison:
        """The comparison, in whose commands an output model has the path that it will have."""
        words = shlex.split(comparison.arguments)
        if self.made_by.get(self.model_id) and not self.is_search:
            words[0] = str(self.output_dir).removeprefix(f"{Path.cwd()}{os.sep}")
        return replace(comparison, arguments=shlex.join(words))

    @property
    def artifacts(self) -> Path:
        """The folder of the files that Olive writes next to the output model."""
        is_file = self.output_dir.suffix and not self.output_dir.is_dir()
        return self.output_dir.parent if is_file else self.output_dir


def files_of(reference: ReferenceConfig) -> list[Path]:
    """The files on this machine that a reference is read from; none of one that is known by name or cannot be opened.
    Of a package whose variant a provider chooses they are those of all variants."""
    path = Path(reference.path)
    if not path.exists():
        return []
    if reference.is_records or (reference.variant is None and is_package(path)):
        return [file for file in sorted({path, *path.rglob("*")}) if file.is_file()]
    which = reference.model_dump(include={"kind", "onnx_file_name", "variant", "components", "tokenizer"})
    try:
        return sorted(read_files(resolve(ModelSettings(model=reference.path, **which)).files).values())
    except OliveExtError:  # opening it will say so
        return []


def _facts(file: Path) -> tuple[int, ...] | None:
    """Size, time and place of a file that is there. Not the time of its status: Olive links to it."""
    with suppress(FileNotFoundError):
        facts = file.stat()
        return facts.st_size, facts.st_mtime_ns, facts.st_ino
    return None


running: ContextVar[Run | None] = ContextVar("running", default=None)


@contextmanager
def recorded_failures() -> Iterator[None]:
    """Adds an `OliveExtError` that leaves the block to the failures of the run in progress."""
    try:
        yield
    except OliveExtError as error:
        if (run := running.get()) is not None:
            run.failures.append(error)
        raise


def requirement_error(where: str, broken: Sequence[Reason], report: Any = None) -> RequirementError:
    """The error for broken bounds of a `report`. In a search, which goes on, Olive's log has it."""
    error = RequirementError(f"a bound of '{where}' is broken: {'; '.join(item.words for item in broken)}", report)
    if (run := running.get()) is not None and run.is_search:
        logger.error("%s", error)
    return error


def input_model_path() -> str | None:
    """Path of the model that the running recipe starts from; None outside of a run."""
    run = running.get()
    path = run.input_model.config.get("model_path") if run is not None else None
    return path if isinstance(path, str) else None


def with_reference(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings in which "input_model" as the reference, and a float model at hand, are replaced by their paths; the
    same object where there is neither."""
    reference = settings.reference
    if reference is None:
        return settings
    replaced, run = settled(reference), running.get()
    if replaced is reference:
        return settings
    is_lacking = reference.float_model == AT_HAND and replaced.float_model is None
    if is_lacking and run is not None and _is_onnx(run.lineage[-1]):
        logger.warning(
            "'reference.float_model' = '%s': no float ONNX model is among those that this one was made from, so that "
            "its stages are not reported; '%s' makes one of the checkpoint",
            *(AT_HAND, EXPORT),
        )
    return settings.model_copy(update={"reference": replaced})


def settled(reference: ReferenceConfig) -> ReferenceConfig:
    """The reference with "input_model" replaced by that model's path, and a float model at hand by that of the last one
    among the current model and those that it was made from, or left out where there is none; others unchanged. Raises
    `ConfigError` where the input model is not known, or where its path alone does not define it."""
    run, paths = running.get(), {reference.path, reference.float_model}
    if reference.float_model == AT_HAND:
        if run is None:
            how = f"no workflow is running: give its path, or '{EXPORT}'"
            raise ContradictionError(how, "reference.float_model", AT_HAND)
        files = (Path(model.create_model().model_path) for model in reversed(run.lineage) if _is_onnx(model))
        last = next((str(file) for file in files if not quantizing_operator(load_graph(file))), None)
        reference = reference.model_copy(update={"float_model": last})
    if INPUT_MODEL not in paths:
        return reference
    if run is None:
        raise ContradictionError("no workflow is running: give the model's path", "reference", INPUT_MODEL)
    return of_input_model(reference, run.input_model.type, run.input_model.config)


def _is_onnx(model: Any) -> bool:
    return bool(model.type.lower() == "onnxmodel")


def evaluate_in_environment(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `PythonEnvironmentSystem.evaluate_model`: the process's report becomes one of the run."""
    run, environ = running.get(), system.environ
    if run is None:
        return original()
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as folder:
        file = Path(folder, "report.json")
        known = {"input_model": run.input_model.to_json(), "report_file": str(file)}
        system.environ = {**environ, IN_PROGRESS: json.dumps(known | {name: getattr(run, name) for name in _KNOWN})}
        try:
            return original()
        finally:
            system.environ = environ
            if file.is_file():
                run.reports.append(from_json(file.read_text(encoding="utf-8")))


def run_in_environment(system: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `PythonEnvironmentSystem.run_pass`. Raises `RunError` with the last line that the process wrote."""
    from olive_ext.workflow.preflight import is_our_pass

    name = type(arguments["the_pass"]).__name__
    if not is_our_pass(name):
        return original()
    own, system.pass_runner_path = system.pass_runner_path, Path(__file__)
    try:
        return evaluate_in_environment(system, arguments, original)
    except subprocess.CalledProcessError as error:
        reason = bytes(error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"{name} failed in the environment's process: {''.join(reason) or error}") from error
    finally:
        system.pass_runner_path = own


def restore_run() -> None:
    """Makes the workflow's run the one in progress, if this is a process of its PythonEnvironment system."""
    from olive.model import ModelConfig

    if written := os.environ.get(IN_PROGRESS):
        known = json.loads(written)
        running.set(Run(ModelConfig.model_validate(known.pop("input_model")), **known))


def main() -> None:
    """Olive's script for passes, with ours registered."""
    from olive.systems.python_environment import pass_runner

    import olive_ext.workflow

    olive_ext.workflow.register()
    pass_runner.main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are part of a package
    main()
