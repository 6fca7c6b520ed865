"""The settings of an evaluation: the model, a reference to it, the tasks, how lm-eval is driven, and bounds of metrics:
those that a report is held to, and the one that a sampled evaluation makes certain.

`EvaluationSettings` holds the keys that an Olive evaluator and an Olive pass take; the model itself comes from Olive
there, and from `EvaluationConfig.model` on the command line and from Python. Knows no statistics.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, PathText, Repeats, StrictModel, Word, not_bool, word
from olive_ext.config.model import ExecutionSettings, ModelSettings
from olive_ext.config.work import ModelWork, PassSettings, Reference, ReferenceConfig
from olive_ext.errors import ConfigError, ContradictionError, MissingError

CertainMetric = Literal["accuracy_difference", "kl_mean", "top1_agreement"]

EQUAL: dict[CertainMetric, float] = {"accuracy_difference": 0.0, "kl_mean": 0.0, "top1_agreement": 1.0}
"""Each metric's value of a candidate that equals its reference."""

_ANSWERED = ("acc", "acc_norm", "acc_bytes", "exact_match")
_RANGES = {
    **dict.fromkeys(("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high"), (-1.0, 1.0)),
    **dict.fromkeys((*_ANSWERED, "top1_agreement", "top_probability_rms", "mcnemar_p"), (0.0, 1.0)),
    **dict.fromkeys(("kl_mean", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"), (0.0, math.inf)),
    "perplexity_ratio": (0.0, math.inf),
}
"""Least and greatest values of metrics: shares, distances in nats and a ratio."""

Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(not_bool)]
Distance = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(not_bool)]
Confidence = Annotated[float, Field(ge=0.5, lt=1), BeforeValidator(not_bool)]


class ClaimConfig(StrictModel):
    """A bound of a metric over all documents of all tasks; give one of `within`, `above` and `below`."""

    metric: Annotated[CertainMetric, BeforeValidator(word)] = "accuracy_difference"
    """"accuracy_difference" is the share of right answers less the reference's, "kl_mean" in nats, "top1_agreement" a
    share."""

    within: Distance | None = None
    """At most so much worse than a model that equals the reference: 0.01 of "accuracy_difference" is a loss of one
    point at most."""

    above: Number | None = None
    """The metric is at least this."""

    below: Number | None = None
    """The metric is at most this."""

    confidence: Confidence = 0.95
    """Probability that what is said to be certain of a model is true, whenever its evaluation stops. Of 20 candidates
    of a search one may be wrong at 0.95; 1 - 0.05 / 20 is 95 % of all of them."""

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        limits = [name for name in ("within", "above", "below") if getattr(self, name) is not None]
        if len(limits) != 1:
            raise ContradictionError(f"give one of 'within', 'above' and 'below', not {' and '.join(limits) or 'none'}")
        if not self.distance > 0:
            raise ContradictionError(
                "an unchanged model has this value, so that no number of documents decides: move it",
                limits[0],
                self.bound,
            )
        if self.metric != "kl_mean" and self.distance >= 1:
            raise ContradictionError("give less than 1: 0.01 is one point", limits[0], getattr(self, limits[0]))
        return self

    @property
    def side(self) -> Literal["above", "below"]:
        """The side of the bound on which the metric is to be."""
        is_above = self.above is not None or (self.within is not None and self.metric != "kl_mean")
        return "above" if is_above else "below"

    @property
    def bound(self) -> float:
        """The bound in the metric's own units."""
        if self.within is not None:
            return EQUAL[self.metric] + (self.within if self.side == "below" else -self.within)
        return next(bound for bound in (self.above, self.below) if bound is not None)

    @property
    def distance(self) -> float:
        """From the bound to the value of a candidate that equals its reference."""
        return abs(EQUAL[self.metric] - self.bound)


class Bound(StrictModel):
    """A number that a metric must not go beyond."""

    key: ClassVar[str] = "require"
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
            raise ContradictionError(f"give 'max' or 'min' for '{self.metric}'")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ContradictionError(f"'min' = {self.min:g} of '{self.metric}' is above 'max' = {self.max:g}", "min")
        name = self.metric.rpartition("/")[2].partition(",")[0]
        low, high = _RANGES.get(name, (-math.inf, math.inf))
        for key, bound, end in (("min", self.min, low), ("max", self.max, high)):
            if bound is not None and (not low <= bound <= high or (bound == end and name not in _ANSWERED)):
                hint = "" if math.isinf(high) else " (0.01 is one point)"
                problem = f"'{self.metric}' is from {low:g} to {high:g}{hint}: this decides nothing"
                raise ContradictionError(problem, key, bound)
        return self


