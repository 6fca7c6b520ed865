"""Medians and ratios of what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from olive_ext.bench.flops import Work
from olive_ext.bench.job import OURS, Run
from olive_ext.bench.rounds import PROBE, best


@dataclass(frozen=True)
class Row:
    """One backend at its best batch size: medians over rounds. With only an `error` it never succeeded."""

    backend: str
    batch_size: int | None = None
    rounds: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    """Tokens of the requests, each counted in full, and generated ones."""

    fed_per_second: float | None = None
    seconds: float = 0.0
    """Inside the model's calls."""

    seconds_total: float = 0.0
    """Of the whole process: imports, opening, warm-up and the work."""

    memory_above: float = 0.0
    """Bytes: the most that was resident above the model's own, see `Run.memory_above`."""

    memory_peak: float = 0.0
    device_above: float | None = None
    device_peak: float | None = None
    speedup: tuple[float, float, float] | None = None
    """Ours over it, in requests per second of the same round: median, least, most."""

    agreement: Mapping[str, Any] = field(default_factory=dict)
    """The worst of the rounds."""

    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """The table and the facts under it."""

    rows: tuple[Row, ...]
    num_requests: int
    tokens_naive: int | None
    tokens_distinct: int | None
    fed_over_distinct: float | None
    """Tokens that our backend fed over distinct prefix tokens."""

    utilisation: float | None
    """Operations per second of our backend over the machine's best, and what it is of."""

    ceiling: float | None
    reference: str | None
    host_bytes: float | None = None
    """Bytes that crossed from the device to the host for each request of ours."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    backends: Sequence[str],
    runs: Sequence[Run],
    num_requests: int,
    *,
    reference: str | None = None,
    work: Work | None = None,
    ceiling: float | None = None,
) -> Summary:
    """`backends` in the order of the rows, ours first."""
    tokens = next((run.tokens for run in runs if run.tokens), None)
    naive = None if tokens is None else int(tokens["naive"])
    ours = chosen_runs(backends[0], runs)
    rows = tuple(_row(name, runs, ours, num_requests, naive) for name in backends)
    ratio = used = None
    if ours and tokens is not None:
        fed = median(run.counters.get("tokens_fed", 0.0) for run in ours)
        # The engine's own count knows prompts only; what was generated is distinct, too.
        is_scoring = not any(run.counters.get("tokens_generated") for run in ours)
        counted = [run.counters["tokens_distinct"] for run in ours if is_scoring and "tokens_distinct" in run.counters]
        distinct = median(counted or [tokens["distinct"]])
        ratio = fed / distinct if distinct else None
        if work is not None and ceiling:
            operations = work.of(fed, tokens, ours[0].execution.get("scored_row_products", ()))
            used = operations / median(run.in_model for run in ours) / ceiling
    return Summary(
        rows=rows,
        num_requests=num_requests,
        tokens_naive=naive,
        tokens_distinct=None if tokens is None else int(tokens["distinct"]),
        fed_over_distinct=ratio,
        utilisation=used,
        ceiling=ceiling,
        reference=reference,
        host_bytes=_median([run.counters["host_bytes"] / num_requests for run in ours if "host_bytes" in run.counters]),
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def chosen_runs(backend: str, runs: Sequence[Run]) -> list[Run]:
    """The successful runs of a backend at its best batch size, one a round; probes are none of them."""
    own = [run for run in runs if run.backend == backend]
    chosen = best(own)
    size = chosen.batch_size if chosen else None
    return [run for run in own if run.round > PROBE and run.batch_size == size and not run.error]


def _row(backend: str, runs: Sequence[Run], ours: Sequence[Run], num_requests: int, naive: int | None) -> Row:
    good = chosen_runs(backend, runs)
    error = next((run.error for run in runs if run.backend == backend and run.error), None)
    if not good:
        return Row(backend, error=error)
    seconds = median(run.in_model for run in good)
    fed = median(run.counters.get("tokens_fed", 0.0) for run in good)
    devices = [run.memory for run in good if "device_peak" in run.memory]
    of_round = {run.round: run.in_model for run in ours}
    ratios = [run.in_model / of_round[run.round] for run in good if of_round.get(run.round)]
    return Row(
        backend,
        good[0].batch_size,
        rounds=len(good),
        requests_per_second=num_requests / seconds,
        tokens_per_second=(naive or 0) / seconds,
        fed_per_second=fed / seconds if fed else None,
        seconds=seconds,
        seconds_total=median(run.seconds_total for run in good),
        memory_above=median(run.memory_above for run in good),
        memory_peak=median(run.memory["peak"] for run in good),
        device_above=median(item["device_peak"] - item["device_open"] for item in devices) if devices else None,
        device_peak=median(item["device_peak"] for item in devices) if devices else None,
        speedup=(median(ratios), min(ratios), max(ratios)) if ratios and backend != OURS else None,
        agreement=_worst([run.agreement for run in good if run.agreement]),
        error=next((run.error for run in runs if run.backend == backend and run.error and run.round > 0), None),
    )


def _worst(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The round with the largest difference and the fewest equal answers."""

    def badness(one: Mapping[str, Any]) -> tuple[bool, int, float]:
        unequal = sum(one[key][1] - one[key][0] for key in ("choices", "texts", "greedy") if key in one)
        return bool(one["differs"]), unequal, float(one.get("max_difference", 0.0))

    return max(found, key=badness) if found else {}
