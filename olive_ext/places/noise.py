"""The noise of a model: what it says of the same requests in other forms of running it, and with its products' inputs
moved by rounding. Knows no statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from olive_ext.config import EngineConfig
from olive_ext.errors import OliveExtError, RunError
from olive_ext.model import ResolvedModel
from olive_ext.places.rounding import move_inputs
from olive_ext.places.sample import FloatArray, Kept
from olive_ext.python_processes import usable_processors
from olive_ext.session.opening import open_model
from olive_ext.text.requests import ScoringRequest

CHUNK = 24
"""Tokens of a step where these are few: no multiple of what kernels take in one go."""

NUM_MOVED = 2
"""Runs with moved inputs."""


@dataclass(frozen=True)
class Variant:
    """One way of running a model that changes its numbers by rounding alone."""

    words: str
    engine: Mapping[str, Any]
    edit_graph: Callable[[Any], None] | None = field(default=None, compare=False)


def form_of(model: ResolvedModel) -> Variant:
    """Another form: a row for each text instead of their shared steps, few tokens at a time, on other threads. All of
    this in one run: each session that is opened costs."""
    threads = 2 if model.settings.engine.num_threads == 1 and (usable_processors() or 1) > 1 else 1
    words = f"rows, chunks of {CHUNK} tokens, {threads} thread{'s' * (threads > 1)}"
    return Variant(words, {"chunk_size": CHUNK, "scoring": "rows", "num_threads": threads})


def moved(unit: str, count: int = NUM_MOVED) -> list[Variant]:
    """With moved inputs, each run by other numbers."""
    words = f"inputs of products moved as by rounding in {unit}"
    return [
        Variant(f"{words}, draw {seed + 1}", {}, edit_graph=partial(move_inputs, unit=unit, seed=seed))
        for seed in range(count)
    ]


def log_probabilities(
    model: ResolvedModel, variant: Variant, documents: Sequence[Sequence[Kept]], max_length: int
) -> list[FloatArray]:
    """The log-probabilities in nats of the targets of each document's requests, in their order. Raises
    `OliveExtError` where the model cannot be run in this way."""
    engine = model.settings.engine.model_dump(exclude_unset=True)
    here = {"isolation": "none", "workers": None, "max_length": max_length, "deterministic": True}
    opened = model.patched({**here, "engine": EngineConfig.parse({**engine, **variant.engine})})
    opened = opened if variant.edit_graph is None else replace(opened, edit_graph=variant.edit_graph)
    requests = [kept.request for document in documents for kept in document]
    try:
        with open_model(opened) as session:
            outputs = _answers(session, requests)
    except ValueError as error:
        raise error if isinstance(error, OliveExtError) else RunError(str(error)) from error
    numbers = iter(outputs)
    return [np.concatenate([np.asarray(next(numbers), np.float64) for _ in document]) for document in documents]


def _answers(session: Any, requests: Sequence[Any]) -> list[Sequence[float]]:
    """Log-probabilities of each request's targets, of both kinds of requests."""
    found: dict[int, Sequence[float]] = {}
    for is_scoring, ask in ((True, session.loglikelihood), (False, session.loglikelihood_rolling)):
        places = [index for index, one in enumerate(requests) if isinstance(one, ScoringRequest) is is_scoring]
        if places:
            outputs = ask([requests[index] for index in places])
            found.update(zip(places, (output.token_logprobs for output in outputs), strict=True))
    return [found[index] for index in range(len(requests))]
