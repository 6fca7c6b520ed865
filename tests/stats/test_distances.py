"""Divergences against a direct computation from full logits, and against llama.cpp's definitions written out anew."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.report.comparison import TextChange
from olive_ext.stats.compared_fields import CLASSES, POSITION, Positions
from olive_ext.stats.distances import clustered_mean, measure_divergence

VOCABULARY = 50


@dataclass(frozen=True)
class Logits:
    """Both models' logits [T, V] and the targets [T] of one document."""

    reference: np.ndarray
    candidate: np.ndarray
    targets: np.ndarray

    def compared(self) -> tuple[np.ndarray, Any]:
        p, q = log_softmax(self.reference), log_softmax(self.candidate)
        rows = np.arange(len(p))
        top = p.argmax(axis=1)
        kl = np.sum(np.exp(p) * (p - q), axis=1)
        found = SimpleNamespace(
            kl=kl,
            kl_variance=np.zeros(len(p)),
            kl_lower=kl,
            kl_reverse=np.sum(np.exp(q) * (q - p), axis=1),
            reference_logprobs=p[rows, self.targets],
            same_top=top == q.argmax(axis=1),
            reference_top_logprobs=p[rows, top],
            top_logprobs=q[rows, top],
        )
        return q[rows, self.targets], found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def made(lengths: list[int], noise: float = 0.5, seed: int = 0) -> list[Logits]:
    random = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        reference = random.normal(size=(length, VOCABULARY)) * 3
        candidate = reference + noise * random.normal(size=reference.shape)
        documents.append(Logits(reference, candidate, random.integers(0, VOCABULARY, length)))
    return documents


def taken(documents: list[Logits]) -> Positions:
    positions = Positions()
    for number, document in enumerate(documents):
        positions.add(number, *document.compared(), first_position=3)
    return positions


def test_numbers_are_those_of_the_full_logits() -> None:
    documents = made([5, 40, 1, 17, 300])
    found = measure_divergence("t", taken(documents))
    p = np.concatenate([log_softmax(item.reference) for item in documents])
    q = np.concatenate([log_softmax(item.candidate) for item in documents])
    targets = np.concatenate([item.targets for item in documents])
    rows, top = np.arange(len(p)), p.argmax(axis=1)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert (found.num_documents, found.num_positions) == (5, 363)
    assert found.kl.mean == pytest.approx(kl.mean(), rel=1e-6)
    assert found.kl.maximum == pytest.approx(kl.max(), rel=1e-6)
    assert found.kl_reverse == pytest.approx((np.exp(q) * (q - p)).sum(axis=1).mean(), rel=1e-6)
    assert (found.kl.median, found.kl.p90, found.kl.p99, found.kl.p999) == pytest.approx(
        tuple(np.percentile(kl, [50, 90, 99, 99.9])), rel=1e-6
    )
    assert found.top1_agreement == pytest.approx((top == q.argmax(axis=1)).mean())
    change = np.exp(q[rows, top]) - np.exp(p[rows, top])
    assert found.top_probability_difference == pytest.approx(change.mean(), abs=1e-7)
    assert found.top_probability_rms == pytest.approx(math.sqrt((change**2).mean()), rel=1e-5)
    assert found.perplexity_reference == pytest.approx(math.exp(-p[rows, targets].mean()), rel=1e-6)
    assert found.perplexity_candidate == pytest.approx(math.exp(-q[rows, targets].mean()), rel=1e-6)
    assert found.perplexity_ratio == pytest.approx(found.perplexity_candidate / found.perplexity_reference, rel=1e-9)
    assert (found.kl_lower, found.kl_sampling_error) == (pytest.approx(found.kl.mean), 0.0)


