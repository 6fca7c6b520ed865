"""Limits that hold at every stopping time, from the bets of one run.

Knows neither documents nor strata: the bets' values and stakes are all it needs.
"""

from __future__ import annotations

import math

import numpy as np

from olive_ext.stats.betting import ABOVE, BELOW, SIGNS_S, Bet, mixed

_PRECISION = 1e-6
"""Of limits, in units of the population mean."""


def limits(bets: Bet, bound: float, logical: tuple[float, float], confidence: float) -> tuple[float, float]:
    """Interval that contains the population mean at every stopping time with probability `confidence`.

    Values up to the bound are tested by the bets ABOVE only, values over it by the bets BELOW only, each at full level:
    the population mean is one of them, so no level is divided between the two ends. The price is that an interval on
    one side of the bound ends at the bound. `logical` are the limits that hold without bets.
    """
    needed = -math.log1p(-confidence)
    low = _last_rejected(bets, ABOVE, (logical[0], min(bound, logical[1])), needed)
    return low, _last_rejected(bets, BELOW, (logical[1], max(bound, logical[0])), needed)


def _last_rejected(bets: Bet, side: int, ends: tuple[float, float], needed: float) -> float:
    """Of the values from one end, which cannot be, to the other the last that is rejected: wealth falls on the way."""
    rejected, kept = ends
    if (kept - rejected) * SIGNS_S[side] <= 0:
        return rejected
    if _peak(bets, side, kept) >= needed:
        return kept
    while abs(rejected - kept) > _PRECISION:
        middle = (rejected + kept) / 2
        rejected, kept = (middle, kept) if _peak(bets, side, middle) >= needed else (rejected, middle)
    return rejected


def _peak(bets: Bet, side: int, null: float) -> float:
    """Logarithm of the greatest wealth against `null`, from the bound on to where the side's evidence points away from:
    no bet can lose more there than against the bound itself, for which the stakes were made."""
    gains_KT = SIGNS_S[side] * bets.stakes_SKR[side] * (bets.values_R - null)
    return float(mixed(np.cumsum(np.log1p(gains_KT), axis=1)).max(initial=0))
