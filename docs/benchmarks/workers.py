"""Simulates evaluations on many workers: how well they are used, and what keeps them from being used better.

    python -m docs.benchmarks.workers --workers 2 8 37 64 1000

Requests have the shapes of MMLU (5-shot, 57 subjects), HellaSwag (0-shot) and GSM8K-CoT (8-shot): as many, with stems,
questions and answers of the lengths that these have with SmolLM2's tokenizer, drawn from a seed. They are cut by the
package's own `cut` and handed out by its own `Feed`, to the first worker that is free. `--tokens-per-second` is a
worker's speed on texts that are scored, `--decoded` on those that are generated, `--open` the seconds to start one; the
defaults are about those of the shape of SmolLM2-135M on two cores. `--driver` is what a token of a request takes of the
driver, in microseconds: 0.2 of MMLU's and 0.7 of HellaSwag's to convert, cut and send them were measured, and encoding.

Efficiency is one worker's time without cuts and without opening, over the time that all workers were held. The losses
add up to the rest: stems that were cut are computed again; workers wait for the driver, which reads one chunk after the
other, or for the last chunk; all wait for opening. `at best` is what the efficiency would be if all chunks were there
from the beginning, and the largest were begun first: the rest is what the driver costs.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olive_ext.backends.lm_eval.instances import SLICE
from olive_ext.engine.requests import Generation, Request
from olive_ext.engine.scheduling.chunks import cut
from olive_ext.engine.scheduling.prefix_tree import make_plan
from olive_ext.session.executor import Lost
from olive_ext.session.workers.feed import Feed, Piece

SLOTS = 16
MADE = 100
"""Tokens of a generated answer; its bound is 256."""


@dataclass(frozen=True)
class Shape:
    """Requests of one task: `stems` few-shot prefixes of `stem` tokens, `documents` behind them with `own` tokens each,
    and `choices` of `choice` tokens each, which differ before their last token; or answers that are generated."""

    documents: int
    stems: int
    stem: int
    own: int
    choices: int = 1
    choice: int = 1
    is_generated: bool = False


SHAPES = {
    "MMLU 5-shot": Shape(14042, 57, 640, 93, 4),
    "HellaSwag 0-shot": Shape(10042, 1, 1, 55, 4, 28),
    "GSM8K-CoT 8-shot": Shape(1319, 1, 760, 60, is_generated=True),
}


def requests_of(shape: Shape, rng: np.random.Generator) -> Iterator[Request]:
    """In the order of the prefix tree, as slices are cut from sorted requests."""
    lengths = rng.integers(shape.stem // 2, shape.stem * 3 // 2 + 1, shape.stems)
    stems = [tuple(rng.integers(1, 49152, length).tolist()) for length in lengths.tolist()]
    for number, stem in enumerate(sorted(stems)):
        count = (number + 1) * shape.documents // shape.stems - number * shape.documents // shape.stems
        for _ in range(count):
            own = stem + tuple(rng.integers(1, 49152, int(rng.integers(shape.own // 2, shape.own * 3 // 2))).tolist())
            for _ in range(shape.choices):
                if shape.is_generated:
                    yield Request(own, 0, Generation(256))
                else:
                    yield Request((*own, *rng.integers(1, 49152, shape.choice).tolist()), shape.choice)


@dataclass(frozen=True)
class Speed:
    """Of one worker: tokens a second, scored and generated, and seconds to start. `driver`: seconds of the driver for
    each token of a request."""

    scored: float
    decoded: float
    opening: float
    driver: float

    def seconds(self, requests: Sequence[Request]) -> float:
        """Seconds of one chunk."""
        fed = make_plan(enumerate(requests)).tokens_distinct
        return fed / self.scored + sum(MADE for request in requests if request.generation) / self.decoded

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds of the driver for one chunk."""
        return self.driver * sum(len(request.tokens) for request in requests)


def last_end(chunks: Sequence[Sequence[Request]], costs: Sequence[float], num_workers: int, speed: Speed) -> float:
    """When the last chunk ends. Workers are open at 0; the driver begins to read then, and reads one chunk after the
    other while there is room."""
    now, idle = 0.0, num_workers
    feed = Feed(chunks, num_workers)
    running: list[tuple[float, int, Piece]] = []

    def begin(at: float) -> None:
        nonlocal idle
        found = feed.take()
        assert found is not None
        heapq.heappush(running, (at + costs[found[0].chunk], found[0].chunk, found[0]))
        idle -= 1

    def finish() -> float:
        nonlocal idle
        at, number, piece = heapq.heappop(running)
        feed.complete(piece, [Lost("")] * len(chunks[number]))
        idle += 1
        if feed.num_waiting:
            begin(at)
        return at

    num_read = 0
    while feed.has_work:
        if feed.read():
            now += speed.reading(chunks[num_read])
            num_read += 1
            while running and running[0][0] <= now:
                finish()
            if idle and feed.num_waiting:
                begin(now)
        elif running:
            now = max(now, finish())
    return now


def best_end(costs: Sequence[float], num_workers: int) -> float:
    """When the last chunk would end if all were there from the beginning."""
    ends = [0.0] * num_workers
    for cost in sorted(costs, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + cost)
    return max(ends)


def main() -> None:
    """Prints a line for each task and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 8, 37, 64, 1000])
    parser.add_argument("--tokens-per-second", type=float, default=500)
    parser.add_argument("--decoded", type=float, default=100)
    parser.add_argument("--open", type=float, default=6)
    parser.add_argument("--driver", type=float, default=1, help="microseconds")
    arguments = parser.parse_args()
    speed = Speed(arguments.tokens_per_second, arguments.decoded, arguments.open, arguments.driver / 1e6)
    sys.stdout.write("| task | chunks | workers | seconds | efficiency | stems | waiting | opening | at best |\n")
    sys.stdout.write("|---|--:|--:|--:|--:|--:|--:|--:|--:|\n")
    for name, shape in SHAPES.items():
        requests = list(requests_of(shape, np.random.default_rng(0)))
        size = len(requests) if shape.is_generated else SLICE
        slices = [requests[begin : begin + size] for begin in range(0, len(requests), size)]
        whole = sum(speed.seconds(part) for part in slices)
        chunks = [[part[place] for place in chunk] for part in slices for chunk in cut(part, SLOTS)]
        costs = [speed.seconds(chunk) for chunk in chunks]
        for count in arguments.workers:
            end = last_end(chunks, costs, count, speed)
            held = count * (end + speed.opening)
            best = whole / count / (best_end(costs, count) + speed.opening)
            shares = [whole, sum(costs) - whole, count * end - sum(costs), count * speed.opening]
            written = " | ".join(f"{share / held:.1%}" for share in shares)
            row = f"| {name} | {len(chunks)} | {count} | {end + speed.opening:.0f} | {written} | {best:.1%} |"
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
