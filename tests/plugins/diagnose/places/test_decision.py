"""The statistics of two places: noise is taken for more in at most 1 % of pairs, and what is more is found."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from olive_ext.plugins.diagnose.places.judge import ALPHA, RESOLUTION, PairAgainstNoise, held, tail_limit


def drawn(rng: np.random.Generator, lengths: list[int], scale: float = 1e-3, spread: float = 0.0) -> list[np.ndarray]:
    """Distances at the positions of documents, each of a size of its own and heavy-tailed (Student's t, 4 degrees)."""
    own = scale * np.exp(0.3 * spread * np.arange(len(lengths)))
    return [np.abs(size * rng.standard_t(4, length)) for size, length in zip(own, lengths, strict=True)]


def pair(rng: np.random.Generator, factor: float = 1.0, num_documents: int = 12) -> PairAgainstNoise:
    """A pair of `factor` times the noise over 60 documents, of which noise is known of the first ones."""
    lengths = rng.integers(1, 40, 60).tolist()
    whole = [factor * values for values in drawn(rng, lengths, spread=0.2)]
    noise = [drawn(rng, lengths, spread=0.2)[:num_documents] for _ in range(2)]
    return held(whole[:num_documents], noise, np.concatenate(whole))


@pytest.mark.long
def test_equal_noise_is_called_more_in_at_most_one_per_cent() -> None:
    """Of 1,000 pairs that differ by the same noise, the share that is called farther is within 1 %."""
    rng = np.random.default_rng(3)
    lengths = [30] * 40

    def is_farther() -> bool:
        whole = drawn(rng, lengths)
        return held(whole[:12], [drawn(rng, lengths[:12]) for _ in range(2)], np.concatenate(whole)).is_farther

    called = sum(is_farther() for _ in range(1000))
    assert binomtest(called, 1000, ALPHA, alternative="greater").pvalue > 0.01, called


def test_what_is_beyond_the_noise_is_found() -> None:
    """Ten times the noise, whatever documents it is of; a single position, by the test of positions alone; and beyond
    float32's resolution where there is no noise."""
    rng = np.random.default_rng(4)
    assert all(pair(rng, 10.0).is_farther for _ in range(50))
    whole = drawn(rng, [30] * 40)
    whole[33][7] = 10.0
    found = held(whole[:12], [drawn(rng, [30] * 12) for _ in range(2)], np.concatenate(whole))
    assert (found.is_farther_somewhere, found.is_farther_overall) == (True, False)
    nothing = [np.zeros(5)] * 8
    assert not held(nothing, [nothing], np.zeros(40)).is_farther
    assert not held(nothing, [nothing], np.full(40, RESOLUTION)).is_farther
    assert held(nothing, [nothing], np.full(40, 3 * RESOLUTION)).is_farther_somewhere


@pytest.mark.parametrize("index", [0.2, 0.5])
def test_tail_limit_is_that_of_a_pareto(index: float) -> None:
    """Of a sample from a Pareto the limit is within a factor of 3 of the quantile that it estimates."""
    noise = (1 - np.random.default_rng(6).random(20_000)) ** -index
    exact = (0.005 / 1000) ** -index
    assert exact / 3 < tail_limit(noise, 1000, 0.005) < 3 * exact
