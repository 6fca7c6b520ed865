"""How far apart two models' distributions are, in words: bands by what is published of real quantizations.

Source: llama.cpp, tools/perplexity/README.md, Llama 3 8B on WikiText-2 (tables "LLaMA 3 8b Scoreboard" and "LLaMA 2
vs. LLaMA 3", revision f364eb6f), each against FP16. Mean KL in nats: q8_0 0.0014, q6_K 0.0055; q5_K_M 0.011, q4_K_M
0.031, q4_0 0.072; q3_K_M 0.102, q3_K_S 0.228; iq2_M 0.326, q2_K 0.445, iq1_S 2.2. Same top token (Llama 3 8B and
Llama 2 7B): q8_0 97.7 and 98.8 %, q6_K 96.0 and 97.5 %, q4_K_M 91.9 and 94.7 %, q2_K 71.1 and 85.6 %. The limits lie
between those groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from olive_ext.report.comparison import Divergence

_Z95 = 1.959964


@dataclass(frozen=True)
class Band:
    """Distances up to `most_kl` nats and from `least_agreement` on, which is a share of positions."""

    words: str
    most_kl: float
    least_agreement: float
    weight: Literal["distant", "loss"] | None = None
    """What the distance alone says of the candidate: nothing, that it is in doubt, or that it has lost."""


BANDS = (
    Band("as with weights of 6 to 8 bits", 0.01, 0.96),
    Band("as with weights of 4 to 5 bits", 0.09, 0.88),
    Band("as with weights of 3 bits", 0.3, 0.7, "distant"),
    Band("as with weights of 2 bits or fewer", float("inf"), 0.0, "loss"),
)


def band_of(found: Divergence) -> Band:
    """The nearest band that holds both the mean KL and the share of equal top tokens, which must be finite."""
    return next(
        band for band in BANDS if found.kl.mean <= band.most_kl and found.top1_agreement >= band.least_agreement
    )


def certain_band(found: Divergence) -> Band:
    """The nearest band that is within 1.96 standard errors of mean KL and share, which must be finite."""
    return BANDS[0] if None in _errors(found) else band_of(_moved(found, -_Z95))


def possible_band(found: Divergence) -> Band:
    """The farthest band that is within 1.96 standard errors of mean KL and share, which must be finite."""
    return BANDS[-1] if None in _errors(found) else band_of(_moved(found, _Z95))


def _errors(found: Divergence) -> tuple[float | None, float | None]:
    return found.kl.stderr, found.top1_agreement_stderr


def _moved(found: Divergence, errors: float) -> Divergence:
    """`found`, farther from the reference by so many standard errors."""
    kl, agreement = (error or 0.0 for error in _errors(found))
    farther = replace(found.kl, mean=found.kl.mean + errors * kl)
    return replace(found, kl=farther, top1_agreement=found.top1_agreement - errors * agreement)