def test_one_position_a_document_gives_llama_cpps_numbers() -> None:
    """tools/perplexity/perplexity.cpp, kl_divergence(): sums over tokens, errors by sums of squares and products."""
    documents = made([1] * 500, noise=0.8)
    found = measure_divergence("t", taken(documents))
    count, nll, nll2, base, base2, cross, kld, kld2, p_diff, p_diff2, same = 0, *[0.0] * 10
    for document in documents:
        q, compared = document.compared()
        own, theirs = -float(q[0]), -float(compared.reference_logprobs[0])
        change = math.exp(-own) - math.exp(-theirs)
        count += 1
        nll, nll2 = nll + own, nll2 + own * own
        base, base2, cross = base + theirs, base2 + theirs * theirs, cross + own * theirs
        kld, kld2 = kld + float(compared.kl[0]), kld2 + float(compared.kl[0]) ** 2
        p_diff, p_diff2 = p_diff + change, p_diff2 + change * change
        same += bool(compared.same_top[0])

    def mean_and_uncertainty(total: float, squares: float) -> tuple[float, float]:
        mean = total / count
        return mean, math.sqrt((squares / count - mean * mean) / (count - 1))

    log_ppl, log_ppl_error = mean_and_uncertainty(nll, nll2)
    log_base, log_base_error = mean_and_uncertainty(base, base2)
    covariance = (cross / count - log_ppl * log_base) / (count - 1)
    ratio = math.exp(log_ppl - log_base)
    ratio_error = ratio * math.sqrt(log_ppl_error**2 + log_base_error**2 - 2 * covariance)
    share = same / count
    assert (found.kl.mean, found.kl.stderr) == pytest.approx(mean_and_uncertainty(kld, kld2), rel=1e-5)
    assert (found.perplexity_ratio, found.perplexity_ratio_stderr) == pytest.approx((ratio, ratio_error), rel=1e-5)
    assert found.target_probability_difference == pytest.approx(p_diff / count, abs=1e-7)
    assert found.target_probability_rms == pytest.approx(math.sqrt(p_diff2 / count), rel=1e-5)
    assert found.top1_agreement == pytest.approx(share)
    assert found.top1_agreement_stderr == pytest.approx(math.sqrt(share * (1 - share) / (count - 1)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(0, 1000))
def test_clustered_error_is_the_double_sum(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    values = random.normal(size=len(documents)) + np.repeat(random.normal(size=len(lengths)), lengths)
    mean, stderr, skewness = clustered_mean(values, documents, np.ones(len(values)))
    total = sum(
        (values[i] - values.mean()) * (values[j] - values.mean())
        for i in range(len(values))
        for j in range(len(values))
        if documents[i] == documents[j]
    )
    number = len(lengths)
    assert mean == pytest.approx(values.mean())
    assert stderr == pytest.approx(math.sqrt(max(total, 0) * number / (number - 1)) / len(values), abs=1e-9)
    deviations = np.bincount(documents, weights=values - values.mean())
    second, third = (np.sum(deviations**power) / number for power in (2, 3))
    unbiased = math.sqrt(number * (number - 1)) / (number - 2) if number > 2 else 0.0
    assert skewness == pytest.approx(unbiased * third / second**1.5, abs=1e-6)


def test_clustered_error_is_what_repeating_the_experiment_shows() -> None:
    random = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        lengths = random.integers(1, 20, 60)
        values = np.repeat(random.normal(size=60), lengths) + 0.3 * random.normal(size=lengths.sum())
        mean, stderr, _ = clustered_mean(values, np.repeat(np.arange(60), lengths), np.ones(len(values)))
        means.append(mean)
        errors.append(stderr)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("count", "least"), [(5, 0.89), (20, 0.93), (100, 0.94)])
def test_intervals_hold_where_the_tail_is_mostly_unseen(count: int, least: float, sign: int) -> None:
    """Of a lognormal law, of which Student's t holds in 82, 86 and 91 %; and p says what the interval says."""
    random, true = np.random.default_rng(count), sign * math.exp(0.5)
    held = []
    for _ in range(2000):
        mean, *errors = clustered_mean(sign * random.lognormal(size=count), np.arange(count), np.ones(count))
        change = TextChange("t", "word_perplexity", count, mean, *errors, degrees=count - 1.0)
        low, high = change.interval(mean - true, *errors)
        held.append(low <= 0 <= high)
        assert held[-1] == (change.p(mean - true, *errors) >= 0.05)
    assert np.mean(held) > least


def test_a_model_against_itself_has_no_distance_and_one_document_no_error_bar() -> None:
    found = measure_divergence("t", taken(made([4, 9], noise=0.0)))
    assert (found.kl.mean, found.kl.maximum, found.top1_agreement, found.perplexity_ratio) == (0, 0, 1, 1)
    assert (found.kl.stderr, found.perplexity_ratio_stderr) == (0, 0)
    single = measure_divergence("t", taken(made([30])))
    assert (single.kl.stderr, single.perplexity_ratio_stderr, single.top1_agreement_stderr) == (None, None, None)
    assert measure_divergence("t", Positions()) is None


def test_sampling_error_adds_up_and_the_reverse_distance_is_left_out_where_a_position_has_none() -> None:
    logprobs, exact = made([4])[0].compared()
    changes = [{"kl_variance": np.full(4, 0.04)}]
    changes += [{"kl_reverse": np.array([0.1, unknown, 0.2, 0.1])} for unknown in (math.nan, math.inf)]
    found = []
    for change in changes:
        positions = Positions()
        positions.add(0, logprobs, SimpleNamespace(**{**vars(exact), **change}))
        found.append(measure_divergence("t", positions))
    sampled, *unknown = filter(None, found)
    assert sampled.kl_sampling_error == pytest.approx(math.sqrt(4 * 0.04) / 4)
    assert [(one.kl_reverse, one.kl_reverse_stderr) for one in unknown] == [(None, None)] * 2


def test_bins_hold_every_position_once() -> None:
    positions = Positions()
    logprobs, exact = made([40])[0].compared()
    kl = np.concatenate([[-1e-3, 0.0, 5e-7, 2e-6, 20.0], exact.kl[5:]])
    classes = np.arange(40) % 5
    positions.add(0, logprobs, SimpleNamespace(**{**vars(exact), "kl": kl}), first_position=10, token_classes=classes)
    found = measure_divergence("t", positions)
    assert sum(item.count for item in found.histogram) == 40
    assert found.histogram[0].label == "0"
    assert found.histogram[0].count == 3
    assert float(found.histogram[-1].label) == 10
    assert found.histogram[-1].count == 1
    edges = [float(item.label) for item in found.histogram]
    assert edges == sorted(edges)
    assert [(item.label, item.count) for item in found.by_position] == [("0-15", 6), ("16-31", 16), ("32-63", 18)]
    assert [item.label for item in found.by_class] == list(CLASSES)
    assert [item.count for item in found.by_class] == [8, 8, 8, 8, 8, 0]
    assert found.by_class[-1].mean is None
    assert found.by_class[1].mean == pytest.approx(kl[classes == 1].mean(), rel=1e-6)
    weighted = sum(item.count * (item.mean or 0) for item in found.by_position) / 40
    assert weighted == pytest.approx(found.kl.mean)


def test_joined_tasks_keep_their_documents_apart() -> None:
    one, two = made([3, 4], seed=1), made([5], seed=2)
    whole = measure_divergence("all", Positions.joined([taken(one), taken(two)]))
    assert whole == measure_divergence("all", taken([*one, *two]))


def test_a_position_takes_42_bytes() -> None:
    assert POSITION.itemsize == 42
    positions = taken(made([700, 800]))
    assert len(positions) == 1500
    assert sys.getsizeof(positions._buffer) <= 2048 * 42
