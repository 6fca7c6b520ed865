"""Which stage is said to have lost, and which is called innocent: never one that would be noticed alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.plugins.diagnose.stages import stage_of
from olive_ext.report import numbers
from olive_ext.report.comparison import Certainty, Comparison, Spread
from olive_ext.report.stages import Stage, stage_sentences
from olive_ext.report.verdict import verdict
from tests.report.test_comparison import divergence, outcome
from tests.report.test_verdict import SAFE

NEAREST = 0.01
NAN = float("nan")


def sentences(*stages: Stage, most_kl: float = NEAREST) -> list[str]:
    return [text.replace(numbers.MINUS, "-") for text in stage_sentences(stages, most_kl)]


@pytest.mark.parametrize(
    ("conversion", "quantization", "text"),
    [
        (0.82, 0.0031, "the conversion lost it (KL 0.820 nats); quantization did not (KL 0.00310 nats)"),
        (1e-11, 0.02, "quantization lost it (KL 0.0200 nats); the conversion did not (KL 1.0e-11 nats)"),
        (0.1, 0.2, "both stages lost: quantization KL 0.200 nats, the conversion KL 0.100 nats"),
        (5.0, 0.5, "both stages lost: the conversion KL 5.00 nats, quantization KL 0.500 nats"),
        (0.82, 0.0095, "both stages lost: the conversion KL 0.820 nats, quantization KL 0.00950 nats"),
        (0.02, 0.002, "both stages lost: the conversion KL 0.0200 nats, quantization KL 0.00200 nats"),
        (1e-9, 1e-10, "neither the conversion nor quantization lost anything: at most KL 1.0e-09 nats"),
        (NAN, 0.2, "the stages cannot be separated: the conversion KL not a number nats, quantization KL 0.200 nats"),
    ],
)
def test_two_stages(conversion: float, quantization: float, text: str) -> None:
    stages = (
        Stage("conversion", conversion, None, 0.9, finding="equal up to 17 tokens"),
        Stage("quantization", quantization, 0.001, 0.97),
    )
    assert sentences(*stages) == [text, "the conversion: equal up to 17 tokens"]


@pytest.mark.parametrize(
    ("conversion", "quantization", "provider", "text"),
    [
        (1e-9, 0.02, 3e-7, "quantization lost it (KL 0.0200 nats); the conversion and the provider did not (KL"),
        (1e-9, 2e-3, 0.3, "the provider lost it (KL 0.300 nats); the conversion and quantization did not (KL"),
        (1e-9, 0.2, 0.3, "two stages lost: the provider KL 0.300 nats, quantization KL 0.200 nats; the conversion did"),
        (
            0.1,
            0.2,
            0.3,
            "all three stages lost: the provider KL 0.300 nats, quantization KL 0.200 nats, the conversion",
        ),
        (
            1e-9,
            1e-8,
            1e-7,
            "neither the conversion nor quantization nor the provider lost anything: at most KL 1.0e-07",
        ),
    ],
)
def test_three_stages(conversion: float, quantization: float, provider: float, text: str) -> None:
    (sentence,) = sentences(
        Stage("conversion", conversion, 0.1 * conversion, 1.0),
        Stage("quantization", quantization, 0.1 * quantization, 0.97),
        Stage("provider", provider, 0.1 * provider, 0.98),
    )
    assert sentence.startswith(text)


def test_single_document_makes_nobody_innocent() -> None:
    """It has no interval."""
    assert sentences(Stage("conversion", 0.8, None, 0.5), Stage("quantization", 0.001, None, 1.0)) == [
        "both stages lost: the conversion KL 0.800 nats, quantization KL 0.00100 nats"
    ]


def test_one_stage_is_not_told_apart_from_anything() -> None:
    assert sentences(Stage("quantization", 0.8, 0.1, 0.5)) == []


def test_claim_that_one_stage_breaks_alone_makes_it_no_innocent() -> None:
    stages = (Stage("conversion", 0.8, 0.1, 0.5), Stage("quantization", 0.004, 1e-5, 0.99))
    for bound, text in (0.1, "quantization did not"), (0.003, "both stages lost"):
        claim = Certainty("kl_mean", "below", bound, 0.95, "broken", 0.8, bound, 1.0, 40, 400, "")
        judged = verdict(Comparison({}, (divergence(),), (outcome(**SAFE),), certainty=claim, stages=stages))
        assert any(text in line for line in judged.evidence)


shares = st.floats(0.0, 1.0)
distances = st.floats(-9, 1).map(lambda power: 10.0**power)


@st.composite
def alone(draw: st.DrawFn) -> Comparison:
    """The comparison of a stage's model with the one before it."""
    kl, half = draw(distances), draw(st.floats(0, 0.05))
    spread = Spread(kl, draw(st.none() | st.floats(0, 1).map(lambda part: part * kl)), kl, kl, kl, kl, 3 * kl)
    difference = draw(st.floats(-0.2, 0.2))
    own = outcome(difference=difference, low=difference - half, high=difference + half, mcnemar_p=draw(shares))
    error = draw(st.none() | st.floats(0, 0.1))
    distance = divergence(
        "choice", kl=0, perplexity_ratio=1.0, perplexity_ratio_stderr=1e-6, top1_agreement=draw(shares) ** 0.1,
        top1_agreement_stderr=error,
    )  # fmt: skip
    return Comparison({}, (replace(distance, kl=spread),), (own,))


@given(conversion=alone(), quantization=alone(), provider=alone(), bound=st.none() | distances)
def test_innocent_stage_never_breaks_the_verdict_alone(
    conversion: Comparison, quantization: Comparison, provider: Comparison, bound: float | None
) -> None:
    parts = {"the conversion": conversion, "quantization": quantization, "the provider": provider}
    claim = None
    if bound is not None:
        claim = Certainty("kl_mean", "below", bound, 0.95, "broken", bound, bound, bound, 40, 400, "")
    stages = (
        stage_of("conversion", conversion, conversion),
        stage_of("quantization", quantization, quantization),
        stage_of("provider", provider, provider),
    )
    whole = Comparison({}, (divergence("choice", kl=1.0),), (outcome(),), certainty=claim, stages=stages)
    sentence = next(line for line in verdict(whole).lines if "lost" in line and "KL" in line)
    match = re.search(r"(?:^|; )((?:(?!; ).)*) did not", sentence)
    innocent = re.split(", | and ", match[1]) if match is not None else []
    if sentence.startswith("neither"):
        innocent = list(parts)
    largest = max(stage.kl_mean for stage in stages)
    for title in innocent:
        overall = parts[title].overall_divergence()
        assert overall is not None
        assert verdict(parts[title]).code not in ("loss", "small_loss", "distant", "claim_broken")
        assert overall.kl.mean < 1e-6 or overall.kl.mean <= 0.1 * largest
        assert bound is None or overall.kl.mean <= max(1e-6, bound)
