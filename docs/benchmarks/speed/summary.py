"""Medians and ratios of what was measured, and whether backends answered alike. Pure; knows no process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from docs.benchmarks.speed.job import OURS, PROBE, BenchRun, best
from docs.benchmarks.speed.work import Work

Answers = Mapping[str, Sequence[Any]]
"""Answers by kind of request, in that kind's order: [log-likelihood, is greedy], log-likelihood, or text."""

ABSOLUTE, RELATIVE = 0.02, 1e-4
"""Nats and share that a log-likelihood may differ by: kernels that add in another order differ by as much."""


@dataclass(frozen=True)
class BackendRow:
    """One backend at its best batch size: medians over rounds. With only an `error` it never succeeded."""

    backend: str
    batch_size: int | None = None
    rounds: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    """Tokens of the requests, each counted in full, and generated ones."""

    fed_per_second: float | None = None
    seconds: float = 0.0
    """Seconds inside the model's calls."""

    seconds_total: float = 0.0
    """Seconds of the whole process: imports, opening, warm-up and the work."""

    memory_above: float = 0.0
    """Bytes: the most that was resident above the model's own, see `BenchRun.memory_above`."""

    memory_peak: float = 0.0
    device_above: float | None = None
    device_peak: float | None = None
    speedup: tuple[float, float, float] | None = None
    """Our backend's requests per second divided by this backend's in the same round: median, least, most."""

    agreement: Mapping[str, Any] = field(default_factory=dict)
    """The agreement of the round that agrees least with the reference."""

    error: str | None = None


@dataclass(frozen=True)
class Summary:
    """Everything that the table and the facts under it are made from."""

    rows: tuple[BackendRow, ...]
    num_requests: int
    tokens_naive: int | None
    tokens_distinct: int | None
    fed_over_distinct: float | None
    """Tokens that our backend fed over distinct prefix tokens."""

    utilisation: float | None
    """Operations per second of our backend over `ceiling`, the machine's best."""

    ceiling: float | None
    reference: str | None
    host_bytes: float | None = None
    """Bytes that crossed from the device to the host for each request of ours."""

    latencies: Sequence[Mapping[str, float]] = ()
    """The series of our jobs of latencies."""


def summarize(
    backends: Sequence[str],
    runs: Sequence[BenchRun],
    num_requests: int,
    reference: str | None = None,
    *,
    work: Work | None = None,
    ceiling: float | None = None,
    latencies: Sequence[Mapping[str, float]] = (),
) -> Summary:
    """`backends` in the order of the rows, ours first."""
    tokens = next((run.tokens for run in runs if run.tokens), None)
    naive, distinct = (None if tokens is None else int(tokens[name]) for name in ("naive", "distinct"))
    ours = chosen_runs(backends[0], runs)
    host_bytes = [run.counters["host_bytes"] / num_requests for run in ours if "host_bytes" in run.counters]
    ratio = utilisation = None
    if ours and tokens is not None:
        fed = median(run.counters.get("tokens_fed", 0.0) for run in ours)
        ratio = _over_distinct(fed, ours, tokens)
        if work is not None and ceiling:
            operations = work.of(fed, tokens, ours[0].execution.get("scored_row_products", ()))
            utilisation = operations / median(run.in_model for run in ours) / ceiling
    return Summary(
        rows=tuple(_row(name, runs, ours, num_requests, naive) for name in backends),
        num_requests=num_requests,
        tokens_naive=naive,
        tokens_distinct=distinct,
        fed_over_distinct=ratio,
        utilisation=utilisation,
        ceiling=ceiling,
        reference=reference,
        host_bytes=median(host_bytes) if host_bytes else None,
        latencies=tuple(latencies),
    )


