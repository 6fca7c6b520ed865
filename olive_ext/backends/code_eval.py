"""`code_eval` of Hugging Face's evaluate, by which lm-eval's tasks of code are scored: offline, each program in a
sandbox, those of a whole task at once. Tasks that run code, and the switch without which they are refused.

What it computes is that library's: the same arguments, results and estimator. Knows no model.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.backends.samples import pass_at
from olive_ext.errors import RunError, TaskError

if TYPE_CHECKING:
    from olive_ext.sandbox import Outcome, Sandbox

logger = logging.getLogger(__name__)

SWITCH = "confirm_run_unsafe_code"

CODE = "code"
"""Key of the results that says how code that the model has written was confined, where any was run."""

_TIMEOUT_S = 3.0
"""evaluate's default, by the clock; of the processor here, so that a busy machine changes no score."""

Program = tuple[str, float]
"""A text, and the seconds that it may take."""

Results = tuple[dict[str, Any], dict[int, list[tuple[int, dict[str, Any]]]]]
"""pass@k by name, and by number of the task each program's number with how it ended."""


class CodeEval:
    """The metric. A program is a prediction, a line break, and its reference: equal ones are run once an evaluation."""

    def __init__(self) -> None:
        self._outcomes: dict[Program, Outcome] = {}
        self._noted: list[Program] | None = None

    @cached_property
    def sandbox(self) -> Sandbox:
        """Opened when it is first needed, which takes 0.1 s. Raises `RunError` where programs cannot be confined."""
        if sys.platform != "linux":
            raise RunError(f"'{SWITCH}' = true: code is confined on Linux alone, not on '{sys.platform}'")
        from olive_ext.sandbox import Sandbox

        return Sandbox()

    def compute(
        self,
        predictions: Sequence[Sequence[str]],
        references: Sequence[str],
        k: Sequence[int] = (1, 10, 100),
        num_workers: int = 4,
        timeout: float = _TIMEOUT_S,
    ) -> Results:
        """As evaluate's. `num_workers` changes nothing: as many run at once as there are cores. `timeout`: seconds of
        the processor, rounded up."""
        programs = [
            [(f"{answer}\n{test}", timeout) for answer in answers]
            for answers, test in zip(predictions, references, strict=False)
        ]
        if self._noted is not None:
            self._noted += [program for several in programs for program in several]
            return {f"pass@{number}": 0.0 for number in k}, {}
        self.run([program for several in programs for program in several])
        ended = [[self._outcomes[program] for program in several] for several in programs]
        counts = [(len(several), sum(outcome.passed for outcome in several)) for several in ended]
        passes = {
            f"pass@{n}": np.mean([pass_at(n, total, right) for total, right in counts])
            for n in k
            if all(total >= n for total, _ in counts)
        }
        return passes, defaultdict(list, {task: _told(task, several) for task, several in enumerate(ended)})

    def run(self, programs: Sequence[Program]) -> None:
        """Runs those that were not run yet, in parallel."""
        new = [program for program in dict.fromkeys(programs) if program not in self._outcomes]
        for seconds in dict.fromkeys(seconds for _, seconds in new):
            alike = [program for program in new if program[1] == seconds]
            outcomes = self.sandbox.run([text for text, _ in alike], seconds)
            self._outcomes.update(zip(alike, outcomes, strict=True))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is computed in the block is noted only, and run behind it."""
        noted: list[Program] = []
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None
        self.run(noted)

    def forget(self) -> None:
        """Forgets how programs ended."""
        self._outcomes.clear()


CODE_EVAL = CodeEval()
"""The one that tasks get: lm-eval keeps a task's Python, and what that has loaded, as long as the process lives."""


def _told(task: int, ended: Sequence[Outcome]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (number, {"task_id": task, "passed": one.passed, "result": one.result, "completion_id": number})
        for number, one in enumerate(ended)
    ]


