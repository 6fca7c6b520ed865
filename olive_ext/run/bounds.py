"""Metrics that a recipe names: a model's costs (size, memory and speed), which it lists among the tasks; and those with
bounds, refused before anything runs if no report will have them, and compared with their bounds after an evaluation.
Knows no model and no lm-eval."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from olive_ext.config import Bound, EvaluationConfig, EvaluationSettings, LossBound
from olive_ext.errors import ConfigError, MissingError, NotComparableError, counted, suggest
from olive_ext.errors import listed as first_of
from olive_ext.report import Metric
from olive_ext.report.comparison import ALL, Comparison, TextChange
from olive_ext.report.metrics import (
    COMPARISON_NAMES,
    DRAWN_ONLY,
    NON_FINITE,
    is_open,
    listed,
    long_names,
    matching,
    non_finite_requests,
)
from olive_ext.report.numbers import number
from olive_ext.report.verdict import Reason

Settings = TypeVar("Settings", bound=EvaluationSettings)

SIZE_ON_DISK = "size_on_disk"
PEAK_MEMORY = "peak_memory"
TOKENS_PER_SECOND = "tokens_per_second"
REQUESTS_PER_SECOND = "requests_per_second"

COSTS = (SIZE_ON_DISK, PEAK_MEMORY, TOKENS_PER_SECOND)


def requested_tasks(config: EvaluationConfig) -> list[str | dict[str, Any]]:
    """The tasks of lm-eval among `config.tasks`. Raises `ConfigError` where memory or speed has no run to measure."""
    tasks = [task for task in config.tasks if task not in COSTS]
    if (costs := timed_costs(config)) and not tasks:
        raise MissingError(f"'{costs[0]}' is measured on a run: add a task to be run", "tasks", config.tasks)
    return tasks


def with_costs(settings: Settings, names: Iterable[str] = ()) -> Settings:
    """`settings`, with the costs added to the tasks that `names` or the settings' own bounds refer to."""
    wanted = set(names) | {name for bound in getattr(settings, "bounds", ()) for name in (bound.task, bound.metric)}
    wanted |= {TOKENS_PER_SECOND} if REQUESTS_PER_SECOND in wanted else set()
    added = [name for name in COSTS if name in wanted and name not in settings.tasks]
    return settings.model_copy(update={"tasks": [*settings.tasks, *added]}) if added else settings


def timed_costs(config: EvaluationConfig) -> list[str]:
    """The costs among `config.tasks` for which every answer has to be computed."""
    return [name for name in (PEAK_MEMORY, TOKENS_PER_SECOND) if name in config.tasks]


def cost_metrics(
    asked: Sequence[object], *, size: Callable[[], int], peak_memory: int, counters: Mapping[str, int], seconds: float
) -> Iterator[Metric]:
    """The metrics of the costs among the tasks `asked`.

    `size` gives the bytes of the model's files; `peak_memory` is the most that the process took, in bytes. Speed is in
    tokens of the requests, given and generated, and in requests, for each of the `seconds` after the loading: tokens
    that requests share and that are computed once count for each of them. A model that counts nothing has no speed.
    Requests without a finite output are counted, asked or not.
    """
    if counters.get(NON_FINITE):
        yield Metric(NON_FINITE, "requests", "none", float(counters[NON_FINITE]), higher_is_better=False)
    if SIZE_ON_DISK in asked:
        yield Metric(SIZE_ON_DISK, "bytes", "none", float(size()), higher_is_better=False)
    if PEAK_MEMORY in asked:
        yield Metric(PEAK_MEMORY, "bytes", "none", float(peak_memory), higher_is_better=False)
    if TOKENS_PER_SECOND in asked and seconds > 0 and counters.get("requests", 0) > 0:
        tokens = counters.get("tokens_naive", 0) + counters.get("tokens_generated", 0)
        yield Metric(TOKENS_PER_SECOND, TOKENS_PER_SECOND, "none", tokens / seconds)
        yield Metric(REQUESTS_PER_SECOND, REQUESTS_PER_SECOND, "none", counters["requests"] / seconds)


def why_missing(name: str) -> str:
    """The end of the message about a metric that is missing from the results, `name` being spelled as in recipes. For a
    speed it is the reason, for others only that it is missing."""
    if name.partition("/")[0] in (TOKENS_PER_SECOND, REQUESTS_PER_SECOND):
        return "was not measured, because the model counts no requests, or answered none of them itself"
    return "is not among the results"


Name = tuple[str | None, str]
"""Task, and metric or "metric,filter"; without a task also a task's name, "task/metric" or "task/metric,filter"."""

Measured = Mapping[str, Collection[str] | None]
"""Tasks that will be run, each with its metrics as `task_loading.Declared` has them; None where these are not known."""

DECLARABLE = {"accuracy": None, "throughput": TOKENS_PER_SECOND, SIZE_ON_DISK: SIZE_ON_DISK}
"""Olive's types of metrics that a recipe may declare for goals and search, and each cost; None: a task's metric."""