class LossBound(Bound):
    """A bound of `fail_on_loss`, which is written in points of accuracy and per cent of a perplexity."""

    key: ClassVar[str] = "fail_on_loss"

    @classmethod
    def of(cls, loss: float) -> LossBound:
        """The bound on accuracy over all tasks."""
        return cls(metric="accuracy_difference", min=-loss / 100)


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([^<>=]+?)\s*([<>])=\s*([^<>=]+)", value)
    if match is None:
        raise ConfigError(f"give METRIC<=NUMBER or METRIC>=NUMBER, not {value!r}", "", value)
    return {"metric": match[1], "max" if match[2] == "<" else "min": match[3]}


WrittenBound = Annotated[
    Bound,
    BeforeValidator(_read, json_schema_input_type=str | Bound),
    Field(description='a mapping, or a text as "kl_mean<=0.01"'),
]


def implied_claim(bounds: Iterable[Bound]) -> ClaimConfig | None:
    """The claim that decides the only bound over all tasks on a metric that can be certain; None where there is none.

    Raises `ValueError` where several could be meant, or one has both ends.
    """
    candidates = [bound for bound in bounds if bound.metric in EQUAL and bound.task in (None, "all")]
    if len(candidates) > 1 or (candidates and None not in (candidates[0].min, candidates[0].max)):
        example = 'for instance {"metric": "kl_mean", "below": 0.01}'
        raise ContradictionError(f"'enough' decides one bound, and there are several: name it, {example}", "certain")
    if not candidates:
        return None
    return ClaimConfig.parse({"metric": candidates[0].metric, "above": candidates[0].min, "below": candidates[0].max})


Points = Annotated[float, Field(gt=0, lt=100), BeforeValidator(not_bool)]


class ComparisonSettings(StrictModel):
    """What the evaluators share: a reference to compare with, and where answers and reports are kept."""

    reference: Reference | None = None
    """The model to compare with: a path, or a mapping. Adds to the report how far the two models' next-token
    distributions are apart on the same tokens, and which answers flip."""

    matters: Points = 1.0
    """The loss that matters, for the verdict of a comparison: in percentage points of accuracy, in per cent of a
    perplexity and of a metric whose reference is above 1. "No loss found" is said only where a loss of this size is
    excluded."""

    fail_on_loss: Points | None = None
    """Fails if accuracy over all tasks (of a single task, its first metric) was measured to be lower than the
    reference's by more than this many points, or a perplexity to be higher by more per cent, whatever the interval. If
    such a loss is excluded, `evaluate` ends with 0 even if other metrics are not decided. Needs `reference`."""

    require: list[WrittenBound] = Field(default_factory=list)
    """Bounds on measured metrics, as "kl_mean<=0.01", or "TASK/acc>=0.7" for one task. If one is broken, the evaluation
    fails after report and model are written, and both are kept (exit status 1 of a command; from Python an error that
    has the `report`). A pass judges the model that it measures. An evaluator of a workflow judges output models, and
    the input model if there are no passes. In a search a candidate that breaks a bound is out."""

    use_cache: PathText | None = None
    """Path stem of the journal, which keeps every answer so that an interrupted run resumes. Its file belongs to the
    model's content and to the settings that decide an answer. None takes `journal/answers` in `output_dir`, else, in a
    workflow that measures no speed or memory, Olive's cache."""

    resume: bool | None = None
    """Whether answers that are in the journal are taken from it; with false they are computed anew. None takes them,
    except where speed or memory is measured (`tokens_per_second`, `peak_memory`, rtfx)."""

    output_dir: PathText | None = None
    """Folder for report.json, report.md, report.html and eval_results.yaml. None writes none."""

    @model_validator(mode="before")
    @classmethod
    def _settle_matters(cls, values: Any) -> Any:
        loss: Any = values.get("fail_on_loss") if isinstance(values, dict) and "matters" not in values else None
        with suppress(TypeError, ValueError):  # reported with the field
            return {**values, "matters": float(loss)} if 0 < float(loss) < 100 else values
        return values

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.fail_on_loss is not None and self.reference is None:
            raise MissingError("'fail_on_loss' needs 'reference'", "fail_on_loss")
        if self.fail_on_loss and self.matters > self.fail_on_loss:
            most = f"at most 'fail_on_loss', which is {self.fail_on_loss:g}: such a loss could pass undecided"
            raise ContradictionError(most, "matters", self.matters)
        return self

    @property
    def bounds(self) -> list[Bound]:
        """All bounds."""
        loss = self.fail_on_loss
        return [*self.require, *([] if loss is None else [LossBound.of(loss)])]

    @property
    def journal(self) -> str | None:
        """Path stem of the journal; None where no place for it is given."""
        if self.use_cache is None and self.output_dir is not None:
            return str(Path(self.output_dir, "journal", "answers"))
        return self.use_cache