@contextmanager
def loading_metrics(is_confirmed: bool) -> Iterator[None]:
    """What loads a metric of evaluate meanwhile gets none of the working directory's, which evaluate looks for first;
    and with the switch for "code_eval" it gets `CODE_EVAL`, without a download."""
    if not is_confirmed and not _has_scripts(Path.cwd()):
        yield  # importing evaluate takes seconds
        return
    evaluate: Any = importlib.import_module("evaluate")
    own = evaluate.load

    @wraps(own)
    def load(path: str, *args: Any, **options: Any) -> Any:
        if path == "code_eval" and is_confirmed:
            return CODE_EVAL
        script = Path(path) / f"{Path(path).name}.py"
        if not path.startswith((".", "/")) and script.is_file():
            where = f"'{script}' of the working directory would be run for it: rename that, or work elsewhere"
            raise TaskError(f"a task asks for the metric '{path}' of evaluate, and {where}")
        return own(path, *args, **options)

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = own


def _has_scripts(folder: Path) -> bool:
    """Whether a folder in it, or one in that, holds Python of its own name: "name", or "owner/name"."""
    folders = [item for pattern in ("*/", "*/*/") for item in folder.glob(pattern)]
    return any((item / f"{item.name}.py").is_file() for item in folders)


def refuse_unconfirmed(config: Mapping[str, Any], name: str, is_confirmed: bool) -> None:
    """Raises `TaskError` for a task that runs what a model has written, unless that is confirmed."""
    if config.get("unsafe_code") and not is_confirmed:
        raise TaskError(f"task '{name}' runs code that the model writes: '{SWITCH}' = true allows it, in a sandbox")


def refuse_unconfined(tasks: Mapping[str, Any], is_confirmed: bool) -> None:
    """Raises `TaskError` for a loaded task that runs code without the switch, or by other means than `CODE_EVAL`."""
    for name, task in _running(tasks).items():
        refuse_unconfirmed({"unsafe_code": True}, name, is_confirmed)
        made = [*getattr(task, "_metric_fn_list", {}).values(), getattr(task.config, "process_results", None)]
        functions = [getattr(item, "__self__", item) for item in made]  # lm-eval keeps a function's `__call__`
        if not any(value is CODE_EVAL for one in functions for value in getattr(one, "__globals__", {}).values()):
            own = "by Python of its own, not by 'code_eval': there is no sandbox for it"
            raise TaskError(f"task '{name}' runs code that the model writes {own}")


def _running(tasks: Mapping[str, Any]) -> dict[str, Any]:
    return {name: task for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)}


def pass_names(task: Any) -> list[str]:
    """The metrics that a task's functions make of the `k` that they are given: lm-eval knows the functions' names."""
    given = getattr(task, "_metric_fn_kwargs", {}).values() if getattr(task, "UNSAFE_CODE", False) else ()
    counts = [options.get("k", ()) for options in given]
    return [f"pass@{k}" for several in counts for k in (several if isinstance(several, list) else [several])]


@contextmanager
def programs_at_once(tasks: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """While an evaluation runs, the programs of all documents of a task run at once, before lm-eval scores them one by
    one. Gives what a report is to say: how code was confined, where any task runs it."""
    running = _running(tasks)
    if not running:
        yield {}
        return
    description = CODE_EVAL.sandbox.description
    logger.log(
        logging.INFO if CODE_EVAL.sandbox.mode == "namespaces" else logging.WARNING,
        "%s: generated code is confined by %s", ", ".join(running), description,
    )  # fmt: skip
    with ExitStack() as undo:
        undo.callback(CODE_EVAL.forget)
        for task in running.values():
            undo.enter_context(_scored_at_once(task))
        yield {"generated_code": description}


@contextmanager
def _scored_at_once(task: Any) -> Iterator[None]:
    own = task.apply_filters

    def apply_filters(*args: Any, **options: Any) -> Any:
        filtered = own(*args, **options)
        documents: dict[int, list[Any]] = defaultdict(list)
        for instance in sorted(task.instances, key=lambda item: item.idx):
            documents[instance.doc_id].append(instance)
        with CODE_EVAL.at_once():
            for requests in documents.values():
                for key in requests[0].filtered_resps:
                    with suppress(Exception):  # raised where lm-eval scores the document
                        task.process_results(requests[0].doc, [item.filtered_resps[key] for item in requests])
        return filtered

    task.apply_filters = apply_filters
    try:
        yield
    finally:
        del task.apply_filters
