"""A model's costs: size, memory and speed as metrics, which a user lists among the tasks. Knows no lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from olive_ext.config import EvaluationConfig, EvaluationSettings
from olive_ext.errors import MissingError
from olive_ext.report import Metric
from olive_ext.report.metrics import NON_FINITE

Settings = TypeVar("Settings", bound=EvaluationSettings)

SIZE_ON_DISK = "size_on_disk"
PEAK_MEMORY = "peak_memory"
TOKENS_PER_SECOND = "tokens_per_second"
REQUESTS_PER_SECOND = "requests_per_second"

COSTS = (SIZE_ON_DISK, PEAK_MEMORY, TOKENS_PER_SECOND)


def requested_tasks(config: EvaluationConfig) -> list[str | dict[str, Any]]:
    """The tasks of lm-eval among `config.tasks`. Raises `ConfigError` where memory or speed has no run to measure."""
    tasks = [task for task in config.tasks if task not in COSTS]
    costs = [name for name in requested_costs(config) if name != SIZE_ON_DISK]
    if costs and not tasks:
        raise MissingError(f"'{costs[0]}' is measured on a run: add a task to be run", "tasks", config.tasks)
    return tasks


def with_costs(settings: Settings, names: Iterable[str] = ()) -> Settings:
    """`settings`, with the costs added to the tasks that `names` or the settings' own bounds refer to."""
    wanted = set(names) | {name for bound in getattr(settings, "bounds", ()) for name in (bound.task, bound.metric)}
    wanted |= {TOKENS_PER_SECOND} if REQUESTS_PER_SECOND in wanted else set()
    added = [name for name in COSTS if name in wanted and name not in settings.tasks]
    return settings.model_copy(update={"tasks": [*settings.tasks, *added]}) if added else settings


def requested_costs(config: EvaluationConfig) -> tuple[str, ...]:
    """The costs among `config.tasks`."""
    return tuple(name for name in COSTS if name in config.tasks)


def is_timed(config: EvaluationConfig) -> bool:
    """Whether a cost is measured for which every answer has to be computed."""
    return not {PEAK_MEMORY, TOKENS_PER_SECOND}.isdisjoint(requested_costs(config))


def measured_costs(tasks: Sequence[object]) -> dict[str, Sequence[str]]:
    """The metrics of the costs among `tasks`, as bounds may name them: each task's, with and without a filter."""
    units = {name: "bytes" for name in (SIZE_ON_DISK, PEAK_MEMORY) if name in tasks}
    units |= {name: name for name in (TOKENS_PER_SECOND, REQUESTS_PER_SECOND) if TOKENS_PER_SECOND in tasks}
    return {name: [metric, f"{metric},none"] for name, metric in units.items()}


def cost_metrics(
    asked: Sequence[str], *, size: Callable[[], int], peak_memory: int, counters: Mapping[str, int], seconds: float
) -> Iterator[Metric]:
    """The metrics of the costs in `asked`.

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
