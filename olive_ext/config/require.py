"""What a recipe says beside an evaluation's own settings: bounds that the model must keep."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import Strict, Word, not_bool
from olive_ext.config.evaluation import EvaluationSettings

Number = Annotated[float, BeforeValidator(not_bool), Field(allow_inf_nan=False)]


class Bound(Strict):
    """A number that a metric must not go beyond."""

    metric: Word
    """Name of the metric as a report has it, for instance "acc", "kl_mean", or a task's name that has one metric only
    ("size_on_disk")."""

    task: Word | None = None
    """The metric's task; "all" for a comparison with the reference over all tasks. May be left out where only one
    task has the metric, and for comparisons over all tasks."""

    filter: Word | None = None
    """lm-eval's filter, where the task has the metric once for each of several."""

    max: Number | None = None
    """Largest value that passes."""

    min: Number | None = None
    """Smallest value that passes."""

    @model_validator(mode="after")
    def _check_bounded(self) -> Self:
        if self.max is None and self.min is None:
            raise ValueError(f"give 'max' or 'min' for '{self.metric}'")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"'min' = {self.min:g} of '{self.metric}' is above 'max' = {self.max:g}")
        return self


class WorkflowSettings(EvaluationSettings):
    """All keys of the evaluator `OrtLMEvaluator` and of the pass `OrtLMEvaluation`."""

    require: list[Bound] = Field(default_factory=list)
    """Bounds on metrics; a broken one fails the workflow, behind the report and the model, which are kept. The pass
    judges the model that it measures. The evaluator judges output models, and the input model where there are no
    passes. In a search a candidate that breaks a bound is out."""