_OF_TEXTS = {"word_perplexity", "byte_perplexity", "bits_per_byte"}
_OF_NO_ANSWER = {*_OF_TEXTS, "bytes", *COSTS, REQUESTS_PER_SECOND}
"""Metrics of whole texts, and costs: no answer is right or wrong by them."""

_OF_ANSWERS = [name for name in COMPARISON_NAMES if name.startswith(("flips", "accuracy", "mcnemar"))]

Declared = Sequence[tuple[str, str]]
"""Type and name of each metric that a recipe declares."""


def check_declared(declared: Declared, where: str) -> None:
    """Raises `ConfigError` for a metric of a type that no report can have; to be called before anything runs."""
    for kind, name in declared:
        if kind not in DECLARABLE:
            raise ConfigError(
                f"'{where}.metrics' has '{name}' of type '{kind}': give {' or '.join(DECLARABLE)}", f"{where}.metrics"
            )


def with_measurements(settings: Settings, declared: Declared = ()) -> Settings:
    """`settings` with the measurements of size, memory and speed that declared metrics and bounds need."""
    return with_costs(settings, [DECLARABLE[kind] or name.partition("/")[0] for kind, name in declared])


def refuse_names(
    settings: EvaluationSettings, tasks: Measured | None, where: str = "", declared: Declared = (), is_own: bool = False
) -> None:
    """Raises `ConfigError` for a bound of `settings`, or a metric in `declared`, that no report will have.

    `tasks` are lm-eval's; None where not even these are known. `where` is the block's place in the recipe. `is_own`:
    the model is its own reference, and nothing is compared.
    """
    check_declared(declared, where)
    prefix = f"{where}." if where else ""
    bounds = [(bound.task, ",".join(filter(None, (bound.metric, bound.filter)))) for bound in settings.require]
    for task, name in bounds if settings.documents == "enough" else ():
        if name.partition(",")[0].rpartition("/")[2] in DRAWN_ONLY:
            others = ", ".join(name for name in COMPARISON_NAMES if name not in DRAWN_ONLY)
            problem = f"'{name}'{_of(task)} is of the drawn documents alone where 'documents' = 'enough'"
            raise NotComparableError(f"{problem}: evaluate 'all', or bound one of {others}", f"{prefix}require")
    if tasks is not None:
        asked = with_measurements(settings, declared).tasks
        costs = cost_metrics(asked, size=int, peak_memory=0, counters={"requests": 1}, seconds=1.0)
        tasks = {**tasks, **{item.task: (item.metric, f"{item.metric},none") for item in costs}}
    compared: Sequence[str] = COMPARISON_NAMES if settings.reference is not None else ()
    words, known = "", [{name.partition(",")[0] for name in metrics or ()} for metrics in (tasks or {}).values()]
    if known and all(names and names <= _OF_NO_ANSWER for names in known):
        compared = tuple(name for name in compared if name not in _OF_ANSWERS)
        words = "" if any(names & _OF_TEXTS for names in known) else "no task has answers or whole texts to compare"
    if is_own:
        words = "the model is its own reference: name another one"
    if words and settings.fail_on_loss is not None:
        raise NotComparableError(words, f"{prefix}fail_on_loss", settings.fail_on_loss)
    check_names(bounds, tasks, () if is_own else compared, f"{prefix}require")
    names = [(None, name) for kind, name in declared if DECLARABLE[kind] is None]
    check_names(names, tasks, compared, f"{prefix}metrics")


def check_names(names: Iterable[Name], tasks: Measured | None, compared: Collection[str], where: str) -> None:
    """Raises `ConfigError` for a (task, metric) that no report will have.

    `tasks` are all that is measured, costs too; None where not even the tasks are known. `compared` are the metrics of
    a comparison with a reference, none where there is no reference. `where` is the key that has the names.
    """
    own = {full for name in compared for full in (name, f"{name},none")}
    known = {task: None if metrics is None else {*metrics, *own} for task, metrics in (tasks or {}).items()}
    if compared:
        known[ALL] = own
    for task, name in names:
        if name.partition(",")[0].rpartition("/")[2] in COMPARISON_NAMES and not compared:
            raise MissingError(f"no metric '{name}'{_of(task)} without another model as 'reference'", where)
        if tasks is None:
            continue
        if task is not None and task not in known:
            raise ConfigError(f"no task '{task}' is measured{_near(task, known)}", where, code="unknown_name")
        asked = known if task is None else {task: known[task]}
        there = {metric for metrics in asked.values() for metric in metrics or ()}
        if task is None:
            there |= {*known, *(f"{key}/{metric}" for key, metrics in known.items() for metric in metrics or ())}
        if name not in there and None not in asked.values():
            turned = "/".join(reversed(name.split("@")))
            near = _near(name, (each for each in there if ("," in each) == ("," in name)))
            near = f": did you mean '{turned}'?" if turned in there else near
            raise ConfigError(f"no metric '{name}'{_of(task)} is measured{near}", where, code="unknown_name")


