"""Listens to a model that is compared with a reference: keeps what both said of every target, by task and document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from olive_ext.errors import RunError
from olive_ext.report.comparison import ALL, Divergence
from olive_ext.stats.compared_fields import Compared
from olive_ext.stats.distances import measure_divergence
from olive_ext.stats.positions import Positions, joined
from olive_ext.stats.token_classes import TokenClasses
from olive_ext.text.requests import Text


class Scored(Protocol):
    """What a session says of targets where there is a reference."""

    @property
    def token_logprobs(self) -> Sequence[float]: ...

    @property
    def compared(self) -> Compared | None: ...


class Asked(Protocol):
    """A request of lm-eval."""

    @property
    def task_name(self) -> Any: ...

    @property
    def doc_id(self) -> Any: ...


@dataclass
class Observed:
    """Positions of each task; `classes`, where they are known, tell what kind of token a target is."""

    classes: TokenClasses | None = None
    positions: dict[str, Positions] = field(default_factory=dict)

    def take(self, asked: Asked, context: Text, target: Text, scored: Scored) -> Compared:
        """Keeps the targets of a request, which stand behind `context`; gives back what the reference said. Of texts
        that are no token ids nothing is said about where and what the tokens are.

        Raises `RunError` where it said nothing.
        """
        compared = scored.compared
        if compared is None:
            raise RunError(f"task '{asked.task_name}': the model answered without its reference")
        before = () if isinstance(context, str) else context
        classes = None
        if self.classes is not None and not isinstance(target, str):
            classes = self.classes.of(target, before[-1] if before else None)
        self.positions.setdefault(str(asked.task_name), Positions()).add(
            int(asked.doc_id), scored.token_logprobs, compared, first_position=len(before), token_classes=classes
        )
        return compared

    def by_document(self, task: str) -> dict[int, tuple[float, int]]:
        """Mean KL in nats and number of positions of each document of a task."""
        rows = self.positions[task].rows if task in self.positions else Positions().rows
        documents, places, counts = np.unique(rows["document"], return_inverse=True, return_counts=True)
        means = np.bincount(places, weights=rows["kl"], minlength=len(documents)) / np.maximum(counts, 1)
        return dict(zip(documents.tolist(), zip(means.tolist(), counts.tolist(), strict=True), strict=True))

    def divergences(self) -> tuple[Divergence, ...]:
        """Of each task that was scored, in the order of the first requests, and over all where there are several."""
        found = [measure_divergence(task, positions) for task, positions in self.positions.items()]
        if len(found) > 1:
            found.append(measure_divergence(ALL, joined(self.positions.values())))
        return tuple(item for item in found if item is not None)


def score_under_reference(compared: Compared) -> tuple[float, bool]:
    """The reference's own answer to the request: log-probability in nats, and whether it is its greedy one."""
    logprobs = np.asarray(compared.reference_logprobs).tolist()
    return math.fsum(logprobs), bool(np.all(compared.reference_is_greedy))
