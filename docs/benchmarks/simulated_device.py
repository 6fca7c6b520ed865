"""How long a device waits for the host, on one that only takes time: as long as an H200 took for each step.

    python docs/benchmarks/simulated_device.py

Time passes as the host's processor works, and as it waits for a step, so that what else runs on the machine does not
count; nor does Python's lock. Numbers mean nothing. `inside`: seconds of the device's steps; `wall`: from the first
one's beginning to the last one's end; `before`: until the first begins; `host`: of the processor, all together.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from harness import table

from olive_ext.engine.engine import Engine
from olive_ext.engine.forms.packed import PackedSteps
from olive_ext.engine.requests import Generation, KeyedRequest, Request
from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.step import Blocks, Capacity, Step, StepOutput
from olive_ext.session.conversion import target_windows
from olive_ext.session.requests import checked_ids, to_scoring

STEP_S, TOKEN_S = 2.1e-3, 4.25e-6
"""A step, and each token of one that has prompts: 6.5 ms for 1,024, of which the device is busy for 5.2."""

ROW_S, POSITION_S = 15.4e-6, 29.7e-9
"""Each row of a step that decodes, and each position that it reads: 4.0 ms for 64 rows after 500 positions (busy for
3.4), 5.9 after 1,500, 17.4 for 256 rows."""

QUESTIONS, ANSWERS, SLICE, ROUNDS = 12_000, 10, 4096, 3


class SimulatedDevice(Runner):
    """Runs steps in the order in which they are begun, in the place of the thread that runs them."""

    host_bytes = num_begun = 0
    capacity = Capacity(0)

    def __init__(self, num_slots: int) -> None:
        super().__init__(Traits(2048, PackedSteps(), overlaps_steps=True))
        self.capacity = Capacity(num_slots, 2048, blocks=Blocks(8 * num_slots, 256))
        self.begins: list[float] = []
        self.inside = self.free = self._waited = 0.0
        self._due: deque[tuple[float, StepOutput]] = deque()

    @property
    def now(self) -> float:
        return time.thread_time() + self._waited

    def run(self, step: Step) -> StepOutput:
        self.begin(step)
        return self.take()

    def begin(self, step: Step) -> None:
        columns, found = step.columns, np.full(len(step.logits_rows), 5)
        seconds = STEP_S + TOKEN_S * step.num_tokens
        if step.num_tokens == len(step.rows):
            seconds = STEP_S + ROW_S * len(step.rows) + POSITION_S * float(columns.past_B.sum())
        output = StepOutput(np.full(len(step.targets), -1, np.float32), found, np.zeros((0, 0), np.float32))
        self.begins.append(max(self.free, self.now))
        self.free, self.inside = self.begins[-1] + seconds, self.inside + seconds
        self._due.append((self.free, output))
        self.num_begun = len(self._due)

    def wait(self, work: Callable[[], bool]) -> None:
        while self.now < self._due[0][0] and work():
            pass

    def take(self) -> StepOutput:
        due, output = self._due.popleft()
        self.num_begun = len(self._due)
        self._waited += max(0.0, due - self.now)
        return output

    def reserve(self, positions: int, cells: int = 0) -> None:
        """All is there."""

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        """Holds nothing."""

    settle = release_memory = close


Slices = Iterable[list[KeyedRequest]]


def draw(count: int) -> tuple[int, ...]:
    return tuple(random.randrange(5, 50_000) for _ in range(count))


def questions(count: int) -> Callable[[], Slices]:
    """Questions of 150 tokens after 700 shared ones, ten answers of one token each, converted as a session does."""
    shots = draw(700)
    texts = [checked_ids("context", (*shots, *draw(150))) for _ in range(count)]

    def slices() -> Iterator[list[KeyedRequest]]:
        found: list[KeyedRequest] = []
        for number in range(count):
            for letter in range(ANSWERS):
                asked = to_scoring((texts[number], [100 + letter]))
                found.append(((number, letter), *target_windows(asked.context, asked.target, 2048)))
            yield []
            if len(found) >= SLICE:
                yield found
                found = []
        yield found

    return slices


def decoding(rows: int, past: int) -> Callable[[], Slices]:
    """Prompts after shared tokens, 128 new tokens each."""
    shots = draw(past - 30)
    items = [(number, Request((*shots, *draw(30)), generation=Generation(128))) for number in range(rows)]
    return lambda: [items]


def at_once(count: int) -> Callable[[], Slices]:
    """The same questions in one slice, known beforehand."""
    items = [item for part in questions(count)() for item in part]
    return lambda: [items]


def measure(slices: Slices, num_slots: int) -> dict[str, float]:
    """A row's facts."""
    device = SimulatedDevice(num_slots)
    engine = Engine(device, 1024)
    engine._scoring.thread = device  # type: ignore[assignment]
    gc.freeze()  # as OrtLM does where requests are many
    begin, waited = time.thread_time(), device.now
    results = sum(1 for _ in engine.run_slices(slices))
    gc.unfreeze()
    host, first = time.thread_time() - begin, device.begins[0]
    wall = device.free - first
    facts = {"steps": len(device.begins), "before": first - waited, "inside": device.inside, "wall": wall}
    return facts | {"wall / inside": wall / device.inside, "host": host, "host us / result": 1e6 * host / results}


def main() -> None:
    """Prints the table: medians of rounds."""
    random.seed(0)
    rows = {
        "300 questions": (at_once(300), 64),
        f"{QUESTIONS:,} questions, at once": (at_once(QUESTIONS), 64),
        f"{QUESTIONS:,} questions, in slices": (questions(QUESTIONS), 64),
        "64 rows after 500": (decoding(64, 500), 64),
        "64 rows after 1,500": (decoding(64, 1500), 64),
        "256 rows after 1,500": (decoding(256, 1500), 256),
    }
    found: dict[str, list[str]] = {}
    for name, (make, num_slots) in rows.items():
        rounds = [measure(make(), num_slots) for _ in range(ROUNDS)]
        facts = {fact: statistics.median(one[fact] for one in rounds) for fact in rounds[0]}
        found[name] = [f"{value:.4g}" for value in facts.values()]
    print(table(["", *facts], [[name, *row] for name, row in found.items()]))


if __name__ == "__main__":
    sys.exit(main())