def _over_distinct(fed: float, ours: Sequence[BenchRun], tokens: Mapping[str, float]) -> float | None:
    # The engine's own count knows prompts only; what was generated is distinct, too.
    is_scoring = not any(run.counters.get("tokens_generated") for run in ours)
    counted = [run.counters["tokens_distinct"] for run in ours if is_scoring and "tokens_distinct" in run.counters]
    distinct = median(counted or [tokens["distinct"]])
    return fed / distinct if distinct else None


def chosen_runs(backend: str, runs: Sequence[BenchRun]) -> list[BenchRun]:
    """The successful runs of a backend at its best batch size, one a round; probes are none of them."""
    own = [run for run in runs if run.backend == backend]
    chosen = best(own)
    size = chosen.batch_size if chosen else None
    return [run for run in own if run.round > PROBE and run.batch_size == size and not run.error]


def _row(
    backend: str, runs: Sequence[BenchRun], ours: Sequence[BenchRun], num_requests: int, naive: int | None
) -> BackendRow:
    good = chosen_runs(backend, runs)
    error = next((run.error for run in runs if run.backend == backend and run.error), None)
    if not good:
        return BackendRow(backend, error=error)
    seconds = median(run.in_model for run in good)
    fed = median(run.counters.get("tokens_fed", 0.0) for run in good)
    devices = [run.memory for run in good if "device_peak" in run.memory]
    of_round = {run.round: run.in_model for run in ours}
    ratios = [run.in_model / of_round[run.round] for run in good if of_round.get(run.round)]
    return BackendRow(
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


def _worst(agreements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The round with the largest difference and the fewest equal answers."""

    def badness(one: Mapping[str, Any]) -> tuple[bool, int, float]:
        unequal = sum(one[key][1] - one[key][0] for key in ("choices", "texts", "greedy") if key in one)
        return bool(one["differs"]), unequal, float(one.get("max_difference", 0.0))

    return max(agreements, key=badness) if agreements else {}


def agreement(groups: Sequence[tuple[str, int]], answers: Answers, reference: Answers) -> dict[str, Any]:
    """How far `answers` are from `reference`. `groups` are task and document of each loglikelihood request.

    `max_difference` and `mean_difference` of log-likelihoods in nats; `choices`, `greedy`, `texts`: equal ones and how
    many there are, of the best choice of each document, of the greedy flags, of the generated texts; `differs`: a
    difference beyond the tolerance, another choice or another text.
    """
    chosen, expected = (each.get("loglikelihood", ()) for each in (answers, reference))
    rolling = (each.get("loglikelihood_rolling", ()) for each in (answers, reference))
    pairs = [(ours[0], theirs[0]) for ours, theirs in zip(chosen, expected, strict=True)]
    pairs += zip(*rolling, strict=True)
    gaps = [abs(ours - theirs) for ours, theirs in pairs]
    equal: dict[str, Any] = {}
    if pairs:
        equal["max_difference"], equal["mean_difference"] = max(gaps), sum(gaps) / len(gaps)
    if chosen:
        equal["greedy"] = _equal([one[1] for one in chosen], [one[1] for one in expected])
    members: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, group in enumerate(groups if chosen else ()):
        members[group].append(index)
    several = [indices for indices in members.values() if len(indices) > 1]
    if several:
        equal["choices"] = _equal([_best(chosen, own) for own in several], [_best(expected, own) for own in several])
    texts = answers.get("generate_until", ())
    if texts:
        equal["texts"] = _equal(texts, reference["generate_until"])
    too_far = any(gap > ABSOLUTE + RELATIVE * abs(theirs) for gap, (_, theirs) in zip(gaps, pairs, strict=True))
    unequal = any(equal[key][0] < equal[key][1] for key in ("choices", "texts") if key in equal)
    return {**equal, "differs": too_far or unequal}


def _best(answers: Sequence[Any], indices: Sequence[int]) -> int:
    return max(range(len(indices)), key=lambda at: answers[indices[at]][0])


def _equal(ours: Sequence[Any], theirs: Sequence[Any]) -> list[int]:
    return [sum(one == other for one, other in zip(ours, theirs, strict=True)), len(ours)]
