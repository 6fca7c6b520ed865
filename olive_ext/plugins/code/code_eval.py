"""`code_eval` of Hugging Face's evaluate, with which lm-eval's tasks of code are scored: offline, each program in a
sandbox, the programs of a whole task at once.

What it computes is that library's: the same arguments, results and estimator. Knows no model.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from olive_ext.backends.code_eval import SWITCH
from olive_ext.backends.samples import pass_at
from olive_ext.errors import RunError

if TYPE_CHECKING:
    from olive_ext.plugins.code.sandbox import Outcome, Sandbox

_TIMEOUT_S = 3.0
"""evaluate's default. There it is by the clock; here it is time of the processor, so that a busy machine changes no
score."""

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
        from olive_ext.plugins.code.sandbox import Sandbox

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
        return passes, defaultdict(list, {task: _results(task, several) for task, several in enumerate(ended)})

    def run(self, programs: Sequence[Program]) -> None:
        """Runs those that were not run yet, in parallel."""
        new = [program for program in dict.fromkeys(programs) if program not in self._outcomes]
        for seconds in dict.fromkeys(seconds for _, seconds in new):
            alike = [program for program in new if program[1] == seconds]
            outcomes = self.sandbox.run([text for text, _ in alike], seconds)
            self._outcomes.update(zip(alike, outcomes, strict=True))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it, programs are only noted; they run after it."""
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


def _results(task: int, ended: Sequence[Outcome]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (number, {"task_id": task, "passed": one.passed, "result": one.result, "completion_id": number})
        for number, one in enumerate(ended)
    ]
