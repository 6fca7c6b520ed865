"""Observes a model while lm-eval runs it: positions of both models, the reference's scores, which answer lm-eval's
requests without a forward pass, and its generations.

Knows no engine and no lm-eval beyond the task, the document and the arguments of a request.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from olive_ext.errors import RunError
from olive_ext.media.pictures import media_digest
from olive_ext.media.processor import read_sound
from olive_ext.report.comparison import ALL, Coverage, Divergence
from olive_ext.session.requests import (
    GenerationOutput,
    Prompt,
    RollingOutput,
    RollingRequest,
    ScoringOutput,
    ScoringRequest,
)
from olive_ext.stats.compared_fields import Compared, FloatArray, Positions, TokenClasses
from olive_ext.stats.distances import measure_divergence

_GENERATION = "generate_until"
_MEDIA = {"image": "images", "audio": "audio"}
"""Fields of a request, by what they hold."""

_NEARLY_ONE = 1 - 2.0**-24
"""The largest probability below 1 in float32."""

_SURE_NATS = 2.0
"""A token that leads all others by so much is the next one in every sound graph, however its kernels round."""

_SAME, _FARTHER = 1e-4, 10
"""The most nats by which one model's whole texts are apart in fp32. Of models that are farther apart, only tokens count
that lead all others by so many times their largest distance."""

_FEW, _TIES = 2, 1e-3
"""How many such answers may part nevertheless, and as a share of all their tokens: one in ten thousand ties within
`_SAME`, if every second one ties within one nat. As many more may as the reference has written tokens that are not its
own first ones on whole texts: so its kernels round."""


class ReferenceScores:
    """The scores of a reference that was resident under a candidate, by lm-eval's arguments of each request.

    As `OrtLM.known_answers`, it answers lm-eval's second run of the same tasks without forward passes of the reference.
    """

    def __init__(self) -> None:
        self.is_partial = False
        """Whether requests may be unknown because the candidate did not answer them; their documents do not count."""

        self._scores: dict[tuple[str, ...], tuple[float, bool]] = {}

    def note(self, args: Sequence[Any], compared: Compared) -> None:
        """Keeps the reference's log-probability in nats of all targets of a request, and whether all are greedy."""
        logprobs = np.asarray(compared.reference_logprobs).tolist()
        self._scores[_texts(args)] = math.fsum(logprobs), bool(np.all(compared.reference_is_greedy))

    def __call__(self, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The reference's scores; generations come from the model itself.

        Raises `RunError` for a request that was not scored in the first run.
        """
        if requests and requests[0].request_type == _GENERATION:
            return ask(requests)
        return [self._find(request) for request in requests]

    def _find(self, request: Any) -> Any:
        texts = _texts(request.args)
        if not texts[-2]:  # nothing is certain, so no model has scored it
            score = 0.0, True
        elif texts in self._scores or self.is_partial:
            score = self._scores.get(texts, (math.nan, False))
        else:
            raise RunError("a task built other prompts in the second run: make its prompts deterministic")
        return score[0] if request.request_type == "loglikelihood_rolling" else score


def _texts(args: Sequence[Any]) -> tuple[str, ...]:
    return (*map(str, args[:2]), media_digest(args[2:]))


Answered: TypeAlias = tuple[str, int, Prompt]
"""A task, a document's number and a prompt."""

Scoring: TypeAlias = ScoringRequest | RollingRequest

Weights: TypeAlias = Mapping[str, Mapping[int, float]]
"""How many documents each drawn one stands for, by task and number."""


@dataclass(frozen=True)
class Generated:
    """A generation of the reference as a target after its prompt, and the document that it answers."""

    task_name: str
    doc_id: int
    target: ScoringRequest
    doc: None = None
    """Its document counts in the metrics, whether or not the target can be scored."""


class Observer:
    """`observer` of an `OrtLM`: called with every lm-eval instance, the session's request for it, and its output.

    Of a model with a reference it collects the positions of both, by task and document, and into `scores`, where given,
    the reference's score of every request. Of a reference alone it collects the generations.
    """

    def __init__(self, scores: ReferenceScores | None = None, sample: Any = None) -> None:
        """`sample.note` gets every compared request."""
        self.scores = scores
        self.sample = sample
        self.classes: TokenClasses | None = None
        """Where given, the class of each target token is stored."""

        self._positions: dict[str, Positions] = {}
        self._answering: set[str] = set()
        """Tasks that score more than whole texts."""

        self._generating: set[str] = set()
        """The tasks that score generated answers."""

        self._generated: dict[tuple[Any, ...], Generated] = {}
        self.greedy: dict[Answered, tuple[int, ...]] = {}
        """The tokens of every greedy generation, with the tokens of a stop string and without a stop id."""

        self._tokens: set[int] = set()
        """All tokens that were read or scored, where they are known."""

        self.modalities: set[str] = set()
        """The values of `Modality` that compared requests held."""

        self._longest = 0
        """Tokens before and of the longest request's targets."""

        self._seconds = 0.0
        """Of the longest sound."""

        self._first = sys.maxsize
        self._first_rows: dict[tuple[Any, ...], int] = {}
        self._alone: dict[tuple[str, int], tuple[int, float]] = {}

    @property
    def generated(self) -> list[Generated]:
        """Each different answer to a document once, without empty ones, which have nothing to compare."""
        return list(self._generated.values())

    def __call__(self, instance: Any, request: Any, output: Any) -> None:
        """Notes one output of the session, by its kind."""
        task, document = str(instance.task_name), int(instance.doc_id)
        if isinstance(output, GenerationOutput):
            asked = (task, document, request.prompt)
            if request.temperature == 0 and request.num_beams == 1:
                self.greedy[asked] = output.tokens
            if output.tokens:
                key = (*asked, output.tokens)
                target = ScoringRequest(request.prompt, output.tokens, request.source, request.images, request.audio)
                self._generated[key] = Generated(task, document, target)
        elif output.compared is None:
            number, total = self.targets_of(task, document)
            logprobs = output.token_logprobs
            self._alone[task, document] = number + len(logprobs), total + math.fsum(logprobs)
        else:
            compared = self.add_targets(instance, request, output)
            if self.scores is not None:
                self.scores.note(instance.args, compared)

    def targets_of(self, task: str, document: int) -> tuple[int, float]:
        """The number of targets of a document that a model without a reference scored, and the sum of their
        log-probabilities in nats."""
        return self._alone.get((task, document), (0, 0.0))

    def rows(self, task: str) -> npt.NDArray[Any]:
        """The compared targets [T] of a task so far, of type `POSITION`."""
        return self._positions.get(task, Positions()).rows

    def parted(self, reference: Observer) -> Iterator[tuple[float, Answered, int]]:
        """Greedy answers that part from the `reference`'s: by how many nats both models score the reference's token
        there at least before all others, which together have what its probability leaves (0 where it was not scored);
        the answer, and the token's index in it."""
        for asked, theirs in reference.greedy.items():
            if (own := self.greedy.get(asked, theirs)) == theirs:
                continue
            pairs = enumerate(zip(theirs, own, strict=False))
            index = next((place for place, (one, two) in pairs if one != two), min(len(theirs), len(own)))
            first = self._first_rows.get((*asked, theirs))
            least = 0.0
            if first is not None and index < len(theirs):
                row = self.rows(asked[0])[first + index]
                share = min(float(np.exp(min(row["reference_logprobs"], row["logprobs"]))), _NEARLY_ONE)
                least = math.log(share / (1 - share)) if share > 0 else -math.inf
            yield least, asked, index

    def contradicted(self, reference: Observer) -> str:
        """How greedy answers contradict the model's own scores of whole texts; empty where they do not."""
        apart, turned = 0.0, 0
        for task, rows in ((task, self.rows(task)) for task in self.tasks):
            nats = np.abs(rows["logprobs"] - rows["reference_logprobs"])
            apart = max(apart, float(np.nan_to_num(nats, nan=np.inf).max(initial=0)))
            is_other = rows["reference_logprobs"] < rows["reference_top_logprobs"] - _SAME
            turned += int(is_other.sum()) if task in self._generating else 0
        ends = {asked: min(len(self.greedy.get(asked, ())), len(theirs)) for asked, theirs in reference.greedy.items()}
        parted = [item for item in self.parted(reference) if item[2] < ends[item[1]]]
        if sure := [item for item in parted if item[0] > _SURE_NATS]:
            _, (task, number, _), place = sure[0]
            how = f"token {place + 1} of the answer to document {number} of '{task}' is not the one that whole texts"
            return f"writes other answers than it scores: {how} score {_SURE_NATS:g} nats and more before all others"
        many = [item for item in parted if apart < _SAME or item[0] > _FARTHER * apart]
        if self._generating and len(many) > _FEW + _TIES * sum(ends.values()) + turned:
            how = f"{len(many)} of {len(ends)} are not the reference's, and whole texts"
            return f"writes other answers than it scores: {how} are at most {apart:.2g} nats apart"
        return ""

    def add_targets(self, instance: Any, request: Scoring, output: ScoringOutput | RollingOutput) -> Compared:
        """Stores the targets of a scored request; returns their comparison. Of texts that are no token ids neither the
        tokens' classes nor how many precede them is known.

        `instance` is lm-eval's, or a `Generated`. Raises `RunError` for an output without a comparison.
        """
        if output.compared is None:
            raise RunError(f"task '{instance.task_name}': the model answered without its reference")
        task, document = str(instance.task_name), int(instance.doc_id)
        if isinstance(request, ScoringRequest):
            context, target = request.context, request.target
            self._answering.add(task)
        else:
            context, target = () if request.prefix is None else (request.prefix,), request.text
        before = () if isinstance(context, str) else context
        classes = None
        if self.classes is not None and not isinstance(target, str):
            last = before[-1] if before else None
            classes = self.classes.of(target, last if isinstance(last, int) else None)
        if self.sample is not None:
            self.sample.note(task, document, request, output)
        if not isinstance(target, str):
            self._tokens.update(one for one in (*before, *target) if isinstance(one, int))
        self.modalities |= {name for name, field in _MEDIA.items() if getattr(request, field, ())}
        for samples_N, rate in map(read_sound, getattr(request, "audio", ())):
            self._seconds = max(self._seconds, len(samples_N) / rate)
        self._longest = max(self._longest, 1 + int(output.compared.positions.max(initial=-1)))
        self._first = min(self._first, 1 + int(output.compared.positions.min(initial=sys.maxsize - 1)))
        positions = self._positions.setdefault(task, Positions())
        if isinstance(instance, Generated):
            self._generating.add(task)
            self._first_rows[task, document, context, target] = len(positions)
        logprobs, first = output.token_logprobs, len(before)
        positions.add(document, logprobs, output.compared, first_position=first, token_classes=classes)
        return output.compared

    def reach(self, context: int | None, vocab_size: int | None) -> Coverage | None:
        """How far into the context and the vocabulary the compared targets reached, and how long sounds were; None
        without any target."""
        if not self._longest:
            return None
        share = len(self._tokens) / vocab_size if vocab_size and self._tokens else None
        longest = min(self._longest, context or self._longest)
        return Coverage(longest, context, share, first=min(self._first, longest), seconds=self._seconds)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks with compared targets, in the order of their first requests."""
        return tuple(self._positions)

    def by_document(self, task: str) -> dict[int, tuple[float, int]]:
        """Mean KL in nats and number of positions of each document of a task."""
        rows = self.rows(task)
        documents, indices, counts = np.unique(rows["document"], return_inverse=True, return_counts=True)
        means = np.bincount(indices, weights=rows["kl"], minlength=len(documents)) / np.maximum(counts, 1)
        return dict(zip(documents.tolist(), zip(means.tolist(), counts.tolist(), strict=True), strict=True))

    def beyond(self, cut: float, weights: Weights) -> float:
        """The part of the mean KL over all positions, in nats, by which single positions exceed `cut`."""
        parts = [(part.rows["kl"], _by_row(part.rows, task, weights)) for task, part in self._positions.items()]
        total = math.fsum(float(own.sum()) for _, own in parts)
        return math.fsum(float(own @ np.maximum(kl - cut, 0)) for kl, own in parts) / total if total else 0.0

    def divergences(self, weights: Weights | None = None) -> tuple[Divergence, ...]:
        """The divergence of each scored task, in the order of the first requests; of several tasks also over all.

        `weights` say how many documents each drawn one stands for, by task and document."""
        parts = {task: (part, _by_row(part.rows, task, weights)) for task, part in self._positions.items()}
        generating = self._generating
        divergences = [measure_divergence(task, *part, is_generated=task in generating) for task, part in parts.items()]
        if len(divergences) > 1:
            together = Positions.joined(part for part, _ in parts.values())
            divergences.append(measure_divergence(ALL, together, np.concatenate([own for _, own in parts.values()])))
        others = {*self._answering, ALL} if self._answering else set()
        return tuple(replace(item, is_text=item.task not in others) for item in divergences if item is not None)


def _by_row(rows: npt.NDArray[Any], task: str, weights: Weights | None) -> FloatArray:
    if weights is None:
        return np.ones(len(rows))
    numbers, indices = np.unique(rows["document"], return_inverse=True)
    weights_N: FloatArray = np.array([weights[task][int(number)] for number in numbers], np.float64)[indices]
    return weights_N


def score_generated(lm: Any, generated: Sequence[Generated], observer: Observer | None = None) -> None:
    """Lets the model score the reference's generations as targets; `observer` stores the comparisons."""
    from olive_ext.backends.lm_eval.instances import PendingRequest, run_requests

    if targets := [PendingRequest(item.target, {place: item}) for place, item in enumerate(generated)]:
        for pending, output in run_requests(lm.session, "loglikelihood", [targets], lm.lost):
            if observer is not None:
                observer.add_targets(pending.first, pending.first.target, output)
