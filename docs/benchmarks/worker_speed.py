"""What a second worker gains: two of one thread each, one of two threads, and one of one thread, by turns in one run.

    python -m docs.benchmarks.worker_speed MODEL --tasks quickstart_letters --include-path recipes/quickstart/tasks

Needs the extra `[ray]` and two idle cores. The workers are actors of one Ray on this machine, open all the time. All
get the same chunks, and write a journal, anew in each round. A round times the three, in an order that changes with it.
Processor seconds are those of this process, which is the driver, and of all that it has started, Ray's own included.
Raises where an answer differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import ray  # type: ignore[import-not-found,unused-ignore]

import olive_ext
from docs.benchmarks.isolation_cost import answer, parser_of, requests_of

SHAPES = {"2 workers of 1 thread": (2, 1), "1 worker of 2 threads": (1, 2), "1 worker of 1 thread": (1, 1)}
"""Workers, and the threads of each."""

STORE_BYTES = 128 << 20


def main() -> None:
    """Prints a line for each round, and the medians: seconds of each, and the first against the others."""
    given = parser_of(str(__doc__)).parse_args()
    requests = requests_of(given)
    ray.init("local", num_cpus=8, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False)
    sessions = {
        name: olive_ext.open(given.model, engine={"num_threads": threads}, workers=count, deterministic=True)
        for name, (count, threads) in SHAPES.items()
    }
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds + 1):  # the first is a warm-up
            first = number % len(SHAPES)
            order = [*SHAPES][first:] + [*SHAPES][:first]
            found = {name: answer(sessions[name], requests, Path(folder, name)) for name in order}
            expected = found[order[0]][0]
            if any(answers != expected for answers, *_ in found.values()):
                raise AssertionError("the answers differ with the number of workers or threads")
            rounds.append({name: (wall, cpu) for name, (_, wall, cpu) in found.items()})
            told = "; ".join(f"{name} {wall:.2f} s, processor {cpu:.2f} s" for name, (_, wall, cpu) in found.items())
            load = f"{len(expected)} requests, load {os.getloadavg()[0]:.1f}"
            print(f"{f'round {number}' if number else 'warm-up'}: {told}; {load}", flush=True)
    for session in sessions.values():
        session.close()
    ray.shutdown()
    sys.stdout.write(table(rounds[1:]))


def table(rounds: list[dict[str, tuple[float, float]]]) -> str:
    """Medians of the seconds of each shape, and of two workers' speed against it in the same round (least to most)."""
    lines = ["| | wall s | processor s | two workers are faster by |", "|---|--:|--:|--:|"]
    two = next(iter(SHAPES))
    for name in SHAPES:
        wall, cpu = (median(one[name][clock] for one in rounds) for clock in (0, 1))
        speed = [one[name][0] / one[two][0] for one in rounds]
        gain = "" if name == two else f"{median(speed):.2f} ({min(speed):.2f} to {max(speed):.2f})"
        lines.append(f"| {name} | {wall:.2f} | {cpu:.2f} | {gain} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
