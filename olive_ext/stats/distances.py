"""How far two models' next-token distributions are apart: numbers over positions, error bars over documents.

Positions of one document are not independent, so standard errors cluster by document. With one position a document
they are those of llama.cpp's `perplexity --kl-divergence`, which takes all positions for independent.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.report.comparison import Bin, Divergence, Spread
from olive_ext.stats.positions import Positions
from olive_ext.stats.token_classes import CLASSES

FloatArray = npt.NDArray[np.float64]

HISTOGRAM_EDGES: FloatArray = np.concatenate([[0.0], 10 ** (np.arange(-18, 4) / 3)])
"""Lower edges in nats: what is below 1e-6 (float32's rounding), then three bins a decade up to 10 and more."""

_FIRST_POSITIONS = 16


def measure_divergence(task: str, positions: Positions) -> Divergence | None:
    """Everything `Divergence` holds; None where there are no positions.

    Percentiles interpolate linearly between ordered values (Hyndman and Fan 1996, type 7; numpy's and llama.cpp's).
    The differences of probabilities are candidate's minus reference's: of the reference's most likely token, and of the
    target (llama.cpp's mean and RMS "delta p").
    """
    rows = positions.rows
    if not len(rows):
        return None
    documents: npt.NDArray[np.int64] = np.unique(rows["document"], return_inverse=True)[1]
    agreement, agreement_stderr = clustered_mean(rows["same_top"], documents)
    top = np.exp(_float64(rows, "top_logprobs")) - np.exp(_float64(rows, "reference_top_logprobs"))
    target = np.exp(_float64(rows, "logprobs")) - np.exp(_float64(rows, "reference_logprobs"))
    ratio, ratio_stderr = perplexity_ratio(rows["reference_logprobs"], rows["logprobs"], documents)
    return Divergence(
        task=task,
        num_documents=int(documents.max()) + 1,
        num_positions=len(rows),
        kl=spread(rows["kl"], documents),
        kl_lower=float(np.mean(_float64(rows, "kl_lower"))),
        kl_sampling_error=math.sqrt(float(np.sum(_float64(rows, "kl_variance")))) / len(rows),
        top1_agreement=agreement,
        top1_agreement_stderr=agreement_stderr,
        top_probability_difference=float(np.mean(top)),
        top_probability_rms=_rms(top),
        perplexity_reference=perplexity(rows["reference_logprobs"]),
        perplexity_candidate=perplexity(rows["logprobs"]),
        perplexity_ratio=ratio,
        perplexity_ratio_stderr=ratio_stderr,
        histogram=_histogram(rows["kl"]),
        by_position=_by_position(rows["position"], rows["kl"]),
        by_class=_by_class(rows["token_class"], rows["kl"]),
        target_probability_difference=float(np.mean(target)),
        target_probability_rms=_rms(target),
    )


def clustered_mean(values: npt.ArrayLike, documents: npt.NDArray[np.int64]) -> tuple[float, float | None]:
    """Mean of `values` [N] and its standard error where values of one document hang together; None for one document.

    `documents` [N] are numbers from 0 without gaps. With D documents of n_d values and sums S_d the mean m = sum S_d /
    sum n_d is a ratio of two totals, and

        se = sqrt(D / (D - 1) * sum_d (S_d - m n_d)^2) / N

    (Cochran 1977, Sampling Techniques, eq. 6.13, for documents drawn from infinitely many; the cluster-robust error of
    Liang and Zeger 1986; Miller 2024, Adding Error Bars to Evals, eq. 4, has it without D / (D - 1)). With one value a
    document it is the ordinary standard error of a mean.
    """
    numbers: FloatArray = np.asarray(values, np.float64)
    counts = np.bincount(documents)
    sums = np.bincount(documents, weights=numbers)
    mean = float(np.sum(numbers) / len(numbers))
    if len(counts) < 2:
        return mean, None
    residuals = sums - mean * counts
    variance = float(np.sum(residuals**2)) * len(counts) / (len(counts) - 1)
    return mean, math.sqrt(variance) / len(numbers)


def perplexity(logprobs: npt.ArrayLike) -> float:
    """exp of minus the mean log-probability of the targets: per token."""
    return _exp(-float(np.mean(np.asarray(logprobs, np.float64))))


def perplexity_ratio(
    reference: npt.ArrayLike, candidate: npt.ArrayLike, documents: npt.NDArray[np.int64]
) -> tuple[float, float | None]:
    """PPL(candidate) / PPL(reference) from log-probabilities [N] of the same targets, and its standard error.

    ln of the ratio is the mean m of d = ln p_reference - ln p_candidate, so by the delta method se(ratio) = ratio *
    se(m), with se(m) by `clustered_mean`. llama.cpp writes the same as sqrt(var ln PPL_c + var ln PPL_r - 2 cov).
    """
    difference = np.asarray(reference, np.float64) - np.asarray(candidate, np.float64)
    mean, stderr = clustered_mean(difference, documents)
    ratio = _exp(mean)
    return ratio, None if stderr is None else ratio * stderr


def spread(values: npt.ArrayLike, documents: npt.NDArray[np.int64]) -> Spread:
    """Mean with its clustered error, percentiles and maximum of `values` [N]."""
    numbers: FloatArray = np.asarray(values, np.float64)
    mean, stderr = clustered_mean(numbers, documents)
    median, p90, p99, p999 = np.quantile(numbers, [0.5, 0.9, 0.99, 0.999]).tolist()
    return Spread(mean, stderr, median, p90, p99, p999, float(numbers.max()))


def _float64(rows: npt.NDArray[Any], field: str) -> FloatArray:
    return rows[field].astype(np.float64)


def _rms(values: FloatArray) -> float:
    return math.sqrt(float(np.mean(values**2)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _bins(labels: list[str], groups: npt.NDArray[np.int64], values: npt.ArrayLike) -> tuple[Bin, ...]:
    """A bin for each label; `groups` [N] are indices into `labels`."""
    counts = np.bincount(groups, minlength=len(labels)).tolist()
    sums = np.bincount(groups, weights=np.asarray(values, np.float64), minlength=len(labels)).tolist()
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return tuple(map(Bin, labels, counts, means))


def _histogram(kl: npt.NDArray[np.float32]) -> tuple[Bin, ...]:
    """Estimates below zero, which sampling can give, count in the lowest bin."""
    groups = np.maximum(np.searchsorted(HISTOGRAM_EDGES, kl.astype(np.float64), side="right") - 1, 0)
    return _bins([f"{edge:.2g}" for edge in HISTOGRAM_EDGES], groups, kl)


def _by_position(positions: npt.NDArray[np.int32], kl: npt.NDArray[np.float32]) -> tuple[Bin, ...]:
    """0-15, 16-31, 32-63, ... tokens before the target."""
    edges = [0, _FIRST_POSITIONS]
    while edges[-1] <= int(positions.max()):
        edges.append(2 * edges[-1])
    groups = np.searchsorted(edges, positions, side="right") - 1
    return _bins([f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)], groups, kl)


def _by_class(classes: npt.NDArray[np.int8], kl: npt.NDArray[np.float32]) -> tuple[Bin, ...]:
    known = classes >= 0
    return _bins(list(CLASSES), classes[known].astype(np.int64), kl[known]) if known.any() else ()
