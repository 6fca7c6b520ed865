"""How far answers are from being others, as data: margins of both models, predicted changes, fragile documents.

A margin is the log-probability of the reference's best answer (of its most probable token) less that of the best other
one. The candidate's is of the same answer, and below 0 where it prefers another: the answer has changed. Knows no model
and no statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from olive_ext.report.numbers import Number


@dataclass(frozen=True)
class PredictedChanges:
    """How many answers change among documents that were not compared, by their margins."""

    documents: Literal["not run", "left out by the limit", "more"]
    """Not run: the reference has answered them and their margins are known. Others are taken to be like those compared:
    the ones that the limit left out, or so many more where the task has no others."""

    num_documents: int
    changed: Number
    low: Number
    high: Number
    """90 % interval of the number."""


@dataclass(frozen=True)
class TaskMargins:
    """The margins of one task: of its answers where it has choices, else of the tokens that were scored."""

    task: str
    item: Literal["answer", "token"]
    unit: str
    """"nats", or "nats a character" where the task's first metric is normalised by length."""

    num_documents: int
    num_items: int
    reference: Number
    """The reference's median margin."""

    candidate: Number
    shrink: Number
    """The sum of the candidate's margins over that of the reference's."""

    shrink_low: Number
    shrink_high: Number
    """95 % interval, by documents; infinite for a single one."""

    noise: Number
    """95 % of the margins lie at most so far from `shrink` times the reference's."""

    within_noise: Number
    """Share of items whose margin, once shrunk, is smaller than `noise`."""

    changed: int
    predicted: PredictedChanges | None = None
    """None of whole texts, of few documents, and where no margin has moved."""

    num_differing: int | None = None
    """Documents whose greedily generated answers differ in a token; None where none were generated."""


@dataclass(frozen=True)
class FragileDocument:
    """A document whose answer has not changed, but nearly."""

    task: str
    doc_id: int
    question: str
    answer: str
    other: str
    """What the candidate would answer next; empty of generated answers."""

    reference_margin: Number
    candidate_margin: Number
    """Of a generated answer both are its least token's."""

    noise_share: Number
    """The candidate's margin over the task's noise: below 1 another such quantization may change it."""


@dataclass(frozen=True)
class FirstDifference:
    """The first token in which two greedily generated answers differ."""

    task: str
    doc_id: int
    index: int
    """Number of tokens before it that are the same."""

    before: str
    """The end of what both models wrote."""

    reference: str
    candidate: str
    """How each goes on; empty where it ended."""

    reference_margin: float | None = None
    candidate_margin: float | None = None
    """At that token, in nats; None where the reference ended, or no distributions were compared."""


@dataclass(frozen=True)
class Margins:
    """Of all tasks; first the documents that are nearest to a change, and the differences of which the reference was
    surest."""

    tasks: tuple[TaskMargins, ...]
    fragile: tuple[FragileDocument, ...] = ()
    differences: tuple[FirstDifference, ...] = ()
