"""Answers to lm-eval's requests that need no forward pass: a source for `OrtLM.known_answers`.

Knows no session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from olive_ext.errors import RunError
from olive_ext.media.pictures import media_digest
from olive_ext.stats.compared_fields import Compared

Ask: TypeAlias = Callable[[list[Any]], list[Any]]

_GENERATION = "generate_until"


class ReferenceScores:
    """Scores of a reference that was resident under a candidate, by lm-eval's arguments of each request.

    As `OrtLM.known_answers` it answers lm-eval's second run of the same tasks without the reference's forward passes.
    """

    def __init__(self) -> None:
        self.is_partial = False
        """Whether requests may be unknown because the candidate has no answer to them; their documents do not count."""

        self._scores: dict[tuple[str, ...], tuple[float, bool]] = {}

    def note(self, args: Sequence[Any], compared: Compared) -> None:
        """Keeps the reference's log-probability in nats of all targets of a request, and whether all are greedy."""
        logprobs = np.asarray(compared.reference_logprobs).tolist()
        self._scores[_texts(args)] = math.fsum(logprobs), bool(np.all(compared.reference_is_greedy))

    def __call__(self, requests: list[Any], ask: Ask) -> list[Any]:
        """The reference's scores; generations come from the model itself.

        Raises `RunError` for a request that was not scored in the first run.
        """
        if requests and requests[0].request_type == _GENERATION:
            return ask(requests)
        return [self._find(request) for request in requests]

    def _find(self, request: Any) -> Any:
        texts = _texts(request.args)
        is_rolling = request.request_type == "loglikelihood_rolling"
        if not is_rolling and not texts[1]:
            return 0.0, True  # an empty continuation is certain, so no model has scored it
        if texts not in self._scores and self.is_partial:
            return math.nan if is_rolling else (math.nan, False)
        if texts not in self._scores:
            raise RunError("lm-eval asks something else the second time: a task's prompts change from run to run")
        return self._scores[texts][0] if is_rolling else self._scores[texts]


def _texts(args: Sequence[Any]) -> tuple[str, ...]:
    return (*map(str, args[:2]), media_digest(args[2:]))
