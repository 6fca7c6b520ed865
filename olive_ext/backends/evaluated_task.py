"""lm-eval's tasks as they are evaluated, each of a class of its own: what goes wrong with a document is raised with its
number; a document with a lost request counts in no metric; chosen documents have the prompts of a run over all; and
pictures and sounds of examples ("shots"), of which lm-eval keeps the texts and a marker for each, reach the model.

Also several answers to each document of a task that generates (`repeats`): metrics of the task over all of them, and
how long answers are. lm-eval scores each document's first answer. A document gives one value of each metric, so that
lm-eval's standard errors are over documents. Knows no model.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, nanmean
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.filters.extraction import WhitespaceFilter
from lm_eval.filters.selection import MajorityVoteFilter, TakeFirstFilter, TakeKFilter
from lm_eval.filters.transformation import LowercaseFilter, UppercaseFilter
from typing_extensions import Self

from olive_ext.backends.lm_eval_patches import replaced
from olive_ext.backends.task_checks import listed_choices
from olive_ext.engine.requests import FinishReason
from olive_ext.errors import TaskError, counted, named_failures
from olive_ext.media.pictures import media_digest
from olive_ext.report.metrics import CUT_OFF, LENGTHS, STOPPED, as_number
from olive_ext.session.requests import GenerationOutput
from olive_ext.session.tokenizer import refuse_odd

MEANS = (mean, nanmean, np.mean, np.nanmean, statistics.mean, statistics.fmean)
"""The aggregations that are means over documents. A task's own function may have one's name."""

_TOGETHER = MajorityVoteFilter, TakeKFilter
"""Filters that choose among a document's answers."""

_PLAIN = TakeFirstFilter, LowercaseFilter, UppercaseFilter, WhitespaceFilter
"""Filters that leave the whole answer. No two such texts are alike, so there is no majority."""


class GeneratedText(str):
    """An answer for lm-eval, with what lm-eval does not ask for."""

    ends: Mapping[str, float]
    """1 for what ended it, its limit (`CUT_OFF`) or a stop string (`STOPPED`), else 0."""

    lengths: Mapping[str, float]
    """Its values of `LENGTHS`, where it is separated from its reasoning."""

    reasoning: str | None

    @classmethod
    def of(cls, text: str, output: GenerationOutput) -> Self:
        """The answer `text` of an output."""
        made, reasoning = cls(text), output.reasoning
        reasons = {CUT_OFF: FinishReason.LENGTH, STOPPED: FinishReason.STOPPED}
        made.ends = {name: float(output.finish_reason is reason) for name, reason in reasons.items()}
        made.lengths, made.reasoning = {}, None
        if reasoning is not None:
            known = len(output.tokens), reasoning.num_tokens, reasoning.is_forced, *made.ends.values()
            made.lengths, made.reasoning = dict(zip(LENGTHS, map(float, known), strict=True)), reasoning.text
        return made


class _Filtered:
    """What a task scores of a document after a filter, with all answers after it; none where the filter chooses."""

    answers: tuple[str, ...] = ()
    is_extracted = False
    lengths: Mapping[str, float]


class _FilteredText(_Filtered, str):
    """The first answer."""


class _FilteredList(_Filtered, list[Any]):
    """All answers: the task itself scores them together."""


def names_of(repeats: int | None, *, thinks: bool) -> dict[str, bool]:
    """The metrics of a task with so many answers to a document, and whether higher is better. `thinks`: whether answers
    are separated from their reasoning."""
    count = repeats or 1
    sampled = [f"avg@{count}", f"maj@{count}", *(f"pass@{k}" for k in _counts(count))] if count > 1 else []
    return dict.fromkeys(sampled, True) | dict.fromkeys(LENGTHS if thinks else (), False)


def _counts(count: int) -> list[int]:
    return sorted({count, *(2**power for power in range(1, count.bit_length()))} - {1} if count > 1 else ())


def means_of(aggregations: Mapping[str, Any]) -> list[str]:
    """The metrics that are means over documents."""
    return [name for name, function in aggregations.items() if any(function is one for one in MEANS)]


