"""What a recipe says to `OrtEvaluator`: its settings, Olive's metrics, those that the recipe names for it, and what is
wrong with them as they are written. Imports no Olive, whose names of types and sub types these are (0.13)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from typing_extensions import Self

from olive_ext.check.recipe import mapping, mappings
from olive_ext.config import EvaluatorSettings
from olive_ext.config.base import NonNegativeInt, word
from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError, ContradictionError, MissingError, OliveExtError, listed, suggest

METRICS_TYPE = "OrtEvaluator"

_OF_DISTRIBUTIONS = ("mode", "records_dir", "top", "drawn", "float_model")
"""Keys of a reference for what tasks compare beside answers."""

_TIMES = ("avg", "max", "min", "p50", "p75", "p90", "p95", "p99", "p999")
TIMED = ("latency", "throughput")
_BESIDE_TIMES = ("first_token_ms", "output_token_ms", "tokens_per_second")
_SPEECH, _VISION = ("wer", "rtfx"), ("exact_match", "relaxed_accuracy", "word_sort_ratio")
_TENSORS = ("accuracy_score", "f1_score", "precision", "recall", "auroc", "perplexity")
SUB_TYPES: Mapping[str, tuple[str, ...]] = {
    "accuracy": (*_SPEECH, *_VISION, *_TENSORS),
    "latency": _TIMES,
    "throughput": _TIMES,
    "size_on_disk": ("bytes",),
    "custom": (),
}
"""Sub types of each type of Olive's metrics (0.13); those of a custom one are its own."""

VISION_TASKS = {"vision-vqa": "exact_match", "vision-chart-qa": "relaxed_accuracy", "vision-ocr": "word_sort_ratio"}
"""Sub type of a metric by the task of its data."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "speech_transcription_pre_process": (
        *("audio_col", "text_col", "sample_rate", "max_samples", "limit", "seed", "task"),
        *("system_prompt", "instruction", "model_name", "trust_remote_code"),
    ),
    "vision_vqa_pre_process": (
        *("image_col", "question_col", "answer_col", "options_col", "system_prompt", "max_length"),
        *("max_samples", "limit", "seed", "task", "model_name", "trust_remote_code"),
    ),
}
"""The keys that Olive's components read, and those that it fills in; it drops any other key silently."""


class MetricSettings(EmbeddingSettings, EvaluatorSettings):
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
        for name in ("fail_on_loss", "matters"):
            if self.tasks and name in self.model_fields_set:
                problem = "mteb's scores have no verdict: bound their 'main_score_change' by 'require'"
                raise ContradictionError(problem, name, getattr(self, name))
        for name in _OF_DISTRIBUTIONS:
            if self.reference is not None and name in self.reference.model_fields_set:
                raise ContradictionError(f"'reference.{name}': the answers alone are compared here, take it out")
        return self


