"""Runs an evaluation beside a reference and puts together what both said.

    recorded   the reference alone, its distributions to disk    then the model, compared with what is there
    resident   the model, with the reference under every step    then lm-eval once more, for the reference's answers
    answers    the reference by itself, then the model           no distributions, since the model is lm-eval's own

Generated answers: each model gives its own; then the reference's are scored as targets by both. Knows no session's
inside.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from olive_ext.config import EvaluationConfig
from olive_ext.report.comparison import Comparison
from olive_ext.run.opening import kind_of
from olive_ext.run.reference.models import Models, reference_config
from olive_ext.run.reference.observer import Generated, Listener, score_answers
from olive_ext.run.reference.pairing import compare_answers
from olive_ext.run.sample_fields import sample_fields
from olive_ext.run.samples import Fields

if TYPE_CHECKING:
    from olive_ext.backends.answers import Answers
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks, Seeds

Mode = Literal["recorded", "resident", "answers"]


@dataclass(frozen=True)
class Side:
    """What is kept of the reference's own run."""

    results: Mapping[str, Any]
    """As lm-eval's, without the samples."""

    answers: list[Answers]
    generated: list[Generated]


class Comparer:
    """One evaluation with a reference: `prepare`, `open`, run lm-eval on that, `finish`, in this order."""

    def __init__(
        self,
        config: EvaluationConfig,
        mode: Mode,
        tasks: LoadedTasks,
        seeds: Seeds,
        progress: bool = False,
        models: Models | None = None,
    ) -> None:
        self._config = config
        self._mode = mode
        self._models = models or Models(config, progress)
        self._tasks = tasks
        self._seeds = seeds
        self._progress = progress
        self._side: Side | None = None
        self._listener: Listener | None = None
        self._tokens_fed: int | None = None
        """By the reference where it ran alone; 0 where its records held everything."""

    def prepare(self) -> None:
        """Runs the reference where it is run alone."""
        if self._mode == "resident":
            return
        listener = Listener() if self._mode == "recorded" else None
        with closing(self._models.reference(listener)) as lm:
            self._side = self._ask(lm, listener)
            if listener is not None:
                score_answers(lm, listener.generated)
                self._tokens_fed = int(lm.session.counters.tokens_fed)
        del lm
        gc.collect()  # the memory of the evaluated model is watched from here on

    def open(self) -> LM:
        """The model to evaluate; the caller's to close."""
        from olive_ext.backends.replay import Heard

        if self._mode != "answers":
            self._listener = Listener(Heard() if self._mode == "resident" else None)
        lm = self._models.candidate(self._listener)
        if self._listener is not None:
            self._listener.learn_tokens(lm)
        return lm

    def finish(self, lm: LM, results: Mapping[str, Any]) -> Comparison:
        """What was found; `lm` is what `open` gave, `results` lm-eval's for it, with samples."""
        from olive_ext.backends.answers import read_answers

        side = self._side = self._side or self._replay(lm)
        listener = self._listener
        if listener is not None:
            score_answers(lm, side.generated, listener.observed)
        own = read_answers(results["samples"], self._tasks.tasks)
        outcomes, flips = compare_answers(side.answers, own, results["samples"], self._tasks.tasks)
        return Comparison(
            reference=self._facts(lm),
            divergences=listener.observed.divergences() if listener is not None else (),
            outcomes=outcomes,
            flips=flips,
            metrics=side.results,
        )

    def fields(self) -> Fields:
        """What is added to the sample logs, behind `finish`."""
        answers = self._side.answers if self._side is not None else []
        observed = self._listener.observed if self._listener is not None else None
        return sample_fields(self._tasks.tasks, answers, observed)

    def _replay(self, lm: LM) -> Side:
        """Lets lm-eval ask once more what the reference has said already; it generates its own answers now."""
        from olive_ext.backends.replay import ReplayLM

        assert self._listener is not None
        assert self._listener.heard is not None
        beside = Listener()
        generator = self._models.beside(lm, beside)
        return self._ask(ReplayLM(self._listener.heard, lm, generator), beside)

    def _ask(self, lm: LM, listener: Listener | None) -> Side:
        from olive_ext.backends.answers import read_answers
        from olive_ext.backends.lm_eval_run import run_tasks

        results = run_tasks(lm, self._tasks, self._config, seeds=self._seeds, progress=self._progress, log_samples=True)
        answers = read_answers(results.pop("samples"), self._tasks.tasks)
        return Side(results, answers, listener.generated if listener is not None else [])

    def _facts(self, lm: LM) -> dict[str, Any]:
        reference = self._config.reference
        assert reference is not None
        session = getattr(lm, "session", None)
        said = session.describe_execution().get("reference", {}) if session is not None else {}
        facts = {"path": reference.path, "kind": kind_of(reference_config(self._config)), **said, "mode": self._mode}
        return facts if self._tokens_fed is None else {**facts, "tokens_fed": self._tokens_fed}
