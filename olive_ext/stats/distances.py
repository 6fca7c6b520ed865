"""Distances between two models' next-token distributions: numbers over positions, error bars over documents.

Positions of one document are not independent, so standard errors cluster by document. With one position a document
they are those of llama.cpp's `perplexity --kl-divergence`, which takes all positions for independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import Divergence
from olive_ext.report.numbers import Bin, Spread
from olive_ext.stats.compared_fields import CLASSES, FloatArray, Positions

HISTOGRAM_EDGES: FloatArray = np.concatenate([[0.0], 10 ** (np.arange(-18, 4) / 3)])
"""Lower edges in nats: one bin below 1e-6 (float32's rounding), then three bins a decade up to 10 and more."""


def measure_divergence(
    task: str, positions: Positions, weights_N: FloatArray | None = None, *, is_generated: bool = False
) -> Divergence | None:
    """Everything `Divergence` holds; None without positions. `is_generated`: whether a request's targets are an answer.

    `weights_N` say how many documents each position's document stands for, where documents were drawn: means are then
    estimates for all documents; quantiles, bins and the largest value are of the drawn ones.

    Percentiles interpolate linearly between ordered values (Hyndman and Fan 1996, type 7; numpy's and llama.cpp's).
    The differences of probabilities are candidate's minus reference's: of the reference's most likely token, and of the
    target (llama.cpp's mean and RMS "delta p").
    """
    if not len(rows := positions.rows):
        return None
    documents: npt.NDArray[np.int64] = np.unique(rows["document"], return_inverse=True)[1]
    weights, mean = np.ones(len(rows)) if weights_N is None else weights_N, partial(np.average, weights=weights_N)
    kl, candidate, reference = (_float64(rows, name) for name in ("kl", "logprobs", "reference_logprobs"))
    agreement, agreement_stderr, _ = clustered_mean(_float64(rows, "same_top"), documents, weights)
    ratio, ratio_stderr, ratio_skewness = perplexity_ratio(reference, candidate, documents, weights)
    kl_mean, kl_stderr, kl_skewness = clustered_mean(kl, documents, weights)
    likeliest, reference_top = (np.exp(_float64(rows, name)) for name in ("top_logprobs", "reference_top_logprobs"))
    top, top_rms = _mean_and_rms(likeliest - reference_top, weights)
    target, target_rms = _mean_and_rms(np.exp(candidate) - np.exp(reference), weights)
    by_size = np.maximum(np.searchsorted(HISTOGRAM_EDGES, kl, side="right") - 1, 0)  # estimates may be below zero
    is_known = rows["token_class"] >= 0
    reverse_N = _float64(rows, "kl_reverse")
    is_exact = np.isfinite(reverse_N).all()
    reverse = clustered_mean(reverse_N, documents, weights) if is_exact else (None, None)
    median, p90, p99, p999 = np.quantile(kl, [0.5, 0.9, 0.99, 0.999]).tolist()
    return Divergence(
        task=task,
        num_documents=int(documents.max()) + 1,
        num_positions=len(rows),
        kl=Spread(kl_mean, kl_stderr, median, p90, p99, p999, float(kl.max())),
        kl_lower=float(mean(_float64(rows, "kl_lower"))),
        kl_sampling_error=math.sqrt(float(np.sum(weights**2 * _float64(rows, "kl_variance")))) / float(weights.sum()),
        top1_agreement=agreement,
        top1_agreement_stderr=agreement_stderr,
        top_probability_difference=top,
        top_probability_rms=top_rms,
        perplexity_reference=_exp(-float(mean(reference))),
        perplexity_candidate=_exp(-float(mean(candidate))),
        perplexity_ratio=ratio,
        perplexity_ratio_stderr=ratio_stderr,
        histogram=_bins([f"{edge:.2g}" for edge in HISTOGRAM_EDGES], by_size, kl),
        by_position=_by_position(rows["position"], kl),
        by_class=_bins(CLASSES, rows["token_class"][is_known].astype(np.int64), kl[is_known]) if is_known.any() else (),
        along_answer=_by_position(_steps(rows), kl) if is_generated else (),
        target_probability_difference=target,
        target_probability_rms=target_rms,
        degrees=degrees_of_freedom(np.bincount(documents, weights=weights)),
        kl_skewness=kl_skewness,
        perplexity_ratio_skewness=ratio_skewness,
        kl_reverse=reverse[0],
        kl_reverse_stderr=reverse[1],
    )


def clustered_mean(
    values: FloatArray, documents: npt.NDArray[np.int64], weights: FloatArray
) -> tuple[float, float | None, float | None]:
    """Mean of `values` [N], its standard error where values of one document depend on each other, and the skewness of
    the documents' deviations S_d - m n_d (Fisher's G1); None for a single document.

    `weights` [N]: how many positions each one stands for, where documents were drawn with unequal probabilities; n_d
    and S_d are then sums of weights and of weighted values, and N is the sum of all weights (Hajek's estimator).

    `documents` [N] are numbers from 0 without gaps. With D documents of n_d values and sums S_d the mean m = sum S_d /
    sum n_d is a ratio of two totals, and

        se = sqrt(D / (D - 1) * sum_d (S_d - m n_d)^2) / N

    (Cochran 1977, Sampling Techniques, eq. 6.13, for documents drawn from infinitely many; the cluster-robust error of
    Liang and Zeger 1986; Miller 2024, Adding Error Bars to Evals, eq. 4, has it without D / (D - 1)). With one value a
    document it is the ordinary standard error of a mean.
    """
    counts, total = np.bincount(documents, weights=weights), float(np.sum(weights))
    mean = float(np.sum(weights * values) / total)
    if len(counts) < 2:
        return mean, None, None
    residuals = np.bincount(documents, weights=weights * values) - mean * counts
    variance = float(np.sum(residuals**2)) * len(counts) / (len(counts) - 1)
    return mean, math.sqrt(variance) / total, _skewness(residuals)


def _skewness(values: npt.NDArray[Any]) -> float:
    """As `scipy.stats.skew` without bias, whose import takes half a second; 0 of equal values."""
    count, centred = len(values), values - values.mean()
    spread = float(np.mean(centred**2))
    factor = math.sqrt(count * (count - 1)) / (count - 2) if count > 2 else 1.0
    return factor * float(np.mean(centred**3)) / spread**1.5 if spread > 0 else 0.0


def degrees_of_freedom(sizes: npt.NDArray[Any]) -> float:
    """The degrees of freedom of a mean over positions, `sizes` [D] for each document: Satterthwaite's (1946) for
    sums whose variance grows with the document's size squared, (sum n^2)^2 / sum n^4 - 1. Documents of one size have
    D - 1; one that has most positions leaves next to none."""
    squares = (sizes / sizes.max()) ** 2
    return float(np.sum(squares) ** 2 / np.sum(squares**2)) - 1


def perplexity_ratio(
    reference: FloatArray, candidate: FloatArray, documents: npt.NDArray[np.int64], weights: FloatArray
) -> tuple[float, float | None, float | None]:
    """PPL(candidate) / PPL(reference) from log-probabilities [N] of the same targets, its standard error and skewness.

    ln of the ratio is the mean m of d = ln p_reference - ln p_candidate, so by the delta method se(ratio) = ratio *
    se(m), with se(m) by `clustered_mean`. llama.cpp writes the same as sqrt(var ln PPL_c + var ln PPL_r - 2 cov).
    """
    mean, stderr, skewness = clustered_mean(reference - candidate, documents, weights)
    ratio = _exp(mean)
    return ratio, None if stderr is None else ratio * stderr, skewness


def _float64(rows: npt.NDArray[Any], name: str) -> FloatArray:
    return rows[name].astype(np.float64)


def _mean_and_rms(values: FloatArray, weights: FloatArray) -> tuple[float, float]:
    return float(np.average(values, weights=weights)), math.sqrt(float(np.average(values**2, weights=weights)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _bins(labels: Sequence[str], groups: npt.NDArray[np.int64], values: FloatArray) -> tuple[Bin, ...]:
    counts = np.bincount(groups, minlength=len(labels)).tolist()
    sums = np.bincount(groups, weights=values, minlength=len(labels)).tolist()
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return tuple(map(Bin, labels, counts, means))


def _by_position(positions: npt.NDArray[np.int32], kl: FloatArray) -> tuple[Bin, ...]:
    edges = [0, 16]
    while edges[-1] <= int(positions.max()):
        edges.append(2 * edges[-1])
    groups = np.searchsorted(edges, positions, side="right") - 1
    return _bins([f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)], groups, kl)


def _steps(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The number of targets of the same request in front of each target [N]. A request's targets stand in order."""
    positions = rows["position"]
    goes_on = (np.diff(positions) == 1) & (np.diff(rows["document"]) == 0)
    begins = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    lengths = np.diff(begins, append=len(rows))
    steps: npt.NDArray[np.int32] = positions - np.repeat(positions[begins], lengths)
    return steps