def prepare(tasks: Mapping[str, Any], repeats: int | None, *, thinks: bool) -> None:
    """Gives each of lm-eval's `tasks` a class of its own. Those that generate ask each document `repeats` times (None:
    as often as they say), and have the metrics of `names_of`."""
    for name, task in tasks.items():
        kinds: list[type] = [_Scored, type(task)]
        own = {"known_as": name, "thinks": thinks}
        if getattr(task, "OUTPUT_TYPE", None) == "generate_until" and task.config is not None:
            if repeats is not None:
                task.set_config(key="repeats", value=repeats)
            kinds.insert(1, _Counting)
        if isinstance(task, ConfigurableTask):
            kinds.insert(0, _Prompted)
            own["doc_to_choice"] = listed_choices(task.__class__.doc_to_choice)
        task.__class__ = type(type(task).__name__, tuple(kinds), own)


class _Counting(Task):  # type: ignore[misc]
    def aggregation(self) -> dict[str, Any]:
        aggregations = super().aggregation()
        return {**aggregations, **{name: mean for name in self._names() if name not in aggregations}}

    def higher_is_better(self) -> dict[str, Any]:
        own, better = self._names(), self._first()[1]
        follow = [name for name in own if name[:4] in ("avg@", "maj@") or (better is None and "@" in name)]
        return {**own, **dict.fromkeys(follow, better), **super().higher_is_better()}

    def apply_filters(self) -> Any:
        filtered = super().apply_filters()
        for number, ensemble in enumerate(self._filters):
            _note_answers(ensemble, self._instances, has_lengths=number == 0)
        return filtered

    def process_results(self, doc: Any, results: Sequence[Any]) -> dict[str, Any]:
        return _values(partial(super().process_results, doc), results, *self._first())

    def _first(self) -> tuple[str, bool | None]:
        """The metric that judges answers, which is the first that is a mean, and whether higher is better."""
        name = next(iter(means_of(super().aggregation())), "")
        return name, super().higher_is_better().get(name)

    def _names(self) -> dict[str, bool]:
        runs_code = getattr(self, "UNSAFE_CODE", False)  # its own metrics are of all answers
        return names_of(1 if runs_code else self.config.repeats, thinks=self.thinks)


def _note_answers(ensemble: Any, instances: Sequence[Instance], *, has_lengths: bool) -> None:
    """Puts all answers after a filter, and their lengths, into what a task scores after that filter."""
    made = [filter() for filter in ensemble.filters]
    alone = [] if any(isinstance(one, _TOGETHER) for one in made) else list(_alone(made, instances))
    for place, instance in enumerate(instances):
        first = instance.filtered_resps[ensemble.name]
        if not isinstance(first, str | list):
            continue
        scored = _FilteredText(first) if isinstance(first, str) else _FilteredList(first)
        answers = tuple(each[place] for each in alone)
        if len(answers) > 1 and answers[0] == first and all(isinstance(each, str) for each in answers):
            scored.answers, scored.is_extracted = answers, not all(isinstance(one, _PLAIN) for one in made)
        scored.lengths = _mean_lengths(instance.resps) if has_lengths else {}
        instance.filtered_resps[ensemble.name] = scored


def _values(
    score: Callable[[list[Any]], dict[str, Any]], results: Sequence[Any], first: str, higher_is_better: bool | None
) -> dict[str, Any]:
    """The metrics of a document. `score` gives those of one answer; the metric `first` judges its answers."""
    values = score([str(each) if isinstance(each, _FilteredText) else each for each in results])
    if len(results) != 1 or not isinstance(scored := results[0], _Filtered):
        return values
    each = [values, *(score([answer]) for answer in scored.answers[1:])] if scored.answers else []
    judged = [_number(one.get(first)) for one in each]
    more = {**dict(_worth(judged, scored, right=float(higher_is_better is not False))), **scored.lengths}
    return {**values, **{name: value for name, value in more.items() if name not in values}}


def _alone(filters: Sequence[Any], instances: Sequence[Instance]) -> Iterator[list[Any]]:
    """All documents' first answers after the filters, then all second ones, and so on."""
    documents = [instance.doc for instance in instances]
    for number in range(min((len(instance.resps) for instance in instances), default=0)):
        answers: Any = [[instance.resps[number]] for instance in instances]
        for filter in filters:
            answers = filter.apply(answers, documents)
        yield list(answers)


def _mean_lengths(answers: Sequence[Any]) -> dict[str, float]:
    known = [answer.lengths for answer in answers if isinstance(answer, GeneratedText) and answer.lengths]
    if len(known) < len(answers):
        return {}
    return {name: math.fsum(each[name] for each in known) / len(known) for name in LENGTHS}


