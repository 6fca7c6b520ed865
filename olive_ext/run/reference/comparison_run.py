"""Runs the tasks on a model and on its reference, and makes the comparison from both models' results.

    recorded   the reference alone, its distributions to disk    then the model, compared with what is there
    resident   the model, with the reference under every step    then lm-eval once more, for the reference's answers
               (before the model where only some documents are to be drawn)
    answers    the reference by itself, then the model           no distributions: the model is lm-eval's own, or the
                                                                 two models' own files ask them otherwise
    recording  the model, which is the reference itself          its distributions to disk, for models to come
    file       the model, beside records from elsewhere          then lm-eval once more, for the recorded answers
    alone      the model, without a reference

Generated answers: each model gives its own; then the reference's are scored as targets by both. The mode is known
before a model is opened. Knows no session's inside.
"""

from __future__ import annotations

import gc
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from olive_ext.config import INPUT_MODEL, EvaluationConfig
from olive_ext.errors import ContradictionError, RecordsError, UnsupportedError
from olive_ext.model.files.package_config import is_same_path
from olive_ext.registry import hook
from olive_ext.report.changes import name_of
from olive_ext.report.comparison import PERPLEXITY, TRIALS, VARIANT, ClaimResult, Comparison, PromptDiff
from olive_ext.report.metrics import NON_FINITE
from olive_ext.report.page import SIZE
from olive_ext.run.bounds import requested_tasks, timed_costs
from olive_ext.run.models import Models
from olive_ext.run.reference.answers import Answers, changed_answers, read_answers
from olive_ext.run.reference.observer import Observer, ReferenceScores, Weights, score_generated
from olive_ext.run.reference.pairing import compare_answers, compare_texts, without_value
from olive_ext.run.reference.sampled_run import Prompts, ReferenceRun, certain_comparison, lost_documents, run_sampled
from olive_ext.run.sample_logs import Fields, sample_fields
from olive_ext.session.tokenizer_fit import TEMPLATE, excerpts
from olive_ext.stats.compared_fields import TokenClasses

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.backends.task_loading import LoadedTasks
    from olive_ext.session.tokenizer import Tokenizer

Mode = Literal["recorded", "resident", "answers", "recording", "file", "alone"]

MEMORY_FACTOR = 2.0
"""The memory that a model is expected to take, in multiples of its size: weights, unpacked ones, KV cache, logits."""