def _of(task: str | None) -> str:
    return f" of task '{task}'" if task else ""


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    if near := suggest(name, names):
        return f": {near}"
    own = [one for one in names if "/" not in one and one not in COMPARISON_NAMES]
    names = own + [one for one in COMPARISON_NAMES if one in names]
    return f"; there are {first_of(names)}{' (all: docs/comparison.md)' if COMPARISON_NAMES[0] in names else ''}"


def broken_bounds(bounds: Iterable[Bound], metrics: Sequence[Metric], judged: Comparison | None = None) -> list[Reason]:
    """A reason for each of the `single_bounds` that is broken, in their order; a value that is no number breaks every
    bound, and so do requests without a finite output.

    Raises `ConfigError` with the metrics there are for a bound that names none of them, or several.
    """
    texts = {} if judged is None else judged.whole_texts()
    single = [*single_bounds(bounds, metrics, texts)]
    if number_wrong := non_finite_requests(metrics):
        words = f"{counted(number_wrong, 'request')} had no finite output: no metric can be trusted"
        return [Reason("bound_broken", words=words, field=bound.key) for bound in single[:1]]
    return list(dict.fromkeys(item for bound in single for item in _broken(bound, metrics, texts)))


def single_bounds(bounds: Iterable[Bound], metrics: Sequence[Metric], texts: Iterable[str]) -> Iterator[Bound]:
    """The bounds; in place of `fail_on_loss` one on accuracy over all tasks, if any has answers right or wrong, and
    one on the perplexity of each task of `texts`."""
    for bound in bounds:
        most = {"metric": "perplexity_ratio", "max": 1 - (bound.min or 0.0)}
        risen = [LossBound(task=task, **most) for task in texts] if isinstance(bound, LossBound) else []
        is_held = not isinstance(bound, LossBound) or matching(metrics, bound.metric, bound.task or ALL)
        yield from [bound, *risen] if is_held else risen


def kept_bounds(bounds: Iterable[Bound], metrics: Sequence[Metric]) -> list[str]:
    """The value and the limits of each bound that is kept, but for `fail_on_loss`, whose figure a verdict has."""
    lines = []
    for bound in bounds:
        if not isinstance(bound, LossBound) and not broken_bounds([bound], metrics):
            metric, limits = _bounded(bound, metrics), (("at most", bound.max), ("at least", bound.min))
            required = " and ".join(f"{words} {_exact(limit)}" for words, limit in limits if limit is not None)
            name = long_names(metric)[bool(bound.filter)]
            lines.append(f"{name} = {number(metric.value)}, required {required}")
    return lines


def _bounded(bound: Bound, metrics: Sequence[Metric]) -> Metric:
    matches = matching(metrics, bound.metric, bound.task, bound.filter)
    if len(matches) == 1:
        return matches[0]
    problem = "stands for several metrics" if matches else why_missing(bound.task or bound.metric)
    name = f"'{bound.metric}'{_of(bound.task)}" + (f", filter '{bound.filter}'" if bound.filter else "")
    raise ConfigError(f"'require': {name} {problem}: {listed(matches or metrics)}", "require")


def _broken(bound: Bound, metrics: Sequence[Metric], texts: Mapping[str, object]) -> Iterator[Reason]:
    metric = _bounded(bound, metrics)
    name = long_names(metric)[bool(bound.filter)]
    reason = Reason("bound_broken", metric.task, metric.metric, metric.value, field=bound.key)
    if is_open(metric, metrics):
        yield replace(reason, words=f"{name} is undecided: documents without an answer could change it")
    elif metric.is_of_drawn:
        words = f"{name} is of the drawn documents only ({metric.documents}), and the bound is on all of them"
        yield replace(reason, words=words)
    for at, limit, is_within in (("at most", bound.max, operator.le), ("at least", bound.min, operator.ge)):
        if limit is not None and not is_within(metric.value, limit):
            value = number(metric.value) if number(metric.value) != number(limit) else f"{metric.value:.12g}"
            words = f"{name} = {value}, required {at} {_exact(limit)}"
            words = _lost(metric, limit, texts.get(metric.task)) if isinstance(bound, LossBound) else words
            yield replace(reason, words=words, bound=limit)


def _lost(metric: Metric, limit: float, text: object) -> str:
    """Accuracy is a difference in points, a perplexity a ratio in per cent: per token, or by the metric of `text`."""
    of_text = f"{metric.task} {text.metric if isinstance(text, TextChange) else 'perplexity'} rose", "%", 1.0
    what, unit, unchanged = ("accuracy over all tasks fell", "pt", 0.0) if metric.task == ALL else of_text
    loss, most = 100 * abs(metric.value - unchanged), f"{100 * abs(limit - unchanged):g}"
    lost = next(text for digits in (2, 4, 12) if (text := f"{loss:.{digits}g}") != most)
    return f"{what} by {lost} {unit}, more than {most} {unit} (`fail_on_loss`)"


def _exact(bound: float) -> str:
    """The bound exactly: a user may make a model keep what is printed."""
    return number(bound) if float(number(bound)) == bound else f"{bound:.12g}"
