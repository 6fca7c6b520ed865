"""The knapsack: equal to trying everything, and its front is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from olive_ext.plugins.diagnose.remedy.choices import cheapest, front, total


def random_tables(seed: int, items: int = 6) -> tuple[list[list[float]], list[list[float]]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, items)
    costs = [np.sort(rng.integers(1, 10**6, size)).astype(float).tolist() for size in sizes]
    burdens = [np.sort(rng.exponential(1e-4, size))[::-1].tolist() for size in sizes]
    return costs, burdens


@pytest.mark.parametrize("seed", range(20))
def test_answer_is_that_of_trying_everything(seed: int) -> None:
    costs, burdens = random_tables(seed)
    answers = list(itertools.product(*(range(len(options)) for options in costs)))
    loads = sorted(total(burdens, answer) for answer in answers)
    limit = loads[len(loads) // 3]
    best = min(total(costs, answer) for answer in answers if total(burdens, answer) <= limit * (1 - 1e-5))
    answer = cheapest(costs, burdens, limit)
    assert answer is not None
    assert total(burdens, answer) <= limit
    assert total(costs, answer) <= best


def test_limit_that_nothing_keeps_has_no_answer() -> None:
    costs, burdens = random_tables(1)
    assert cheapest(costs, burdens, 0.9 * sum(min(options) for options in burdens)) is None


def test_limit_that_just_the_least_keeps_has_one() -> None:
    costs, burdens = random_tables(1)
    least = sum(min(options) for options in burdens)
    answer = cheapest(costs, burdens, least)
    assert answer is not None
    assert total(burdens, answer) == least


def test_front_falls() -> None:
    costs, burdens = random_tables(3, items=40)
    points = [(total(burdens, one), total(costs, one)) for one in front(costs, burdens, 12)]
    assert len(points) > 6
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))


def test_hundreds_of_items_take_a_moment() -> None:
    costs, burdens = random_tables(5, items=300)
    limit = sum(np.mean(options) for options in burdens)
    answer = cheapest(costs, burdens, float(limit))
    assert answer is not None
    assert total(burdens, answer) <= limit


def test_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints a line where it repairs an answer, as it does of this problem."""
    rng = np.random.default_rng(2)
    losses = [
        [loss, 3e-3 * loss * rng.uniform(0.5, 1), 2e-3 * loss * rng.uniform(0.5, 1), 0.0]
        for loss in rng.lognormal(-10, 1.3, 100)
    ]
    costs = [[size, 1.65 * size, 1.8 * size, 6.4 * size] for size in rng.choice([20480, 10240, 30720, 81920], 100)]
    assert cheapest(costs, losses, 0.1 * sum(one[0] for one in losses)) is not None
    assert capfd.readouterr().out == ""