class TaskRun:
    """The tasks of one evaluation: `run_reference_alone`, `open_candidate`, `run` on that model, `read`, `finish`."""

    def __init__(self, models: Models, mode: Mode, tasks: LoadedTasks, weights: Weights | None = None) -> None:
        self.weights = weights
        """How many documents each one stands for, where only drawn documents are evaluated."""

        self._models, self._mode, self._tasks = models, mode, tasks
        self.reference: ReferenceRun | None = None
        """The reference's run, after `finish`."""

        self.observer: Observer | None = None
        """The observer of the opened candidate."""

        self.samples: Mapping[str, Any] = {}
        self.answers: list[Answers] = []
        self._certainty: ClaimResult | None = None

    def run_reference_alone(self) -> None:
        """Runs the reference, where it runs alone."""
        if self._mode not in ("recorded", "answers"):
            return
        observer = Observer() if self._mode == "recorded" else None
        clock = self._models.clock
        with clock.phase("reference"), closing(self._models.open_reference(observer)) as lm:
            if observer is None:
                self._models.keep_answers(lm)
            self.reference = self._run_reference(lm, observer, is_alone=True)
        del lm
        gc.collect()  # the memory of the evaluated model is watched from here on

    def open_candidate(self) -> LM:
        """The model to evaluate; the caller's to close."""
        if self._mode in ("answers", "alone"):
            return self._models.open_candidate()
        if self._mode == "recording":
            self.observer = Observer()
            return self._models.open_reference(self.observer)
        asks_later = self._mode in ("resident", "file") and not self.is_sampled
        sample = None
        if self._models.is_same_model:
            sample = hook("place_sample", "a reference that is the same model")()
        self.observer = Observer(ReferenceScores() if asks_later else None, sample)
        lm: Any = self._models.open_candidate(self.observer)
        tokenizer = lm.session.tokenizer
        self.observer.classes = TokenClasses(tokenizer.token_text, tokenizer.special_ids)
        return lm

    @property
    def is_sampled(self) -> bool:
        """Whether the model answers only as many documents as make a claim certain."""
        return self._models.config.documents == "enough" and self._mode not in ("recording", "alone")

    def run(self, lm: LM) -> dict[str, Any]:
        """lm-eval's results of the opened candidate, with samples. Where documents are drawn, the reference answers all
        of them before, unless it has."""
        from olive_ext.backends.lm_eval_run import run_tasks

        config, models = self._models.config, self._models
        if not self.is_sampled:
            return run_tasks(lm, self._tasks, config, progress=models.progress)
        with models.clock.phase("reference"):
            reference = self.reference = self.reference or self._run_resident(lm)
        sampled = run_sampled(lm, self.observer, self._tasks, reference, config, progress=models.progress)
        results, self.weights, self._certainty = sampled
        return results

    def read(self, samples: Mapping[str, Any]) -> None:
        """Keeps the samples of the opened candidate's results, and its answers in these."""
        with self._models.clock.phase("statistics"):
            self.samples, self.answers = samples, read_answers(samples, self._tasks.tasks)

    def finish(self, lm: Any) -> Comparison | None:
        """The opened candidate's comparison, after `read`; None without a reference, and where it is that itself."""
        clock, observer = self._models.clock, self.observer
        if self._mode == "alone":
            return None
        if self._mode == "resident":  # it ran under the candidate's steps
            inside = lm.session.describe_execution().get("reference", {}).get("seconds", 0.0)
            clock.move(inside, "candidate", "reference")
        with clock.phase("reference"):
            if self._mode == "recording":
                assert observer is not None
                score_generated(lm, observer.generated)
                return None
            reference = self.reference = self.reference or self._run_resident(lm)
        with clock.phase("candidate" if self._mode == "recorded" else "reference"):
            if observer is not None and self._certainty is None:
                score_generated(lm, reference.generated, observer)
        with clock.phase("statistics"):
            return self._compared(lm, reference)

    def _compared(self, lm: LM, reference: ReferenceRun) -> Comparison:
        observer, weights, samples, own = self.observer, self.weights, self.samples, self.answers
        asked = self._models.prompt_diff if self._mode == "answers" else None
        if asked and TEMPLATE not in asked.what and hasattr(lm, "session"):
            asked = _shown(asked, *self._models.tokenizers, reference.prompts, _prompts(samples))
        facts, matters = {**self._facts(lm), **reference.facts}, self._models.config.matters
        both = reference.answers, own, samples, self._tasks.tasks
        comparison = Comparison(facts, metrics=reference.results, matters=matters)
        comparison = compare_answers(comparison, *both, weights, has_same_prompts=asked is None)
        targets = () if weights is not None else compare_texts(reference.answers, own)
        lost = {*reference.lost, *lost_documents(lm)}
        unread = {at: metric for at, metric in without_value(reference.answers, own).items() if at not in lost}
        comparison = replace(
            comparison,
            divergences=observer.divergences(weights) if observer is not None else (),
            texts=tuple(item for item in targets if item.metric == PERPLEXITY),
            changed_answers=changed_answers(reference.answers, own),
            asked=asked,
            other_template=asked is None and self._models.other_template,
            stops=self._models.stops(lm),
            arguments=_arguments(self._models.config),
            over_all=self._models.config.fail_on_loss is not None,
            non_finite=reference.non_finite + _non_finite(lm),
            missing=reference.num_lost + len(getattr(lm, "lost", ())) + len(unread),
            unread=Counter(name_of(task, metric) for (task, _), metric in unread.items()),
        )
        return comparison if self._certainty is None else certain_comparison(comparison, self._certainty)

    def fields(self) -> Fields:
        """Our fields of the sample logs, after `finish`."""
        answers = self.reference.answers if self.reference is not None else []
        by_document = None if self.observer is None or self._mode == "recording" else self.observer.by_document
        return sample_fields(self._tasks.tasks, self.answers, answers, by_document)

    def _run_resident(self, lm: Any) -> ReferenceRun:
        """Runs lm-eval once more for the reference, whose scores the candidate's run has given; it only generates."""
        assert self.observer is not None
        observer = Observer()
        reference = self._models.open_resident(lm, observer)
        reference.known_answers = self.observer.scores
        if lm.lost and self.observer.scores is not None:  # what the candidate did not answer has no scores
            self.observer.scores.is_partial = True
            reference.lost += lm.lost
        return self._run_reference(reference, observer, is_alone=False)

    def _run_reference(self, lm: Any, observer: Observer | None, *, is_alone: bool) -> ReferenceRun:
        """Runs the tasks on the reference; `is_alone`: not beside the candidate, which scores its generations then."""
        from olive_ext.backends.lm_eval_run import run_tasks

        num_lost = len(getattr(lm, "lost", ()))  # by the candidate
        lm.role = "the reference"
        results = run_tasks(lm, self._tasks, self._models.config, progress=self._models.progress)
        samples = results.pop("samples")
        answers, facts = read_answers(samples, self._tasks.tasks), {}
        prompts = _prompts(samples) if self._mode == "answers" else {}
        if observer is not None and is_alone:
            score_generated(lm, observer.generated)
            facts = {"tokens_fed": int(lm.session.counters.tokens_fed)}
            execution = lm.session.describe_execution()
            facts |= {fact: execution[fact] for fact in TRIALS if execution.get(fact)}
        counts = len(getattr(lm, "lost", ())) - num_lost, _non_finite(lm) if is_alone else 0
        return ReferenceRun(results, answers, observer, lost_documents(lm), prompts, *counts, facts)

    def _facts(self, lm: LM) -> dict[str, Any]:
        reference = self._models.config.reference
        assert reference is not None
        session = getattr(lm, "session", None)
        execution = session.describe_execution().get("reference", {}) if session is not None else {}
        if (file := self._models.records_file) is not None:
            names = ("versions", "providers", "hardware", "created", "content_hash", "kind", SIZE)
            recorded = {name: file.manifest[name] for name in names if name in file.manifest}
            return {"path": reference.path, **execution, **recorded, "mode": "recorded"}
        path = self._models.config.model.path if reference.is_same else reference.path
        facts = {"path": path, "kind": self._models.given_reference.kind, **execution, "mode": self._mode}
        given = self._models.given_reference
        known = {VARIANT: given.files.variant or None, SIZE: given.size}
        facts |= self._models.export_note(reference.path)
        return facts | {name: value for name, value in known.items() if value is not None}


