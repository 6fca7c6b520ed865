"""What is wrong with the metrics of an `OrtEvaluator` section as they are written. Imports no Olive, whose names of
types and sub types these are (0.13), and loads no data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

_TIMES = ("avg", "max", "min", "p50", "p75", "p90", "p95", "p99", "p999")
_SPEECH, _VISION = ("wer", "rtfx"), ("exact_match", "relaxed_accuracy", "word_sort_ratio")
_TENSORS = ("accuracy_score", "f1_score", "precision", "recall", "auroc", "perplexity")
SUB_TYPES: Mapping[str, tuple[str, ...]] = {
    "accuracy": (*_SPEECH, *_VISION, *_TENSORS),
    "latency": _TIMES,
    "throughput": _TIMES,
    "size_on_disk": ("bytes",),
    "custom": (),
}
"""Sub types of each type of metric; those of a custom one are its own."""

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
"""What Olive's components read, and what it fills in; it drops any other key without a word."""


def metric_mistakes(recipe: Mapping[str, Any], where: str, metrics: Any) -> Iterator[str]:
    """A sentence for each mistake; `where` is the section's place in the recipe."""
    if not isinstance(metrics, list) or not metrics:
        yield f"'{where}.metrics' is missing: give Olive's metrics, of wer or exact_match for instance"
        return
    written = recipe.get("data_configs")
    known = {
        str(item.get("name")): item
        for item in (written if isinstance(written, list) else [])
        if isinstance(item, Mapping)
    }
    for number, metric in enumerate(metrics):
        if isinstance(metric, str):
            continue  # told where names are looked up
        if not isinstance(metric, Mapping):
            yield f"'{where}.metrics.{number}' = {json.dumps(metric)}: give a mapping, or the name of one in 'metrics'"
            continue
        place = f"{where}.metrics.{metric.get('name', number)}"
        names = _names(metric)
        yield from _kind(place, metric, names)
        yield from _data(place, metric.get("data_config"), names, known)


def described(metrics: Any) -> str:
    """The metrics with their sub types and data, for a person."""
    mappings = [metric for metric in metrics if isinstance(metric, Mapping)] if isinstance(metrics, list) else []
    texts = []
    for metric in mappings:
        data = f" of {metric['data_config']}" if isinstance(metric.get("data_config"), str) else ""
        texts.append(f"{metric.get('name')} ({', '.join(_names(metric)) or metric.get('type')}){data}")
    return "; ".join(texts) or "none"


def _names(metric: Mapping[str, Any]) -> list[str]:
    written = metric.get("sub_types")
    return [str(item.get("name")) for item in written if isinstance(item, Mapping)] if isinstance(written, list) else []


def _kind(place: str, metric: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    if "name" not in metric:
        yield f"missing key '{place}.name': a name that goals and results are called by"
    kind = str(metric.get("type"))
    if kind not in SUB_TYPES:
        yield f"'{place}.type' = '{kind}': give {', '.join(SUB_TYPES)}"
        return
    accepted = SUB_TYPES[kind]
    if accepted and not names and kind != "size_on_disk":
        yield f"'{place}.sub_types' is missing: give {', '.join(accepted)}"
    if metric.get("backend", "torch_metrics") == "torch_metrics" and accepted:
        for name in (name for name in names if name not in accepted):
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"a metric of type '{kind}' has {', '.join(accepted)}"
            yield f"'{place}.sub_types' has '{name}': {hint}"
    kinds = [some for some in (_SPEECH, _VISION, _TENSORS) if set(some) & set(names)]
    if kind == "accuracy" and len(kinds) > 1:
        yield f"'{place}.sub_types' = {', '.join(names)}: put {' and '.join(kinds[0])} into a metric of their own"


def _data(place: str, data: Any, names: list[str], known: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    asks = next((kind for kind in (_SPEECH, _VISION) if set(kind) & set(names)), None)
    if data is None and asks:
        yield f"'{place}.data_config' is missing: name one of 'data_configs', with {' or '.join(PARAMETERS)}"
    if not isinstance(data, str):
        return
    if data not in known:
        yield f"'{place}.data_config' = '{data}': not in 'data_configs', which has {', '.join(known) or 'none'}"
        return
    component = known[data].get("pre_process_data_config")
    component = component if isinstance(component, Mapping) else {}
    accepted = PARAMETERS.get(str(component.get("type")), ())
    params = component.get("params")
    given = {**component, **(params if isinstance(params, Mapping) else {})}
    for key in (key for key in given if accepted and key not in (*accepted, "type", "params")):
        if near := difflib.get_close_matches(key, accepted, n=1):
            where = f"data_configs.{data}.pre_process_data_config.params.{key}"
            yield f"unknown key '{where}': did you mean '{near[0]}'? Olive would drop it"
