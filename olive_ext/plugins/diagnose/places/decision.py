"""Whether two places are farther apart than noise: two tests at half the level each, one of single positions and one of
all together. Knows no model. Axes: N positions, D documents.

**Single positions.** The distances of a noise run are a sample of what rounding does at a position. Their tail is taken
for a Pareto's from the 95 % quantile on (Hill 1975), which gives the distance that is passed at one of N positions with
a probability of at most alpha (Weissman 1978): x_k (k N / (alpha J))^xi with the k-th largest x_k of J noise distances
and the mean xi of ln x_j / x_k over the k largest. A Pareto's tail is heavier than a normal's: the limit errs upwards,
which is what a sample of few positions needs (with the moment estimator of Dekkers, Einmahl and de Haan 1989, which
fits lighter tails, 5 to 10 % of equal pairs were beyond the limit: `python -m docs.benchmarks places rates`).

**All together.** For each of D documents the logarithm of the pair's root mean square over the noise's, on the same
positions: one-sided t-test that its mean is at most 0. A document's own scale cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]

ALPHA = 0.01
"""Probability that noise is taken for more than noise, at most."""

RESOLUTION = 4e-6
"""Nats below which no distance counts: twice the spacing of float32 at logits of 16 to 32."""

LEAST_DOCUMENTS = 4
_TAIL = 0.05
_LEAST_TAIL = 10
_NOTHING = RESOLUTION / 10


@dataclass(frozen=True)
class Held:
    """A pair held against noise."""

    limit: float
    """Distance in nats that noise passes at none of the pair's positions."""

    ratio: float
    """The pair's distances over the noise's: the geometric mean over documents. 1 where it is not known."""

    is_farther_somewhere: bool
    is_farther_overall: bool

    @property
    def is_farther(self) -> bool:
        """Whether the pair is farther apart than the noise is."""
        return self.is_farther_somewhere or self.is_farther_overall


def held(pair: Sequence[FloatArray], noise: Sequence[Sequence[FloatArray]], everywhere: FloatArray) -> Held:
    """`pair`: distances in nats at the positions of each of D documents; `noise`: the same of each noise run;
    `everywhere` [N]: the pair's distances at all positions that were compared."""
    runs = [[np.maximum(values, RESOLUTION) for values in run] for run in noise]
    limits = [tail_limit(np.concatenate(run), len(everywhere), ALPHA / 2) for run in noise]
    limit = max(RESOLUTION, *limits)  # runs in two places may differ in scale, and would be no tail together
    logs = np.array([
        math.log(_rms([np.maximum(values, RESOLUTION)]) / _rms([run[number] for run in runs]))
        for number, values in enumerate(pair)
    ])  # fmt: skip
    overall = len(logs) >= LEAST_DOCUMENTS and _least_mean(logs, ALPHA / 2) > 0
    ratio = math.exp(float(logs.mean())) if len(logs) else 1.0
    return Held(limit, ratio, bool(everywhere.max(initial=0.0) > limit), bool(overall))


def tail_limit(noise: FloatArray, num_positions: int, alpha: float) -> float:
    """The distance that noise passes at one of so many positions with a probability of at most `alpha`."""
    ordered = np.sort(noise)[::-1]
    count = min(len(ordered) - 1, max(_LEAST_TAIL, round(_TAIL * len(ordered))))
    if count < 1:
        return float(ordered[0])
    start = max(float(ordered[count]), _NOTHING)
    ordered = np.maximum(ordered, start)
    index = float(np.mean(np.log(ordered[:count] / start)))
    beyond = count * max(num_positions, 1) / (alpha * len(ordered))
    return float(max(ordered[0], start * max(beyond, 1.0) ** index))


def _rms(parts: Sequence[FloatArray]) -> float:
    values = np.concatenate(list(parts))
    return math.sqrt(float(np.mean(values**2)))


def _least_mean(values: FloatArray, alpha: float) -> float:
    """The lower end of the one-sided interval of the mean; values that are all equal have no error."""
    from scipy import stats

    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - float(stats.t.ppf(1 - alpha, len(values) - 1)) * error
