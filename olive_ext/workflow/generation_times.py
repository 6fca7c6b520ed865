"""Olive's metrics `latency` and `throughput` of generative models: how long the first documents of a data config take
to be answered, and what the engine's counters say of that. Knows no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from olive.evaluator.metric import get_latency_config_from_metric
from olive.evaluator.olive_evaluator import OliveEvaluator

from olive_ext.config import MetricSettings
from olive_ext.errors import ConfigError, TaskError
from olive_ext.session import Session
from olive_ext.text.requests import GenerationRequest
from olive_ext.workflow.generated_answers import documents, items_of, of_documents

_PROMPT = "Once upon a time there was a model of language, and it was asked how it was."
_NEW_TOKENS = 64
"""Of an answer to a text, at most half of the context; answers to pictures and sounds end by themselves."""


def timed(metric: Any, session: Session, settings: MetricSettings) -> tuple[Any, dict[str, float]]:
    """Olive's result of the metric, over its warm-up and repeats, each of one batch; beside it milliseconds until each
    answer of the batch has a first token, and for a token behind it, and tokens generated per second."""
    requests = _batch(metric, session, settings)
    first = [replace(request, max_new_tokens=1) for request in requests]
    warmup, repeats, pause = (number or 0 for number in get_latency_config_from_metric(metric))
    _seconds(lambda: session.generate(requests), warmup, 0)
    before = session.counters.tokens_generated
    whole = _seconds(lambda: session.generate(requests), max(repeats, 1), pause)
    tokens = (session.counters.tokens_generated - before) / len(whole)
    until_first = float(np.mean(_seconds(lambda: session.generate(first), max(repeats, 1), pause)))
    is_latency = metric.type.value == "latency"
    result = (OliveEvaluator.compute_latency if is_latency else OliveEvaluator.compute_throughput)(metric, whole)
    mean, more = float(np.mean(whole)), tokens / len(requests) - 1
    beside = {"first_token_ms": 1e3 * until_first, "tokens_per_second": tokens / mean}
    if more > 0:
        beside["output_token_ms"] = 1e3 * max(mean - until_first, 0.0) / more
    return result, beside


def _seconds(run: Callable[[], Any], count: int, pause: float) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
        time.sleep(pause)
    return found


def _batch(metric: Any, session: Session, settings: MetricSettings) -> Sequence[GenerationRequest]:
    """One batch of the data config's first documents; without one a text of this package's."""
    data, name = metric.data_config, metric.name
    size = 1 if data is None else int(data.dataloader_params.get("batch_size") or 1)
    if data is not None and of_documents(data):
        found = (document.request for document in documents(metric, session, settings))
        requests = list(islice((request for request in found if request is not None), size))
    else:
        if session.encoding is not None:
            raise ConfigError(f"'metrics.{name}.data_config' is missing: this model needs a source to answer to")
        most = max(1, min(_NEW_TOKENS, session.max_length // 2))
        prompts = [_PROMPT] if data is None else [_ids(given, name) for given, _ in islice(items_of(data), size)]
        requests = [GenerationRequest(prompt, max_new_tokens=most) for prompt in prompts]
    if not requests:
        raise TaskError(f"'metrics.{name}': its data config has no documents")
    return requests


def _ids(given: Any, name: str) -> list[int]:
    """The token ids of a document of Olive's text data."""
    if not hasattr(given, "keys") or "input_ids" not in given:
        raise TaskError(f"'metrics.{name}': its data config gives no 'input_ids', no sound and no picture")
    return [int(token) for token in np.asarray(given["input_ids"]).reshape(-1)]
