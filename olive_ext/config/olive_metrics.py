"""The settings of the evaluator `OrtEvaluator`: embeddings (how a text becomes a vector, and the tasks of mteb that
measure it), Olive's metrics, and those that a recipe names for it. Knows no Olive and no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import Auto, NonNegativeInt, Place, PositiveInt, Strict, word
from olive_ext.config.evaluation import ComparedSettings, JudgedSettings, WorkflowSettings
from olive_ext.config.execution import ExecutionSettings
from olive_ext.errors import ConfigError, listed

METRICS_TYPE = "OrtEvaluator"

_OF_DISTRIBUTIONS = ("mode", "records_dir", "top", "drawn", "float_model", "provider_stage")
"""Keys of a reference for what tasks compare beside answers."""

Pooling = Literal["mean", "cls", "last"]


class EmbeddingSettings(Strict):
    """Keys of embedding models: those of Olive's `MTEBEvaluator`, and what a model's files say otherwise."""

    tasks: list[str] = Field(default_factory=list)
    """Tasks of mteb ("STS17"), by name. With tasks the model is measured as an embedding model, and `metrics` only
    declares priorities and goals."""

    eval_splits: list[str] | None = None
    """Splits of the tasks that are evaluated; None takes those of each task."""

    eval_subsets: list[str] | None = None
    """Subsets of the tasks (languages, mostly) that are evaluated; None takes all."""

    output_folder: Place | None = None
    """Folder for mteb's own results, one JSON file for each task. None writes none."""

    model_class: Annotated[Literal["ort", "ortgenai"] | None, BeforeValidator(word)] = None
    """As in Olive's evaluator; both names mean this package's engine."""

    pooling: Annotated[Pooling | Auto, BeforeValidator(word)] = "auto"
    """Which of a text's hidden states are its embedding: their mean, that of the first token, or of the last. "auto"
    takes what the model's sentence-transformers files say, else "last" for decoders with a KV cache and "mean" for
    other graphs, unless the graph returns embeddings of whole texts itself ("sentence_embedding")."""

    reranker: Annotated[Literal["yes_no"] | None, BeforeValidator(word)] = None
    """"yes_no" scores pairs of reranking tasks with a decoder: its probability of "yes" against "no" behind
    Qwen3-Reranker's template, with the task's instruction, else with `prompts`' "query", else with mteb's for these
    models. The two tokens are the tokenizer's, or those that the model's sentence-transformers files name."""

    normalize: bool = True
    """Divides embeddings by their length, as Olive's evaluator does."""

    prompts: dict[str, str] | None = None
    """What is put before texts, by mteb's names: a task, a type of task, "query", "document" or combinations such as
    "NFCorpus-query". None takes those of the model's sentence-transformers files; {} puts nothing, as Olive does."""

    truncate_dim: PositiveInt | None = None
    """Only so many of an embedding's first numbers are used (Matryoshka)."""

    embedding_precision: Annotated[Literal["float32", "int8", "binary"], BeforeValidator(word)] = "float32"
    """"int8" rounds each dimension to 256 steps between the least and the greatest of the first texts that are
    embedded, "binary" keeps the signs; tasks see the rounded numbers."""


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
