"""The settings of the evaluator `OrtEvaluator`, and the metrics that a recipe names for it. Knows no Olive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from typing_extensions import Self

from olive_ext.config.base import NonNegativeInt, word
from olive_ext.config.embedding import EmbeddingSettings
from olive_ext.config.evaluation import ComparedSettings, JudgedSettings, WorkflowSettings
from olive_ext.config.execution import ExecutionSettings
from olive_ext.errors import ConfigError, listed

METRICS_TYPE = "OrtEvaluator"


_OF_DISTRIBUTIONS = ("mode", "records_dir", "top", "drawn", "float_model", "provider_stage")
"""Keys of a reference for what tasks compare beside answers."""


class MetricSettings(EmbeddingSettings, JudgedSettings, ComparedSettings, ExecutionSettings):
    """Keys of the evaluator `OrtEvaluator`, beside Olive's `metrics`. With `tasks` it measures embeddings."""

    language: str | None = None
    """Language of what a model of speech hears, as its generation_config.json names it ("de"). None takes English, as
    Olive's evaluator does."""

    speech_task: Annotated[Literal["transcribe", "translate"] | None, BeforeValidator(word)] = None
    """What a model of speech does with a `language`: write it down (None, too) or translate it."""

    bootstrap_iters: NonNegativeInt = 1000
    """Resamples of the documents for the standard error of a word error rate; 0 leaves it out."""

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        for name in _OF_DISTRIBUTIONS:
            if self.reference is not None and name in self.reference.model_fields_set:
                raise ValueError(f"'reference.{name}': the answers alone are compared here, take it out")
        return self

    def as_evaluation(self) -> WorkflowSettings:
        """The same models opened for an evaluation that runs no task."""
        names = self.model_fields_set & {*ExecutionSettings.model_fields, *ComparedSettings.model_fields}
        return WorkflowSettings(tasks=["size_on_disk"], **{name: getattr(self, name) for name in names})


def with_named_metrics(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe as Olive takes it: where one of its evaluators is an `OrtEvaluator`, the recipe's own "metrics" are
    put where these are named, and a recipe with one evaluator, no passes and no "evaluator" evaluates its input model.
    Public recipes of Whisper are written that way. Raises `ConfigError` for a name that is not there."""
    evaluators = recipe.get("evaluators")
    if not isinstance(evaluators, Mapping) or not any(_is_ours(block) for block in evaluators.values()):
        return recipe
    known = {item.get("name"): item for item in recipe.get("metrics") or () if isinstance(item, Mapping)}
    settled = {
        name: {**block, "metrics": _named(block["metrics"], known, name)} if _has_metrics(block) else block
        for name, block in evaluators.items()
    }
    changed = {**{name: value for name, value in recipe.items() if name != "metrics"}, "evaluators": settled}
    engine = recipe.get("engine") or {}
    if len(evaluators) == 1 and not recipe.get("passes") and "evaluator" not in recipe and "evaluator" not in engine:
        used = {"evaluator": next(iter(evaluators)), "evaluate_input_model": True}
        changed |= {"engine": {**engine, **used}} if isinstance(engine, Mapping) and engine else used
    return changed


def _is_ours(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == METRICS_TYPE


def _has_metrics(block: Any) -> bool:
    return isinstance(block, Mapping) and isinstance(block.get("metrics"), list)


def _named(metrics: list[Any], known: Mapping[Any, Any], evaluator: str) -> list[Any]:
    for number, item in enumerate(metrics):
        if isinstance(item, str) and item not in known:
            has = f"which has {listed(known)}" if known else "which the recipe does not have"
            raise ConfigError(f"'evaluators.{evaluator}.metrics.{number}' = '{item}': not in 'metrics', {has}")
    return [dict(known[item]) if isinstance(item, str) else item for item in metrics]