def _worth(values: Sequence[float | None], text: _Filtered, right: float) -> Iterator[tuple[str, float]]:
    """`avg@n` is the mean of the known values. `maj@n` is the value of the most frequent answer; of several, the one
    that was given first (lm-eval's `majority_vote`). `pass@k` is the chance that one of k answers is right; NaN where
    an answer is neither right nor wrong."""
    count = len(values)
    if known := [value for value in values if value is not None]:
        yield f"avg@{count}", math.fsum(known) / len(known)
    if values and text.is_extracted:
        majority = values[text.answers.index(Counter(text.answers).most_common(1)[0][0])]
        yield from [] if majority is None else [(f"maj@{count}", majority)]
    is_binary = {*values} <= {0.0, 1.0}
    for k in _counts(count):
        yield f"pass@{k}", pass_at(k, count, values.count(right)) if is_binary else math.nan


def drop_shares(results: dict[str, Any]) -> None:
    """Removes `pass@k` from lm-eval's results where a document has an answer that is neither right nor wrong. Over the
    other documents alone, which are the easiest and the hardest, it would be another number."""
    for task, values in results["results"].items():
        undefined = [name for name in values if name.startswith("pass@") and values[name] != values[name]]
        for name in undefined:  # with its standard error
            del values[name]
            metric, _, filter_name = name.partition(",")
            for line in results.get("samples", {}).get(task, ()):
                if line["filter"] == filter_name and line.pop(metric, None) is not None:
                    line["metrics"].remove(metric)


def pass_at(k: int, count: int, num_right: int) -> float:
    """The chance that one of `k` answers is right, of `count` answers without replacement: the unbiased estimator of
    Chen et al. 2021, 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(count - num_right, k) / math.comb(count, k)


def _number(value: object) -> float | None:
    is_number = isinstance(value, Real | np.bool_) and not math.isnan(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


logger = logging.getLogger(__name__)

_FIELDS = {"visual": "doc_to_image", "audio": "doc_to_audio"}
"""The pictures and sounds of a request, and the task's function for them."""


class _Document(dict[str, Any]):
    """Compared by what its pictures and sounds hold: arrays have no `==`, and that of a broken picture raises."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        try:
            return dict.__eq__(self, other)
        except Exception:  # noqa: BLE001 - of whatever a data set holds
            return media_digest([dict(self)]) == media_digest([other])

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(frozen=True)
class Chosen:
    """The documents that are evaluated alone, in ascending order, under their own numbers."""

    numbers: Sequence[int]
    documents: Any
    """All documents of the task, which are processed anew at every access."""

    requests: dict[int, list[Any]]
    """The requests of all documents, by number, which hold for one model's chat template: filled at the first use."""


