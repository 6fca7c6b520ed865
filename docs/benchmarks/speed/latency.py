"""How long single tokens take with a fixed number of requests in flight: a closed loop, in which the next request
begins when one has ended. Knows no model.

time to first token     from a request's begin to its first token: waiting, the prompt, one step
time per output token   of a request with several tokens, from its first to its last one, over their number less one
inter-token latency     from each token of an answer to the next one
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from olive_ext.engine.requests import Request, Result

RunContinuous = Callable[[Iterable[tuple[Hashable, Request] | None]], Iterable[tuple[Hashable, Result]]]

LATENCIES = {
    "first_token": "time to first token",
    "output_token": "time per output token",
    "inter_token": "inter-token latency",
}
"""Names of what is measured, by the beginning of their keys in `describe`."""

STATISTICS: dict[str, Callable[[Sequence[float]], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "p99": lambda values: np.percentile(values, 99),
}


@dataclass(frozen=True)
class Timeline:
    """Seconds of one request on one clock: when it was given, and when each of its tokens was there."""

    begin: float
    tokens: list[float] = field(default_factory=list)


def closed_loop(
    run_continuous: RunContinuous, requests: Sequence[Request], in_flight: int, clock: Callable[[], float]
) -> list[Timeline]:
    """Answers generations with `in_flight` of them at a time; their timelines."""
    lines: list[Timeline] = []
    ended = 0

    def items() -> Iterator[tuple[Hashable, Request] | None]:
        for number, request in enumerate(requests):
            while len(lines) - ended >= in_flight:
                yield None
            lines.append(Timeline(clock()))
            yield number, _stamped(request, lines[-1].tokens, clock)

    for _ in run_continuous(items()):
        ended += 1
    return lines


def _stamped(request: Request, times: list[float], clock: Callable[[], float]) -> Request:
    """The request, with each token's time put into `times`."""
    generation = request.generation
    assert generation is not None
    is_finished = generation.is_finished or (lambda tokens: False)

    def note(tokens: Sequence[int]) -> bool:
        times.append(clock())
        return is_finished(tokens)

    return replace(request, generation=replace(generation, is_finished=note))


def describe(lines: Sequence[Timeline]) -> dict[str, float]:
    """Requests and tokens a second, and mean, median and 99th percentile of each of `LATENCIES` in milliseconds; not a
    number where no answer has enough tokens."""
    answered = [line for line in lines if line.tokens]
    several = [line for line in answered if len(line.tokens) > 1]
    values = {
        "first_token": [line.tokens[0] - line.begin for line in answered],
        "output_token": [(line.tokens[-1] - line.tokens[0]) / (len(line.tokens) - 1) for line in several],
        "inter_token": [after - before for line in several for before, after in pairwise(line.tokens)],
    }
    end = max((line.tokens[-1] for line in answered), default=float("nan"))
    seconds = end - min(line.begin for line in lines)
    latencies = {
        "requests_per_second": len(lines) / seconds,
        "tokens_per_second": sum(len(line.tokens) for line in lines) / seconds,
    }
    for name, own in values.items():
        for statistic, compute in STATISTICS.items():
            latencies[f"{name}_{statistic}_ms"] = 1e3 * float(compute(own)) if own else float("nan")
    return latencies


def measure(run_continuous: RunContinuous, requests: Sequence[Request], in_flight: int) -> dict[str, float]:
    """`describe` of one closed loop on this machine's clock."""
    return describe(closed_loop(run_continuous, requests, in_flight, time.perf_counter))
