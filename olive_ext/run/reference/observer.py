"""Observes a model while lm-eval runs it: positions of both models, the reference's scores and its generations.

Knows no engine and no lm-eval beyond the task, the document and the arguments of a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.errors import RunError
from olive_ext.report.comparison import ALL, Divergence
from olive_ext.run.reference.known_answers import ReferenceScores
from olive_ext.stats.compared_fields import Compared, Positions, TokenClasses
from olive_ext.stats.distances import measure_divergence
from olive_ext.text.requests import (
    GenerationOutput,
    Prompt,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
    Text,
)

Scoring: TypeAlias = ScoringRequest | RollingRequest
FloatArray: TypeAlias = npt.NDArray[np.float64]

Weights: TypeAlias = Mapping[str, Mapping[int, float]]
"""How many documents each drawn one stands for, by task and number."""


@dataclass(frozen=True)
class Generated:
    """A generation of the reference as a target behind its prompt, and the document that it answers."""

    task_name: str
    doc_id: int
    target: ScoringRequest
    doc: None = None
    """Its document counts in the metrics, whether the target can be scored or not."""


class Observer:
    """`observer` of an `OrtLM`: called with every lm-eval instance, the session's request for it, and its output.

    Of a model with a reference it collects the positions of both, by task and document, and into `scores`, where given,
    the reference's score of every request. Of a reference alone it collects the generations.
    """

    def __init__(self, scores: ReferenceScores | None = None) -> None:
        self.scores = scores
        self._classes: TokenClasses | None = None
        self._positions: dict[str, Positions] = {}
        self._generated: dict[tuple[Any, ...], Generated] = {}
        self._alone: dict[str, dict[int, tuple[int, float]]] = {}

    @property
    def generated(self) -> list[Generated]:
        """Each different answer to a document once; empty ones have nothing to compare."""
        return list(self._generated.values())

    def classify_tokens(self, tokenizer: Any) -> None:
        """Stores the class of each target token from now on, by the session's `tokenizer`."""
        self._classes = TokenClasses(tokenizer.token_text, tokenizer.special_ids)

    def __call__(self, instance: Any, request: Any, output: Any) -> None:
        if isinstance(output, GenerationOutput):
            if output.tokens:
                key = (str(instance.task_name), int(instance.doc_id), request.prompt, output.tokens)
                target = ScoringRequest(request.prompt, output.tokens, request.source, request.images, request.audio)
                self._generated[key] = Generated(key[0], key[1], target)
        elif output.compared is None:
            self._count(str(instance.task_name), int(instance.doc_id), output.token_logprobs)
        else:
            compared = self.add_targets(instance, request, output)
            if self.scores is not None:
                self.scores.note(instance.args, compared)

    def _count(self, task: str, document: int, logprobs: Sequence[float]) -> None:
        counts = self._alone.setdefault(task, {})
        number, total = counts.get(document, (0, 0.0))
        counts[document] = number + len(logprobs), total + math.fsum(logprobs)

    def targets_of(self, task: str, document: int) -> tuple[int, float]:
        """Number of the targets of a document that a model without a reference scored, and the sum of their
        log-probabilities in nats."""
        return self._alone.get(task, {}).get(document, (0, 0.0))

    def rows(self, task: str) -> npt.NDArray[Any]:
        """The compared targets of a task so far: `POSITION`."""
        return self._positions.get(task, Positions()).rows

    def add_targets(self, instance: Any, request: Scoring, output: ScoringOutput | RollingOutput) -> Compared:
        """Stores the targets of a scored request; returns their comparison. Of texts that are no token ids neither the
        tokens' classes nor how many precede them is known.

        `instance` is lm-eval's, or a `Generated`. Raises `RunError` for an output without a comparison.
        """
        if output.compared is None:
            raise RunError(f"task '{instance.task_name}': the model answered without its reference")
        context, target = _parts(request)
        before = () if isinstance(context, str) else context
        classes = None
        if self._classes is not None and not isinstance(target, str):
            last = before[-1] if before else None
            classes = self._classes.of(target, last if isinstance(last, int) else None)
        self._positions.setdefault(str(instance.task_name), Positions()).add(
            int(instance.doc_id),
            output.token_logprobs,
            output.compared,
            first_position=len(before),
            token_classes=classes,
        )
        return output.compared

    def by_document(self, task: str) -> dict[int, tuple[float, int]]:
        """Mean KL in nats and number of positions of each document of a task."""
        rows = self.rows(task)
        documents, places, counts = np.unique(rows["document"], return_inverse=True, return_counts=True)
        means = np.bincount(places, weights=rows["kl"], minlength=len(documents)) / np.maximum(counts, 1)
        return dict(zip(documents.tolist(), zip(means.tolist(), counts.tolist(), strict=True), strict=True))

    def beyond(self, cut: float, weights: Weights) -> float:
        """How much of the mean KL over all positions, in nats, single positions have beyond `cut`."""
        parts = [(part.rows["kl"], _by_row(part.rows, task, weights)) for task, part in self._positions.items()]
        total = math.fsum(float(own.sum()) for _, own in parts)
        return math.fsum(float(own @ np.maximum(kl - cut, 0)) for kl, own in parts) / total if total else 0.0

    def divergences(self, weights: Weights | None = None) -> tuple[Divergence, ...]:
        """The divergence of each scored task, in the order of the first requests; of several tasks also over all.

        `weights` say how many documents each drawn one stands for, by task and document."""
        parts = {task: (part, _by_row(part.rows, task, weights)) for task, part in self._positions.items()}
        found = [measure_divergence(task, *part) for task, part in parts.items()]
        if len(found) > 1:
            together = Positions.joined(part for part, _ in parts.values())
            found.append(measure_divergence(ALL, together, np.concatenate([own for _, own in parts.values()])))
        return tuple(item for item in found if item is not None)


def _by_row(rows: npt.NDArray[Any], task: str, weights: Weights | None) -> FloatArray:
    if weights is None:
        return np.ones(len(rows))
    numbers, places = np.unique(rows["document"], return_inverse=True)
    found: FloatArray = np.array([weights[task][int(number)] for number in numbers], np.float64)[places]
    return found


def _parts(request: Scoring) -> tuple[Prompt, Text]:
    """The context of a request, and its targets."""
    if isinstance(request, ScoringRequest):
        return request.context, request.target
    return () if request.prefix is None else (request.prefix,), request.text


def score_generated(lm: Any, generated: Sequence[Generated], observer: Observer | None = None) -> None:
    """Has the model score the reference's generations as targets; `observer` stores the comparisons."""

    def store(place: int, output: ScoringOutput) -> None:
        if observer is not None:
            observer.add_targets(generated[place], generated[place].target, output)

    from olive_ext.backends.lm_eval.lost_requests import noting

    if generated:
        with noting(lm.lost, lambda place: [generated[place]]):
            lm.session.loglikelihood([item.target for item in generated], on_result=store)