class _Scored(Task):  # type: ignore[misc]
    lost: Sequence[Any] = ()
    """The `LostRequest`s of the model that is asked; more may be added meanwhile."""

    chosen: Chosen | None = None
    _at: int | None = None
    """The document whose answers lm-eval reads; two documents may be alike."""

    _unasked: deque[int] | None = None
    """The documents whose prompts are to be made."""

    _num_prompts = _num_own = 0
    """The number of prompts with examples so far, and of those with the document itself and its answer as one."""

    def doc_iterator(self, *args: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        if self.chosen is None:
            documents = super().doc_iterator(*args, **options)
        else:
            documents = ((number, self.chosen.documents[number]) for number in self.chosen.numbers)
        self._unasked, self._num_prompts, self._num_own = deque(), 0, 0
        for number, document in documents:
            self._at = int(number)
            self._unasked.append(self._at)
            yield number, document
        self._at = None  # requests are built after it

    def build_all_requests(self, **options: Any) -> None:
        """lm-eval draws the examples of its prompts from one generator, document after document, so that a run over
        chosen documents would have other prompts than the run over all: the requests of all are built."""
        if self.chosen is None:
            with named_failures(f"task '{self.known_as}'"):
                super().build_all_requests(**options)
            if self._num_own:  # lm-eval leaves it out only where 'fewshot_split' names its split
                own = f"{self._num_own} of {self._num_prompts} prompts have the document itself among the examples"
                split = self.config.test_split or self.config.validation_split
                how = f"'fewshot_split: {split}' in the task's file leaves it out"
                logger.warning("task '%s': %s: %s", self.known_as, own, how)
            return
        if not self.chosen.requests:
            whole = copy.copy(self)
            whole.chosen = None
            whole.build_all_requests(**{**options, "limit": None, "samples": None})
            for request in whole.instances:
                self.chosen.requests.setdefault(int(request.doc_id), []).append(request)
        self._instances = []
        for number in self.chosen.numbers:
            for request in self.chosen.requests.get(number, ()):
                unanswered = copy.copy(request)
                unanswered.resps, unanswered.filtered_resps = [], {}
                self._instances.append(unanswered)

    def process_results(self, doc: Any, results: Any) -> Any:
        document = f"task '{self.known_as}', document {self._at}"
        is_lost = any((item.task, item.doc_id) == (self.known_as, self._at) for item in self.lost)
        with named_failures(document):
            values = {} if is_lost else super().process_results(doc, results)
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            problem = f"'process_results' gives {str(values)[:80]}: names of metrics with values are expected"
            raise TaskError(f"{document}: {problem}")
        means = means_of(self.aggregation())
        return {key: as_number(value) if key in means else value for key, value in values.items()}

    def doc_to_target(self, *args: Any, **options: Any) -> Any:
        with nullcontext() if self._at is None else named_failures(f"task '{self.known_as}', document {self._at}"):
            return super().doc_to_target(*args, **options)


class _Prompted(ConfigurableTask):  # type: ignore[misc]
    _shots: Sequence[Any] = ()
    """The examples of the prompt that was made last."""

    def fewshot_context(self, doc: Any, *args: Any, **options: Any) -> Any:
        number, self._shots = self._unasked.popleft() if self._unasked else "?", ()
        sampler: Any = getattr(self, "sampler", None)

        def sample(*given: Any, **more: Any) -> Any:
            if isinstance(document := more.get("eval_doc"), dict):
                more["eval_doc"] = _Document(document)
            self._shots = list(type(sampler).sample(sampler, *given, **more))
            document = _Document(doc) if isinstance(doc, dict) else doc
            self._num_prompts += 1
            self._num_own += any(document == shot for shot in self._shots)
            return self._shots

        sampled = nullcontext() if sampler is None else replaced(sampler, "sample", sample)
        with sampled, named_failures(f"task '{self.known_as}', document {number}"):
            return super().fewshot_context(doc, *args, **options)

    def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
        document = f"task '{self.known_as}', document {(options.get('metadata') or ('?', '?'))[1]}"
        with named_failures(document):
            if problem := _problem(self, doc):
                raise TaskError(f"{document}: {problem}")
            made = super().construct_requests(doc, ctx, **options)
            for request in as_list(made):
                for text in filter(lambda item: isinstance(item, str), request.args):
                    refuse_odd(text)
                if self._shots:
                    request.arguments = tuple(_with_shots(self, part, self._shots) for part in request.arguments)
        return made


def _with_shots(task: Any, part: Any, shots: Sequence[Any]) -> Any:
    """A request's arguments besides text, with those of the examples before it, in the order of the prompt."""
    if not isinstance(part, Mapping):
        return part
    functions = {name: getattr(task, function) for name, function in _FIELDS.items() if name in part}
    media = {name: [*map(of, shots), part[name]] for name, of in functions.items()}
    return {**part, **{name: [item for each in media[name] for item in as_list(each)] for name in media}}


def as_list(value: Any) -> list[Any]:
    """The items that a task's function gives: none, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _problem(task: Any, doc: Any) -> str | None:
    config = task.config
    choices = None
    if config.output_type == "multiple_choice" and config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
    if choices is not None and not choices:
        return "it has no choices"
    if config.doc_to_target is None or callable(config.process_results):
        return None
    target = task.doc_to_target(doc)
    if target is None or (choices is not None and target in ("", "None")):
        return f"its target is {target!r}"
    items = target if isinstance(target, list) else [target]
    if choices is not None and not task.multiple_input and not all(_is_choice(item, choices) for item in items):
        return f"its target is {target!r}, which is none of its {counted(len(choices), 'choice')}"
    return None


def _is_choice(target: Any, choices: Sequence[Any]) -> bool:
    """Whether a target, the number of a choice or its text, is one of them; other kinds are left to lm-eval."""
    if isinstance(target, int):
        return 0 <= target < len(choices)
    return not isinstance(target, str) or target in choices
