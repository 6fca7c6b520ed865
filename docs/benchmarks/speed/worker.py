"""One measurement, in the process that `process.Launcher` starts for it. Opens backends by name; knows no table."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.benchmarks.speed.job import OURS, BenchJob
from docs.benchmarks.speed.latency import measure
from docs.benchmarks.speed.work import count_tokens, measure_ceiling
from olive_ext.backends.lm_eval.instances import SLICE
from olive_ext.errors import one_line
from olive_ext.model.providers.devices import UnmeasuredError, cuda_memory
from olive_ext.python_processes import serve
from olive_ext.run.machine import PeakMemory, resident_memory
from olive_ext.session.conversion import target_windows

if TYPE_CHECKING:
    from docs.benchmarks.speed.peers import RecordedRequest
    from olive_ext.backends.lm_eval.ort_lm import OrtLM

logger = logging.getLogger(__name__)

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_WARMUP_TOKENS = 8
"""Tokens generated at most while warming up."""


def perform(job: BenchJob) -> dict[str, Any]:
    """Runs the job; returns the fields of a `BenchRun` that this process knows. Raises whatever the backend raises."""
    if job.task == "ceiling":
        ceiling = measure_ceiling(job.matrices, job.opening["device"], job.opening["dtype"])
        return {"flops_per_second": ceiling}
    work = {"latencies": _latencies, "answer": _answer}
    return work[job.task](job)


def _requests(job: BenchJob) -> list[RecordedRequest]:
    from docs.benchmarks.speed.peers import RecordedRequest

    written = json.loads(Path(job.requests).read_text())
    return [RecordedRequest(**{**one, "args": tuple(one["args"])}) for one in written]


def _answer(job: BenchJob) -> dict[str, Any]:
    from docs.benchmarks.speed.peers import instances

    recorded = _requests(job)
    kinds = {kind: own for kind in KINDS if (own := [one for one in recorded if one.kind == kind])}
    readers = _memory_readers(str(job.opening.get("device", "cpu")))
    is_ours = job.backend == OURS
    memory = {**_memory("before", readers), "weights": _size(job)}
    begin = time.perf_counter()
    lm = open_lm(job)
    seconds_open = time.perf_counter() - begin
    memory |= _memory("open", readers)
    _warm_up(lm, kinds, job.warmup)
    if is_ours:
        lm.session.gc()  # drops what could be reused of the warm-up
    memory |= _memory("warm", readers)
    before = _counters(lm) if is_ours else {}
    prepared = {kind: instances(own) for kind, own in kinds.items()}
    answers, seconds = {}, {}
    with ExitStack() as watched:
        peaks = {prefix: watched.enter_context(PeakMemory(read)) for prefix, read in readers.items()}
        for kind, requests in prepared.items():
            begin = time.perf_counter()
            answers[kind] = list(getattr(lm, kind)(requests))
            seconds[kind] = time.perf_counter() - begin
    memory |= {f"{prefix}peak": peak.bytes for prefix, peak in peaks.items()}
    Path(job.answers).write_text(json.dumps(answers), encoding="utf-8")
    measured: dict[str, Any] = {"seconds": seconds, "seconds_open": seconds_open, "memory": memory}
    if not is_ours:
        return measured
    counters = {name: value - before[name] for name, value in _counters(lm).items()}
    inputs = inputs_of(lm, recorded, counters.get("tokens_generated", 0)) if job.counts_tokens else None
    tokens = {} if inputs is None else count_tokens(inputs)
    return {**measured, "counters": counters, "execution": lm.session.describe_execution(), "tokens": tokens}


def _memory_readers(device: str) -> dict[str, Callable[[], int]]:
    """Functions that give bytes: under "" those resident in this process, under "device_" those in use by all processes
    on a CUDA device ("cuda", "cuda:1") where that can be measured."""
    readers = {"": resident_memory()}
    kind, _, number = device.partition(":")
    if kind == "cuda":
        index = int(number or 0)
        try:
            cuda_memory(index)
        except UnmeasuredError as error:
            logger.warning("%s: %s", device, error)
        else:
            readers["device_"] = lambda: (memory := cuda_memory(index)).total - memory.free
    return readers


def _memory(stage: str, readers: Mapping[str, Callable[[], int]]) -> dict[str, int]:
    return {f"{prefix}{stage}": read() for prefix, read in readers.items()}


def open_lm(job: BenchJob) -> Any:
    """The backend that the job names; a peer is given the tokens that ours would have."""
    from docs.benchmarks.speed.peers import Opening, feed_our_tokens, open_backend, refuse_code

    refuse_code()
    opening = Opening(**job.opening)
    if job.backend.startswith("olive-o"):
        from docs.benchmarks.speed.peers import open_olive

        lm = open_olive(job.backend, opening, Path(job.staging))
    else:
        lm = open_backend(job.backend, opening)
    if job.backend != OURS:
        feed_our_tokens(lm, opening)
    return lm


def _warm_up(lm: Any, kinds: Mapping[str, Sequence[Any]], number: int) -> None:
    """Answers a few requests of each kind, spread over all."""
    from docs.benchmarks.speed.peers import instances

    for kind, own in kinds.items():
        some = own[:: max(1, len(own) // number)][:number] if number else []
        if kind == "generate_until":
            some = [replace(one, args=(one.args[0], {**one.args[1], "max_gen_toks": _WARMUP_TOKENS})) for one in some]
        if some:
            getattr(lm, kind)(instances(some))


def _counters(lm: Any) -> dict[str, float]:
    counters = lm.session.describe_execution()["counters"]
    return {name: value for name, value in counters.items() if isinstance(value, int | float)}


def inputs_of(lm: OrtLM, requests: Sequence[Any], generated: float) -> Iterator[tuple[Sequence[int], int]]:
    """Tokens that a plain backend feeds for each request, and at how many of the last positions it reads.

    `generated` tokens are spread evenly over the generations; no two share any.
    """
    num_new = round(generated / max(1, sum(one.kind == "generate_until" for one in requests)))
    pairs = [one for one in requests if one.kind == "loglikelihood"]
    for start in range(0, len(pairs), SLICE):
        for pending in lm.scoring_requests(enumerate(pairs[start : start + SLICE])):
            yield from _windows(pending.request.context, pending.request.target, lm.max_length)
    for number, one in enumerate(requests):
        if one.kind == "generate_until":
            yield [*lm.tok_encode(one.args[0]), *[-1 - number] * (num_new - 1)], max(1, num_new)
        elif one.kind == "loglikelihood_rolling":
            yield from _windows([lm.prefix_token_id], lm.tok_encode(one.args[0]), lm.max_length)


def _windows(context: Sequence[int], target: Sequence[int], max_length: int) -> Iterator[tuple[Sequence[int], int]]:
    for window in target_windows(context, target, max_length):
        yield window.tokens[:-1], window.num_targets


def _latencies(job: BenchJob) -> dict[str, Any]:
    """The same generations twice: the first requests of this process, and again with nothing kept but what is warm."""
    from docs.benchmarks.speed.peers import instances
    from olive_ext.session.conversion import convert

    lm: OrtLM = open_lm(job)
    generations = [one for one in _requests(job) if one.kind == "generate_until"]
    wanted = lm.pending_generations(instances(generations))
    requests = [convert(lm.session, item.request)[0][0] for item in wanted]
    series = []
    for is_warm in (0, 1):
        latencies = measure(lm.session.executor.run_continuous, requests, job.in_flight)
        series.append({"in_flight": job.in_flight, "is_warm": is_warm, **latencies})
        lm.session.gc()
    return {"series": series}


def _size(job: BenchJob) -> int:
    """Bytes of the files that the backend's weights are in."""
    from olive_ext.config import ModelSettings
    from olive_ext.model import resolve

    is_hf = job.backend == "hf"
    path = job.opening["hf" if is_hf else "model"]
    return resolve(ModelSettings(model=path, kind="hf" if is_hf else "onnx")).size or 0


def serve_jobs() -> None:
    """The process: measures the jobs that it is sent."""
    serve(_measured)
    sys.stdout.flush()
    os._exit(0)  # what libraries do while they shut down, and how they fail at it, concerns no measurement


def _measured(job: BenchJob) -> dict[str, Any]:
    """`perform`, on as many processors as the job has threads; an `error` where the backend raises."""
    number = job.opening.get("num_threads")
    if number is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])
    try:
        return perform(job)
    except Exception as error:  # noqa: BLE001 - a peer may fail with anything, and that is its line in the table
        traceback.print_exc()
        return {"error": one_line(error)}