def with_named_metrics(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe as Olive takes it: where one of its evaluators is an `OrtEvaluator`, the recipe's own "metrics" are
    put where these are named, and a recipe with one evaluator, no passes and no "evaluator" evaluates its input model.
    Public recipes of Whisper are written that way. Raises `ConfigError` for a name that is not there."""
    evaluators = mapping(recipe.get("evaluators"))
    if not any(mapping(block).get("type") == METRICS_TYPE for block in evaluators.values()):
        return recipe
    known: dict[Any, Any] = {item.get("name"): item for item in mappings(recipe.get("metrics"))}
    settled = dict(evaluators)
    for name, block in evaluators.items():
        if isinstance(metrics := mapping(block).get("metrics"), list):
            for number, item in enumerate(metrics):
                if isinstance(item, str) and item not in known:
                    has = f"which has {listed(known)}" if known else "which the recipe does not have"
                    where = f"evaluators.{name}.metrics.{number}"
                    raise ConfigError(f"not in 'metrics', {has}", where, item, code="unknown_name")
            meant = [dict(known[item]) if isinstance(item, str) else item for item in metrics]
            settled[name] = {**block, "metrics": meant}
    changed = {**{name: value for name, value in recipe.items() if name != "metrics"}, "evaluators": settled}
    engine = recipe.get("engine") or {}
    if len(evaluators) == 1 and not recipe.get("passes") and "evaluator" not in recipe and "evaluator" not in engine:
        used = {"evaluator": next(iter(evaluators)), "evaluate_input_model": True}
        changed |= {"engine": {**engine, **used}} if isinstance(engine, Mapping) and engine else used
    return changed


def metric_mistakes(
    recipe: Mapping[str, Any], where: str, metrics: Any, settings: MetricSettings
) -> Iterator[OliveExtError]:
    """An error for each mistake in the metrics, as a recipe or Olive writes them, and for a bound on what none of them
    gives. `where` is the section's place in the recipe. Tasks need none. Loads no data."""
    if settings.tasks:
        return
    if not isinstance(metrics, list) or not metrics:
        problem = "missing: give Olive's metrics, of wer or exact_match for instance"
        yield MissingError(problem, f"{where}.metrics")
        return
    data = {str(item.get("name")): item for item in mappings(recipe.get("data_configs"))}
    measured: dict[str, list[str]] = {}
    for number, metric in enumerate(metrics):
        if not isinstance(metric, Mapping):
            if not isinstance(metric, str):  # whose mistake is where names are looked up
                problem = "give a mapping, or the name of one in 'metrics'"
                yield ConfigError(problem, f"{where}.metrics.{number}", metric)
            continue
        place, names = f"{where}.metrics.{metric.get('name', number)}", _sub_types(metric)
        yield from _kind(place, metric, names)
        yield from _data(place, metric.get("data_config"), names, data)
        name, beside = str(metric.get("name")), _BESIDE_TIMES if metric.get("type") in TIMED else ()
        given = {name: [*names, *beside]}  # as bounds may name it
        if "wer" in names:
            given = {name: [*names, *beside, "wer_jiwer"], sentences_of(name): []}
        if twice := [name for name in given if name in measured]:
            problem = f"'{twice[0]}' is there twice (a wer of 'm' is also 'm_sentences'): rename one"
            yield ContradictionError(problem, f"{where}.metrics")
        measured |= given
    if settings.bounds and len(mappings(metrics)) == len(metrics):
        from olive_ext.report.metrics import COMPARISON_NAMES
        from olive_ext.run.bounds import PEAK_MEMORY, check_names

        bounds = [(bound.task, bound.metric) for bound in settings.bounds]
        compared = COMPARISON_NAMES if settings.reference is not None else ()
        try:
            check_names(bounds, {PEAK_MEMORY: ["bytes"], **measured}, compared, f"{where}.require")
        except ConfigError as error:
            yield error


def sentences_of(name: str) -> str:
    """The task that has the sentences of a metric of transcripts."""
    return f"{name}_sentences"


def described(metrics: Any, settings: MetricSettings) -> str:
    """The tasks, or the metrics with their sub types and data, for a person."""
    if settings.tasks:
        return f"tasks of mteb: {', '.join(settings.tasks)}"
    texts = []
    for metric in mappings(metrics):
        data = f" of {metric['data_config']}" if isinstance(metric.get("data_config"), str) else ""
        texts.append(f"{metric.get('name')} ({', '.join(_sub_types(metric)) or metric.get('type')}){data}")
    return f"metrics: {'; '.join(texts) or 'none'}"


def _sub_types(metric: Mapping[str, Any]) -> list[str]:
    return [str(item.get("name")) for item in mappings(metric.get("sub_types"))]


def _kind(place: str, metric: Mapping[str, Any], names: list[str]) -> Iterator[OliveExtError]:
    if "name" not in metric:
        yield MissingError("missing: goals and results are called by it", f"{place}.name")
    kind = str(metric.get("type"))
    if kind not in SUB_TYPES:
        yield ConfigError(f"give {', '.join(SUB_TYPES)}", f"{place}.type", metric.get("type"))
        return
    accepted = SUB_TYPES[kind]
    if accepted and not names and kind != "size_on_disk":
        yield MissingError(f"missing: give {', '.join(accepted)}", f"{place}.sub_types")
    if metric.get("backend", "torch_metrics") == "torch_metrics" and accepted:
        for name in (name for name in names if name not in accepted):
            hint = suggest(name, accepted) or f"a metric of type '{kind}' has {', '.join(accepted)}"
            yield ConfigError(hint, f"{place}.sub_types", name, code="unknown_name")
    kinds = [some for some in (_SPEECH, _VISION, _TENSORS) if set(some) & set(names)]
    if kind == "accuracy" and len(kinds) > 1:
        problem = f"put {' and '.join(kinds[0])} into a metric of their own"
        yield ContradictionError(problem, f"{place}.sub_types", names)


def _data(place: str, data: Any, names: list[str], known: Mapping[str, Mapping[str, Any]]) -> Iterator[OliveExtError]:
    asks = next((kind for kind in (_SPEECH, _VISION) if set(kind) & set(names)), None)
    if data is None and asks:
        problem = f"missing: name one of 'data_configs', with {' or '.join(PARAMETERS)}"
        yield MissingError(problem, f"{place}.data_config")
    if isinstance(data, str) and data not in known:
        problem = f"not in 'data_configs', which has {', '.join(known) or 'none'}"
        yield ConfigError(problem, f"{place}.data_config", data, code="unknown_name")
    written = mapping(known.get(data) if isinstance(data, str) else data)
    component = mapping(written.get("pre_process_data_config"))
    keys = {**component, **mapping(component.get("params"))}
    accepted, where = PARAMETERS.get(str(component.get("type")), ()), f"data_configs.{written.get('name')}"
    for key in (key for key in keys if accepted and key not in (*accepted, "type", "params")):
        if near := suggest(key, accepted):
            place_of_key = f"{where}.pre_process_data_config.params.{key}"
            problem = f"unknown key '{place_of_key}': {near} Olive would drop it"
            yield ConfigError(problem, place_of_key, keys[key], code="unknown_key")
    task = keys.get("task")
    for name in names if asks is _VISION and task is not None else ():
        if VISION_TASKS.get(str(task)) != name:
            pairs = ", ".join(f"{kind} of '{other}'" for other, kind in VISION_TASKS.items())
            problem = f"its data has the task '{task}': Olive measures {pairs}"
            yield ContradictionError(problem, f"{place}.sub_types", name)
