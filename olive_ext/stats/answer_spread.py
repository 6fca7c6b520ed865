"""How far the mean of drawn answers may be from what it tends to, the documents being given: not a sample of others.

Answers to a document are independent draws, so that the variance of the mean over D documents of n answers each is the
sum of the variances within the documents over n D^2. Where few answers differ, the variance that was seen is itself a
count of rare events: of values from 0 to 1 it is at most their mean. As in Wilson's interval of such a count (1927,
JASA 22) the variance is therefore the greatest that what was seen does not contradict, and answers that are all alike
leave an interval of z^2 answers to each side, z the normal quantile. Error is divided among the looks (Bonferroni), so
that the interval holds at whichever of them the drawing stops. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt


def drawn_interval(answers: Sequence[npt.ArrayLike], confidence: float, num_looks: int) -> tuple[float, float]:
    """The mean over documents of their answers' values, and how far to each side its interval goes, in the values'
    unit. `answers` has each document's, NaN for one without a value; a document without any counts in neither, and one
    with a single value as the widest spread there is. NaN and infinity without any value."""
    known = [each[~np.isnan(each)] for each in (np.asarray(one, np.float64) for one in answers)]
    known = [each for each in known if len(each)]
    if not known:
        return math.nan, math.inf
    z = NormalDist().inv_cdf(1 - (1 - confidence) / (2 * num_looks))
    together = np.concatenate(known)
    one = max(1.0, float(np.abs(together).max()))  # what a single answer can move
    variances = [each.var(ddof=1) if len(each) > 1 else one**2 / 4 for each in known]
    variance = math.fsum(v / len(each) for v, each in zip(variances, known, strict=True)) / len(known) ** 2
    least = one / (min(map(len, known)) * len(known))
    width = z * math.sqrt(variance + (z * least / 2) ** 2) + z * z * least / 2
    return math.fsum(each.mean() for each in known) / len(known), width
