"""Runs a model to see what cannot be read from its files: whether both forms of its graph agree, and whether a text's
numbers depend on its steps. Knows no recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from olive_ext.errors import ModelError, NonFiniteError, OliveExtError
from olive_ext.model import ResolvedModel

if TYPE_CHECKING:
    from olive_ext.session import Session

Add = Callable[[str, object, str], None]
"""Takes a fact: its name, its value and the reason."""

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


def verify_graphs(model: ResolvedModel, add: Add, open_session: Callable[..., Session] | None = None) -> None:
    """Scores `PAIRS` on both forms of the graph and adds the largest difference of a token's log-probability.

    `open_session` stands in for `session.opening.open_model`. Raises `ModelError` when the difference is above
    `LARGEST_DIFFERENCE`, and for outputs that are not finite, with the layer where they begin.
    """
    from olive_ext.session.opening import open_model

    opener = open_session or open_model
    try:
        edited, untouched = (_token_logprobs(model, graph, opener) for graph in ("scoring_head", "untouched"))
    except NonFiniteError as error:
        raise ModelError(f"{error.finding}; {_first_layer(model)}") from error
    pairs = zip(edited, untouched, strict=True)
    largest = max((_difference(one, other) for one, other in pairs), default=0.0)
    add("tokens compared", len(edited), "scoring head against the untouched graph")
    add("largest difference", f"{largest:.3g} nats", f"at most {LARGEST_DIFFERENCE:g} is rounding")
    if largest > LARGEST_DIFFERENCE:
        raise ModelError(
            f"the scoring head's log-probabilities differ from the untouched graph's by up to {largest:.3g} nats; "
            "set engine.graph to 'untouched' and report this model"
        )


def verify_steps(model: ResolvedModel, add: Add) -> None:
    """Compares texts beyond every number of positions in the graph, fed in parts and in company, with texts fed whole.

    Raises `ModelError` where that changes a text's numbers, and opening the model did not see it.
    """
    from olive_ext.engine.opening import open_runner
    from olive_ext.engine.runners.trials import check_steps

    engine = model.settings.engine.model_copy(update={"num_slots": 2})
    opened = open_runner(model.patched({"engine": engine}))
    numbers = model.spec.choices.numbers if model.spec.choices is not None else ()
    longest = model.spec.context_length if model.buckets.steps == "none" else opened.chunk_size
    try:
        problem = check_steps(opened.runner, model.spec.vocab_size, longest, numbers, longest)
    finally:
        opened.runner.close()
    if problem is not None:
        raise ModelError(
            f"{problem}: scores depend on the steps of this graph, which opening it does not see; report it"
        )
    is_whole = not opened.runner.traits.chunked_prefill
    beyond = f"beyond {max(numbers)} positions" if numbers else "the graph compares positions with no number"
    add("texts in parts and in company", "each is fed whole and alone" if is_whole else "as whole and alone", beyond)


def _first_layer(model: ResolvedModel) -> str:
    """Where the model's output stops to be finite, or why that cannot be told."""
    from olive_ext.engine.runners.ort.plain_graph import first_non_finite
    from olive_ext.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model.files.tokenizer, trust_remote_code=model.settings.trust_remote_code)
    try:
        layer = first_non_finite(model, tokenizer.encode("".join(PAIRS[0])))
        return layer or "no node's output shows it"
    except OliveExtError as error:
        return str(error)


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
