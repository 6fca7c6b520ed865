"""What a step costs the host outside of ONNX Runtime: processor time, and Python's calls, which no other work disturbs.

    python docs/benchmarks/host_cost.py MODEL [--provider cuda] [--output FILE] [--profile WORK]

Three kinds of work: rows that decode together, texts scored in the steps that the provider has (packed on CUDA, tree
batches on a CPU), texts scored row by row. Models narrow enough that kernels are nothing are best: `make_models.py
--shape tiny-16-layers`, and the stub of CUDA libraries, where they do nothing at all. ONNX Runtime gets one thread, so
that this process's time less that inside `run_with_iobinding` is ours. One number for each part of a step: to plan it,
to bind and read (`run`), to take it in (`update`); `all` holds what is between these, too. What is planned while a step
runs is hidden behind it on a device, and counted all the same.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.opening import open_engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.scheduling.scheduler import Scheduler
from olive_ext.engine.step import Step, StepOutput
from olive_ext.model import resolve

STUB = "OLIVE_EXT_CUDA_STUB"
"""The environment variable that names the stub's library, where that stands in for CUDA's."""

PARTS = {
    "plan": [(Scheduler, "schedule"), (Scheduler, "schedule_overlapped")],
    "run": [(OrtRunner, "run")],
    "update": [(Scheduler, "update")],
    "inside": [(ort.InferenceSession, "run_with_iobinding")],
}
"""The methods that each part of a step consists of; `inside` is called by `run`, and taken off it."""

ROWS, NEW_TOKENS = 16, 64
TEXTS, PREFIX, OWN, TARGETS = 120, 200, 60, 4


def drawn(draw: random.Random, count: int) -> tuple[int, ...]:
    """Token ids that a vocabulary of 1,000 has."""
    return tuple(draw.randrange(4, 1000) for _ in range(count))


def prompts() -> list[Request]:
    """Prompts of the same length, whose answers end together."""
    draw = random.Random(1)
    return [Request(drawn(draw, 20), 0, Generation(NEW_TOKENS)) for _ in range(ROWS)]


def texts() -> list[Request]:
    """Four answers of one token each behind a question of its own, all behind one prefix."""
    draw = random.Random(2)
    prefix = drawn(draw, PREFIX)
    questions = [(*prefix, *drawn(draw, OWN)) for _ in range(TEXTS)]
    return [Request((*question, 5 + number), 1) for question in questions for number in range(TARGETS)]


WORK: dict[str, tuple[Callable[[], list[Request]], dict[str, Any]]] = {
    "decoding": (prompts, {}),
    "scoring": (texts, {}),
    "rows": (texts, {"scoring": "rows"}),
}
"""Requests, and settings of the engine."""


def clock() -> Counter[str]:
    """Lets the methods of `PARTS` add their processor time, in whatever thread they run; engines opened from now on."""
    seconds: Counter[str] = Counter()
    for part, places in PARTS.items():
        for owner, name in places:
            setattr(owner, name, _clocked(getattr(owner, name), part, seconds))
    return seconds


def _clocked(inner: Callable[..., Any], part: str, seconds: Counter[str]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.thread_time()
        try:
            return inner(*arguments, **named)
        finally:
            seconds[part] += time.thread_time() - begin

    return timed


def count_calls(run: Callable[[], object]) -> int:
    """Calls that Python makes in all threads, those of built-in functions too."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    threading.setprofile_all_threads(count) if sys.version_info >= (3, 12) else threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def calls(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Steps, their tokens, and calls a step."""
    counters = engine.counters
    for _ in range(2):  # the second time nothing is made that is kept
        engine.reset()
        for loop in engine._loops:
            loop.close()  # so that the next thread begins under the profiler
        steps, fed = counters.steps, counters.tokens_fed
        number = count_calls(lambda: engine.run(requests))
    steps = counters.steps - steps
    return {"steps": steps, "tokens_a_step": (counters.tokens_fed - fed) / steps, "calls": number / steps}


def times(engine: Engine, requests: Sequence[Request], seconds: Counter[str], rounds: int) -> dict[str, float]:
    """Microseconds a step of each part outside of ONNX Runtime, and inside; the least of all rounds."""
    counters = engine.counters
    engine.run(requests)
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        engine.reset()
        seconds.clear()
        steps, begin = counters.steps, time.process_time()
        engine.run(requests)
        whole = time.process_time() - begin
        inside = seconds["inside"]
        parts = {**seconds, "run": seconds["run"] - inside, "all": whole - inside}
        found.append({f"{name}_us": 1e6 * spent / (counters.steps - steps) for name, spent in parts.items()})
    return {name: min(one[name] for one in found) for name in found[0]}


def _replace_numbers() -> None:
    """Over the stub of CUDA libraries outputs are whatever their memory held: no tokens."""
    run = OrtRunner.run

    def run_and_replace(runner: OrtRunner, step: Step) -> StepOutput:
        output = run(runner, step)
        output.target_logprobs[...] = 0  # no call that Python would count
        output.greedy_ids[...] = 0
        return output

    OrtRunner.run = run_and_replace  # type: ignore[method-assign]


def opened(given: argparse.Namespace, work: str) -> tuple[Engine, list[Request]]:
    """An engine for this kind of work, and its requests."""
    make, settings = WORK[work]
    config = EngineConfig(num_slots=ROWS, num_threads=1, **settings)
    model = ModelSettings(
        model=str(given.model),
        execution_provider=given.provider,
        max_length=1024,
        deterministic=True,
        engine=config,
    )
    return open_engine(resolve(model)), make()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--rounds", metavar="N", type=int, default=9)
    parser.add_argument("--output", metavar="FILE", type=Path)
    parser.add_argument("--profile", metavar="WORK", choices=WORK, help="print cProfile's table of one kind of work")
    given = parser.parse_args()
    if given.profile:
        engine, requests = opened(given, given.profile)
        engine.run(requests)
        with cProfile.Profile() as profile:
            engine.run(requests)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    if STUB in os.environ:
        _replace_numbers()
    found = {}
    for work in WORK:
        engine, requests = opened(given, work)
        found[work] = calls(engine, requests)
        engine.close()
    seconds = clock()
    for work in WORK:
        engine, requests = opened(given, work)
        found[work] |= times(engine, requests, seconds, given.rounds)
        engine.close()
        print(f"{work}: " + ", ".join(f"{name} {value:.0f}" for name, value in found[work].items()), flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
