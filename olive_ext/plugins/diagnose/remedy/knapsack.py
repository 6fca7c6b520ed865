"""One option for each of many items: the cheapest within a limit, exactly (a multiple-choice knapsack, by HiGHS).

Knows numbers, not what they are of.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

Table: TypeAlias = Sequence[Sequence[float]]
"""By item and option."""

SLACK = 1e-5
"""Share of the limit that is left free where an answer breaks it: HiGHS tolerates 1e-6."""

SMALLEST = 1e-8
"""Share of the limit, or of the largest cost, below which a number counts as none: HiGHS drops such coefficients."""

STDOUT = 1

SECONDS = 60.0
"""Time after which the best answer so far is taken; 800 options took 0.1 s."""


def cheapest(costs: Table, burdens: Table, limit: float) -> tuple[int, ...] | None:
    """The option of each item with the smallest sum of costs whose burdens sum up to at most `limit`; None where there
    is none. No number is negative."""
    sizes = [len(options) for options in costs]
    cost, burden = _flat(costs, max(map(max, costs))), _flat(burdens, limit)
    if sum(min(options) for options in burdens) > limit:
        return None
    each = sparse.block_diag([np.ones((1, size)) for size in sizes], format="csr")
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    for slack in (0.0, SLACK):
        with _silent():
            result = optimize.milp(
                cost,
                integrality=np.ones(len(cost)),
                bounds=optimize.Bounds(0, 1),
                constraints=[
                    optimize.LinearConstraint(each, 1, 1),
                    optimize.LinearConstraint(burden[None, :], -np.inf, (1 - slack) if limit else 0.0),
                ],
                options={"mip_rel_gap": 0, "time_limit": SECONDS, "presolve": False},
            )
        if result.x is None:
            break
        parts = (result.x[start : start + size] for start, size in zip(starts, sizes, strict=True))
        answer = tuple(int(np.argmax(part)) for part in parts)
        if total(burdens, answer) <= limit:
            return answer
    return tuple(int(np.argmin(options)) for options in burdens)  # nothing else fits within the solver's tolerance


def front(costs: Table, burdens: Table, num_points: int) -> list[tuple[int, ...]]:
    """Answers for `num_points` limits, evenly spaced from the least burden to the one of the cheapest options, without
    those that another one beats in both sums."""
    least = sum(min(options) for options in burdens)
    most = sum(burden[int(np.argmin(cost))] for cost, burden in zip(costs, burdens, strict=True))
    answers = {cheapest(costs, burdens, limit) for limit in np.linspace(least, max(least, most), num_points).tolist()}
    points = sorted((total(burdens, one), total(costs, one), one) for one in answers if one is not None)
    kept: list[tuple[int, ...]] = []
    best = np.inf
    for _, cost, answer in points:
        if cost < best:
            kept.append(answer)
            best = cost
    return kept


def total(table: Table, answer: Sequence[int]) -> float:
    """The sum over all items of the option that an answer takes."""
    return float(sum(options[choice] for options, choice in zip(table, answer, strict=True)))


@contextmanager
def _silent() -> Iterator[None]:
    """Where HiGHS repairs an answer it prints a line of its own, past Python: stdout leads nowhere meanwhile."""
    library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)
    sys.stdout.flush()
    library.fflush(None)
    own, nowhere = os.dup(STDOUT), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    try:
        yield
    finally:
        library.fflush(None)
        os.dup2(own, STDOUT)
        os.close(own)
        os.close(nowhere)


def _flat(table: Table, unit: float) -> npt.NDArray[np.float64]:
    numbers = np.array([value for options in table for value in options], np.float64) / (unit or 1.0)
    return np.where(numbers < SMALLEST, 0.0, numbers)