class EvaluationSettings(ComparisonSettings, PassSettings):
    """Keys of the evaluator `OrtLMEvaluator` and of the pass `OrtLMEvaluation`. Those of Olive's LMEvaluator keep
    their names and meanings."""

    tasks: Annotated[list[Word | dict[str, Any]], Field(min_length=1)]
    """lm-eval tasks: registered names, paths of task YAML files, inline task definitions. `size_on_disk` adds the
    model's size, `peak_memory` the process's highest memory use (both in bytes), `tokens_per_second` the speed in
    tokens and in requests per second."""

    documents: Annotated[Literal["all", "enough"], BeforeValidator(word)] = "all"
    """"enough" stops as soon as `certain` is decided: the reference answers all documents, the candidate only those
    that are drawn by how sure the reference is. Needs `reference`."""

    certain: ClaimConfig | None = None
    """The claim that "enough" makes certain. None takes the bound in `require` on `accuracy_difference`, `kl_mean`
    or `top1_agreement`; without one, that accuracy falls by less than `matters`."""

    model_class: Annotated[Literal["hf", "ort", "ortgenai", "ort-multimodal"], BeforeValidator(word)] | None = None
    """Accepted so that a recipe ports by changing `type`: "ort", "ortgenai" and "ort-multimodal" all name this
    package's engine, "hf" the Hugging Face baseline. None decides by the model's files."""

    model_args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the constructor of lm-eval's model (`OrtLM`)."""

    repeats: Repeats | None = None
    """Answers to each document of tasks that generate, each drawn with a seed of its own (`gen_kwargs` with a
    temperature): adds `avg@n`, `maj@n` and `pass@k`. None takes the task's own number."""

    bootstrap_iters: NonNegativeInt = 100000
    """Resamples for the error bars that have no formula; 0 leaves those out."""

    sample_log_num: NonNegativeInt = 0
    """Documents of each task whose questions and answers are logged as JSON lines."""

    sample_log_dir: PathText | None = None
    """Folder of those logs; by default `output_dir`."""

    on_error: Annotated[Literal["stop", "report"], BeforeValidator(word)] = "stop"
    """What happens if requests have no answer, because every worker crashed on them (with `isolation` or `workers`) or
    because their picture or sound cannot be read: all others are evaluated and reported, with what is missing; after
    that "stop" fails, and "report" does not."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.documents == "all":
            if self.certain is not None:
                raise MissingError("'certain' needs 'documents' = 'enough'", "certain")
            return self
        if self.reference is None:
            raise MissingError("'enough' needs 'reference': its answers say which documents to draw", "documents")
        if self.limit is not None:
            raise ContradictionError("'documents' = 'enough' stops by itself", "limit", self.limit)
        if self.reference.is_same or self.reference.is_same_model:
            raise ContradictionError("'enough' is for two models, not for one in two places", "documents")
        _ = self.claim
        return self

    @property
    def thinks(self) -> bool:
        """Whether answers are separated from their reasoning."""
        return self.model_args.get("think_end_token") is not None

    @property
    def claim(self) -> ClaimConfig:
        """What "enough" makes certain."""
        return self.certain or implied_claim(self.bounds) or ClaimConfig(within=self.matters / 100)


class EvaluationConfig(ModelWork, EvaluationSettings):
    """A whole evaluation: the settings and the model."""

    def as_job(self) -> Self:
        """The evaluation as a job of its own, not a call in a Python program: `isolation` is decided."""
        if self.isolation != "auto":
            return self
        measured = [*self.tasks, *(name for bound in self.bounds for name in (bound.task, bound.metric))]
        isolation = "none" if "peak_memory" in measured else os.environ.get("OLIVE_EXT_ISOLATION", "process")
        return self.model_copy(update={"isolation": isolation})

    def opening(self) -> ModelSettings:
        """The settings of opening the evaluated model. Where `model.kind` is "auto", `model_class` decides the kind:
        each of its values names the backend of one kind."""
        kind = self.model.kind
        if kind == "auto" and self.model_class is not None:
            kind = "hf" if self.model_class == "hf" else "onnx"
        shared = {name: getattr(self, name) for name in ExecutionSettings.model_fields}
        shared["deterministic"] = self.deterministic is not False
        which = {**self.model.model_dump(exclude={"path"}), "kind": kind}
        return ModelSettings(model=self.model.path, **which, **shared)

    def reference_patch(self) -> dict[str, Any]:
        """The settings in `reference` for opening the reference, as `ModelSettings.of_reference` takes them."""
        assert self.reference is not None
        names = ReferenceConfig.model_fields.keys() & ModelSettings.model_fields.keys()
        return {"model": self.reference.path, **{name: getattr(self.reference, name) for name in names}}


class EvaluatorSettings(ComparisonSettings, ExecutionSettings):
    """The keys of a plug-in's evaluator, beside Olive's `metrics`, that are common to all."""

    def as_evaluation(self) -> EvaluationSettings:
        """The same models opened for an evaluation that runs no task."""
        shared = self.written({*ExecutionSettings.model_fields, *ComparisonSettings.model_fields})
        return EvaluationSettings(tasks=["size_on_disk"], **shared)
