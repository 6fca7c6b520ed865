"""Whether two backends answered alike. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Answers = Mapping[str, Sequence[Any]]
"""By kind of request, in its order: [log-likelihood, is greedy], log-likelihood, or text."""

ABSOLUTE, RELATIVE = 0.02, 1e-4
"""Nats that a log-likelihood may differ, and the part of it: what kernels that add in another order come to."""


def compare(groups: Sequence[tuple[str, int]], answers: Answers, reference: Answers) -> dict[str, Any]:
    """How far `answers` are from `reference`. `groups` are task and document of each loglikelihood request.

    `max_difference` and `mean_difference` of log-likelihoods in nats; `choices`, `greedy`, `texts`: equal ones and how
    many there are, of the best choice of each document, of the greedy flags, of the generated texts; `differs`: a
    difference beyond the tolerance, another choice or another text.
    """
    pairs = list(_likelihoods(answers, reference))
    gaps = [abs(ours - theirs) for ours, theirs in pairs]
    found: dict[str, Any] = {}
    if pairs:
        found["max_difference"], found["mean_difference"] = max(gaps), sum(gaps) / len(gaps)
    chosen = answers.get("loglikelihood", ())
    expected = reference.get("loglikelihood", ())
    if chosen:
        found["greedy"] = _equal([one[1] for one in chosen], [one[1] for one in expected])
        members: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, (task, document) in enumerate(groups):
            members[task, document].append(index)
        several = [indices for indices in members.values() if len(indices) > 1]
        if several:
            found["choices"] = _equal(
                [_best(chosen, own) for own in several], [_best(expected, own) for own in several]
            )
    texts = answers.get("generate_until", ())
    if texts:
        found["texts"] = _equal(texts, reference["generate_until"])
    too_far = any(gap > ABSOLUTE + RELATIVE * abs(theirs) for gap, (_, theirs) in zip(gaps, pairs, strict=True))
    unequal = any(found[key][0] < found[key][1] for key in ("choices", "texts") if key in found)
    return {**found, "differs": too_far or unequal}


def _likelihoods(answers: Answers, reference: Answers) -> Iterator[tuple[float, float]]:
    for ours, theirs in zip(answers.get("loglikelihood", ()), reference.get("loglikelihood", ()), strict=True):
        yield ours[0], theirs[0]
    yield from zip(answers.get("loglikelihood_rolling", ()), reference.get("loglikelihood_rolling", ()), strict=True)


def _best(answers: Sequence[Any], indices: Sequence[int]) -> int:
    return max(range(len(indices)), key=lambda at: answers[indices[at]][0])


def _equal(ours: Sequence[Any], theirs: Sequence[Any]) -> list[int]:
    return [sum(one == other for one, other in zip(ours, theirs, strict=True)), len(ours)]
