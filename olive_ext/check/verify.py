"""Compares the edited graph with the untouched one on real tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from olive_ext.check.findings import Section
from olive_ext.errors import ModelError

if TYPE_CHECKING:
    from olive_ext.model import ResolvedModel
    from olive_ext.session import Session

PAIRS = (
    ("The capital of France is", " Paris, and the capital of Italy is Rome."),
    ("The capital of France is", " a word that this sentence does not give away."),
    ("Water boils at a temperature of", " one hundred degrees at sea level."),
    ("def add(a, b):\n    return", " a + b\n"),
    ("1, 2, 3, 4,", " 5, 6, 7, 8, 9, 10"),
    ("In the beginning there was nothing, and then", " there was a long list of numbers: 3.14159, 2.71828."),
)
"""Contexts and targets; two share a context."""

LARGEST_DIFFERENCE = 1e-2
"""Nats per token. Half-precision graphs may differ by rounding, as rows are multiplied in other groups; a wrong head
differs by far more."""


def verify_graphs(model: ResolvedModel, section: Section, open_session: Callable[..., Session] | None = None) -> None:
    """Scores `PAIRS` on both forms of the graph and notes the largest difference of a token's log-probability.

    `open_session` stands in for `session.opening.open_model`. Raises `ModelError` when the difference is above
    `LARGEST_DIFFERENCE`.
    """
    from olive_ext.session.opening import open_model

    opener = open_session or open_model
    edited, untouched = (_token_logprobs(model, graph, opener) for graph in ("scoring_head", "untouched"))
    pairs = zip(edited, untouched, strict=True)
    largest = max((_difference(one, other) for one, other in pairs), default=0.0)
    section.add("tokens compared", len(edited), "scoring head against the untouched graph")
    section.add("largest difference", f"{largest:.3g} nats", f"at most {LARGEST_DIFFERENCE:g} is rounding")
    if largest > LARGEST_DIFFERENCE:
        raise ModelError(
            f"the scoring head's log-probabilities differ from the untouched graph's by up to {largest:.3g} nats; "
            "set engine.graph to 'untouched' and report this model"
        )


def _difference(one: float, other: float) -> float:
    """NaN is no agreement, and two infinities of one sign are."""
    difference = abs(one - other) if one != other else 0.0
    return math.inf if math.isnan(difference) else difference


def _token_logprobs(model: ResolvedModel, graph: str, open_session: Callable[..., Session]) -> list[float]:
    """Log-probabilities of all target tokens of `PAIRS` in order, in nats."""
    from olive_ext.text.requests import ScoringRequest

    engine = model.settings.engine.model_copy(update={"graph": graph})
    with open_session(model.patched({"engine": engine})) as session:
        encoding = session.encoding
        if encoding is not None and encoding.takes_features:
            raise ModelError(
                "the model's encoder takes features of sound, of which there are none here to compare with"
            )
        outputs = session.loglikelihood(
            PAIRS if encoding is None else [ScoringRequest("", target, context) for context, target in PAIRS]
        )
    return [logprob for output in outputs for logprob in output.token_logprobs]
