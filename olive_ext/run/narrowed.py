"""Answers are drawn until intervals are narrow (`"repeats": "enough"`): an evaluation with ever more `repeats`, each of
which takes the answers of those before from the journal. The last is therefore a plain evaluation with its number."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from olive_ext.config import Narrow
from olive_ext.errors import ConfigError
from olive_ext.report import Report
from olive_ext.report.narrowed import DrawnMean, Narrowed
from olive_ext.run.models import Models
from olive_ext.run.reference.answers import Answers
from olive_ext.stats.answer_spread import drawn_interval

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM

_ENOUGH = "'repeats' = 'enough'"


class _Evaluated(Protocol):
    @property
    def report(self) -> Report: ...
    @property
    def answers(self) -> tuple[Sequence[Answers], Sequence[Answers]]: ...


E = TypeVar("E", bound=_Evaluated)


def until_narrow(models: Models, lm: LM | None, evaluate: Callable[[Models], E]) -> tuple[Models, E, Report]:
    """The models with the number of answers that was found, what `evaluate` gave of them, and its report, which tells
    of all looks. Answers are kept until then where the settings name no place for them."""
    config = models.config
    if config.repeats != "enough":
        found = evaluate(models)
        return models, found, found.report
    if models.is_lm_evals if lm is None else not hasattr(lm, "session"):
        raise ConfigError(f"{_ENOUGH}: lm-eval's own models draw every answer anew: give an integer")
    if models.recorder is not None or models.records_file is not None:
        raise ConfigError(f"{_ENOUGH}: records hold one number of answers: give an integer")
    narrow, reports = config.narrowness, list[Report]()
    with tempfile.TemporaryDirectory() as folder:
        kept = {"narrow": narrow, "use_cache": config.journal or str(Path(folder, "answers"))}
        for at, count in enumerate(narrow.looks):
            resume = {"resume": True} if at else {}
            asked = config.model_copy(update={**kept, **resume, "repeats": count})
            found = evaluate(Models(asked, models.progress, models.clock))
            means = tuple(_means(*found.answers, count, narrow, has_reference=config.reference is not None))
            if not means:
                raise ConfigError(f"{_ENOUGH}: no answer to any task has a value: give an integer")
            reports.append(found.report)
            looks, is_difference = narrow.looks[: at + 1], config.reference is not None
            told = Narrowed(looks, narrow.most, narrow.within, narrow.confidence, is_difference, means)
            if told.is_reached:
                break
    final = replace(_of_all(reports), config=config.model_dump(mode="json", exclude_unset=True), narrowed=told)
    settled = Models(config.model_copy(update={"repeats": count, "narrow": None}), models.progress, models.clock)
    return settled, found, final


def refuse_unsampled(tasks: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where no task has `avg@n`."""
    if not any(name.startswith("avg@") for task in tasks.values() for name in task.aggregation()):
        raise ConfigError(f"{_ENOUGH}: none of the tasks {', '.join(tasks)} generates answers whose mean is a metric")


def _means(
    own: Sequence[Answers], others: Sequence[Answers], count: int, narrow: Narrow, *, has_reference: bool
) -> Iterator[DrawnMean]:
    """Of every task by every filter, over the documents that both models answered."""
    name = f"avg@{count}"
    by_key = {(item.task, item.filter): item.with_value(name).by_document for item in others}
    for item in own:
        mine = {number: one.values[name] for number, one in item.with_value(name).by_document.items()}
        drawn = {number: np.array(mean.answers) for number, mean in mine.items() if hasattr(mean, "answers")}
        if has_reference:
            theirs = by_key.get((item.task, item.filter), {})
            pairs = {number: getattr(one.values[name], "answers", None) for number, one in theirs.items()}
            drawn = {at: drawn[at] - np.array(pairs[at]) for at in drawn if pairs.get(at) is not None}
        if drawn:
            interval = drawn_interval(list(drawn.values()), narrow.confidence, len(narrow.looks))
            yield DrawnMean(item.task, item.filter, *interval)


def _of_all(reports: Sequence[Report]) -> Report:
    """The last report with the counters of all, and with what the journal held before the first."""
    last, journal = reports[-1], reports[0].model.get("journal")
    counters = [name for name, value in last.engine.items() if isinstance(value, int) and not isinstance(value, bool)]
    summed = {name: sum(report.engine.get(name, 0) for report in reports) for name in counters}
    model = {**last.model, **({} if journal is None else {"journal": journal})}
    return replace(last, engine={**last.engine, **summed}, model=model)