def mode_of(models: Models, lm: LM | None = None) -> Mode:
    """How the models are run: "alone" where there is no reference, or it is the evaluated model itself and nothing is
    to be recorded. "auto" is resident where both models fit in the free memory, can be fed in the same steps, and
    neither speed nor memory is measured. `lm` is an evaluated model that is open already. Raises `ConfigError` for
    settings that exclude each other."""
    config, reference, is_foreign = models.config, models.config.reference, lm is not None
    if reference is None:
        return "alone"
    if reference.is_input_model:
        raise ContradictionError("no workflow has begun: give a model's path", "reference", INPUT_MODEL)
    if models.recorder is not None:
        return "recording"
    if (file := models.records_file) is not None:
        if is_foreign:
            problem = "records cannot be the reference of a model that lm-eval runs itself"
            raise UnsupportedError(problem, "reference", file.path)
        if models.prompt_diff is not None:
            raise RecordsError(f"{models.prompt_diff.sentence()}", "reference", file.path, code="not_comparable")
        return "file"
    if is_own_reference(config, "hf" if is_foreign else models.given_candidate.kind):
        return "alone" if is_foreign or reference.mode != "recorded" else "recording"
    if is_foreign or models.prompt_diff:
        return "answers"
    costs = timed_costs(config)
    if reference.mode == "resident" and costs:
        raise ContradictionError("needs one open model: set 'reference.mode' to 'recorded'", costs[0])
    if reference.mode != "auto" or reference.is_same:
        return "resident" if reference.mode == "auto" else reference.mode
    model, other = models.candidate, models.reference
    # Free memory of other devices is unknown, and so is the size of a model on the hub: such models take turns.
    both = () if costs else (model, other)
    sizes = [one.size for one in both if one.runtime.is_on_host(one) and one.size is not None]
    if len(sizes) < 2 or MEMORY_FACTOR * sum(sizes) > psutil.virtual_memory().available:
        return "recorded"
    # Transformers cannot cut a text where a model has states, and a graph may take one token a step.
    return "recorded" if (other.kind, model.kind) == ("hf", "onnx") and model.spec.states else "resident"


def is_own_reference(config: EvaluationConfig, kind: str) -> bool:
    """Whether a model of this kind is its own reference, so that nothing is compared; two runs of a graph are."""
    return config.reference is not None and kind == "hf" and is_same_path(config.model.path, config.reference.path)


def _arguments(config: EvaluationConfig) -> str:
    assert config.reference is not None
    here = f"{Path.cwd()}{os.sep}"
    tasks = [task for task in requested_tasks(config) if isinstance(task, str)]
    words = [config.model.path, "--reference", config.reference.path, "--tasks", ",".join(tasks) or "TASKS"]
    names = ("include_path", "limit", "num_fewshot", "variant", "seed", "max_length", "system_instruction")
    for name in (*names, "apply_chat_template", "fewshot_as_multiturn"):
        value = getattr(config.model if name == "variant" else config, name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, *value] if isinstance(value, list) else [option, value]
    return shlex.join(str(word).removeprefix(here) for word in words)


def _prompts(samples: Mapping[str, Any]) -> Prompts:
    return {
        (task, line["doc_id"], number): [*accumulate(text for text in arguments[:2] if isinstance(text, str))]
        for task, lines in samples.items()
        for line in lines
        for number, arguments in enumerate(line["arguments"])
    }


def _shown(diff: PromptDiff, one: Tokenizer, two: Tokenizer, reference: Prompts, candidate: Prompts) -> PromptDiff:
    """`diff` with the first texts of both models' requests of which they get other tokens, if there are any."""
    for at, texts in candidate.items():
        for asked, own in zip(reference.get(at, texts), texts, strict=False):
            if (ids := one.encode(asked)) != (other := two.encode(own)):
                both = one.decode(ids, skip_special_tokens=False), two.decode(other, skip_special_tokens=False)
                shown = excerpts(*(both if both[0] != both[1] else (str(ids), str(other))))
                return replace(diff, reference_prompt=shown[0], candidate_prompt=shown[1])
    return replace(diff, are_alike=True)


def _non_finite(lm: Any) -> int:
    """Requests of a model, and of one that is resident with it, whose output was not finite."""
    session = getattr(lm, "session", None)
    if session is None:
        return int(getattr(lm, "counters", {}).get(NON_FINITE, 0))
    return sum(int(each.counters.non_finite) for each in (session, session.reference) if each is not None)
