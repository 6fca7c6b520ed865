"""What a step costs the host, and how many steps overlap, on a CUDA device that computes nothing.

    python .ci/cuda_stub/make.py STUB
    python docs/benchmarks/make_models.py MODELS --shape tiny-16-layers --precision fp16 --device cuda
    STUB/run python docs/benchmarks/step_overlap.py MODELS/fp16 --device-ms 4

Kernels do nothing there, so that trials are not heard, every greedy token is the same, and times are the host's: of the
processor, in milliseconds a step, in planning, inside ONNX Runtime, around it and in taking results in. With
--device-ms a step of the decoder takes so long from its beginning, as it would on a device that computes while kernels
are launched. `step` is the median time from one step's beginning to the next one's.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from harness import table

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine
from olive_ext.engine.forms import graph_form, packed
from olive_ext.engine.opening import open_engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.runners import trials
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.scheduling.scheduler import Scheduler
from olive_ext.model import resolve

TOKEN = 5
"""What every row finds."""

Draw = Callable[[int], tuple[int, ...]]


def choices(draw: Draw, length: int) -> list[Request]:
    """200 questions of 58 tokens behind 700 shared ones, four answers each."""
    shots = draw(700)
    questions = [(*shots, *draw(58)) for _ in range(200)]
    return [Request((*one, letter, *draw(length - 1)), length) for one in questions for letter in range(6, 10)]


def alike(draw: Draw) -> list[Request]:
    """256 prompts of 60 tokens behind 100 shared ones, 64 new tokens each."""
    shots = draw(100)
    return [Request((*shots, *draw(60)), 0, Generation(64)) for _ in range(256)]


def gsm8k(draw: Draw) -> list[Request]:
    """512 prompts of 60 tokens behind 800, with answers of 64 to 191 tokens, which end by a stop."""
    shots = draw(800)
    return [Request((*shots, *draw(60)), 0, ending(64 + number * 37 % 128)) for number in range(512)]


def ending(length: int) -> Generation:
    """Ends behind so many tokens, which shows when they are read."""
    return Generation(1024, is_finished=lambda tokens: len(tokens) >= length)


ROWS: Mapping[str, tuple[Callable[[Draw], list[Request]], Mapping[str, Any]]] = {
    "200 questions x 4, one token": (lambda draw: choices(draw, 1), {}),
    "the same, 5 tokens": (lambda draw: choices(draw, 5), {}),
    "256 prompts x 64, 64 slots": (alike, {"num_slots": 64}),
    "the same, 256 slots": (alike, {"num_slots": 256}),
    "512 like GSM8K, 256 slots": (gsm8k, {"num_slots": 256}),
    "the same, slots by memory": (gsm8k, {}),
}
FACTS = ("steps", "replayed", "tokens a step", "plan", "inside", "run outside", "update", "step")
FACTS += ("overlapped %", "rows dropped")


class Clock:
    """Seconds of the processor by part, of all threads that pass through it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Counts what `owner.name` takes."""
        inner = getattr(owner, name)

        def timed(*given: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(*given)
            finally:
                self.seconds[part] += time.thread_time() - begin

        setattr(owner, name, timed)


class Device:
    """Takes `ms` for each run of the decoder that it holds, and notes when they begin."""

    def __init__(self, ms: float) -> None:
        self.seconds, self.session, inner = ms / 1e3, None, ort.InferenceSession.run_with_iobinding
        self.begun: list[float] = []

        def run(session: Any, *given: Any) -> None:
            begin = time.perf_counter()
            inner(session, *given)
            if session is self.session:
                self.begun.append(begin)
                time.sleep(max(0.0, begin + self.seconds - time.perf_counter()))

        ort.InferenceSession.run_with_iobinding = run


def without_verdicts() -> None:
    """Opens forms that trials refuse where kernels do nothing, and gives every row one token."""
    for place, name in (
        (packed, "attends_otherwise"),
        *((module, "disagreement") for module in (graph_form, packed, trials)),
    ):
        setattr(place, name, lambda *_: None)
    inner = OrtRunner.run

    def run(runner: OrtRunner, step: Any) -> Any:
        output = inner(runner, step)
        output.target_logprobs[...], output.greedy_ids[...] = -1.0, TOKEN
        return output

    OrtRunner.run = run  # type: ignore[method-assign]


def measure(engine: Engine, requests: list[Request], clock: Clock, device: Device) -> dict[str, float]:
    """One row's facts."""
    engine.reset()
    counters = engine.counters
    clock.seconds.clear()
    device.begun.clear()
    steps, fed, ahead, dropped = counters.steps, counters.tokens_fed, counters.steps_overlapped, counters.rows_dropped
    replayed = engine.describe().get("steps_replayed", 0)
    engine.run(requests)
    num = counters.steps - steps
    parts = {name: 1e3 * seconds / num for name, seconds in clock.seconds.items()}
    parts["run outside"] = parts.pop("run") - parts["inside"]
    replayed = engine.describe().get("steps_replayed", 0) - replayed
    facts = {"steps": num, "replayed": replayed, "tokens a step": (counters.tokens_fed - fed) / num, **parts}
    return facts | {
        "step": 1e3 * float(np.median(np.diff(device.begun))),
        "overlapped %": 100 * (counters.steps_overlapped - ahead) / num,
        "rows dropped": counters.rows_dropped - dropped,
    }


def main() -> None:
    """Prints the table, and with --out writes the numbers."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("package", metavar="PACKAGE")
    parser.add_argument("--provider", default="cuda", help="default: %(default)s")
    parser.add_argument("--device-ms", type=float, default=0.0, metavar="MS", help="what a step takes the device")
    parser.add_argument("--graph-capture", action="store_true", help="captures steps in which every row decodes")
    parser.add_argument("--rows", metavar="WORD", default="", help="only rows that have this in their name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    given = parser.parse_args()
    without_verdicts()
    clock, device = Clock(), Device(given.device_ms)
    for owner, name, part in (
        (Scheduler, "schedule", "plan"),
        (Scheduler, "schedule_overlapped", "plan"),
        (Scheduler, "update", "update"),
        (OrtRunner, "run", "run"),
        (ort.InferenceSession, "run_with_iobinding", "inside"),
    ):
        clock.watch(owner, name, part)
    found: dict[str, dict[str, float]] = {}
    for name, (make, engine_settings) in ROWS.items():
        if given.rows not in name:
            continue
        source = random.Random(1)
        requests = make(lambda count, source=source: tuple(source.randrange(6, 900) for _ in range(count)))
        capture: Any = "auto" if given.graph_capture else False
        settings = EngineConfig(scoring="packed", overlaps_steps=True, graph_capture=capture, **engine_settings)
        opened = ModelSettings(model=given.package, execution_provider=given.provider, max_length=2048, engine=settings)
        engine = open_engine(resolve(opened))
        engine.run(requests[: len(requests) // 8])
        device.session = engine.runner._session  # type: ignore[attr-defined]
        runs = [measure(engine, requests, clock, device) for _ in range(3)]
        engine.close()
        found[name] = min(runs, key=lambda facts: facts["step"])
    shown = [(name, *(f"{facts[fact]:.4g}" for fact in FACTS)) for name, facts in found.items()]
    print(table(("work", *FACTS), shown))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
