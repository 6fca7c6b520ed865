"""What a worker process costs: the same requests with the model in this process and in one of its own, by turns.

    python -m docs.benchmarks.isolation_cost MODEL --tasks quickstart_letters --include-path recipes/quickstart/tasks

Both sessions are open all the time, answer in the same chunks, and write a journal, anew in each round. A round times
both, in an order that changes with it. Processor seconds are those of this process and of the worker together, so other
work on the machine counts in the wall clock only. Raises where an answer differs. What opening costs is its own line.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from lm_eval.api.instance import Instance

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.request_recorder import RecordedRequest, record
from olive_ext.session import Session

HOW = ("none", "process")


def instances(requests: Sequence[RecordedRequest]) -> dict[str, list[Instance]]:
    """lm-eval's requests by kind."""
    made: dict[str, list[Instance]] = {}
    for one in requests:
        asked = Instance(one.kind, {}, one.args, 0, (one.task, one.document, 1))
        made.setdefault(one.kind, []).append(asked)
    return made


def clocks() -> tuple[float, float]:
    """Seconds of the wall, and of the processor in this process and all that it has started."""
    own, seconds = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # one of Ray's own that has just ended
            seconds += sum(process.cpu_times()[:2])
    return time.perf_counter(), seconds


def answer(session: Session, requests: dict[str, list[Instance]], journal: Path) -> tuple[list[object], float, float]:
    """The answers, and what they took by both clocks."""
    session.keep_answers(journal, resume=False)
    lm = OrtLM(session=session)
    wall, cpu = clocks()
    found = [answer for kind, asked in requests.items() for answer in getattr(lm, kind)(asked, disable_tqdm=True)]
    after_wall, after_cpu = clocks()
    session.keep_answers(None)
    return found, after_wall - wall, after_cpu - cpu


def parser_of(description: str) -> argparse.ArgumentParser:
    """What is measured: a model, the requests of tasks, rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include-path")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def requests_of(given: argparse.Namespace) -> dict[str, list[Instance]]:
    """lm-eval's requests of the tasks, by kind."""
    tasks, folder = given.tasks, given.include_path
    return instances(record(tasks, folder, limit=given.limit, num_fewshot=None, gen_kwargs={}, seed=None))


def main() -> None:
    """Prints a line for each round, and the medians of the ratios."""
    parser = parser_of(str(__doc__))
    parser.add_argument("--num-threads", type=int, default=1)
    given = parser.parse_args()
    requests = requests_of(given)
    num_requests = sum(map(len, requests.values()))
    sessions: dict[str, Session] = {}
    for how in HOW:
        wall, cpu = clocks()
        engine = {"num_threads": given.num_threads}
        sessions[how] = olive_ext.open(given.model, engine=engine, isolation=how, deterministic=True)
        after_wall, after_cpu = clocks()
        sys.stdout.write(f"opening, {how}: {after_wall - wall:.1f} s, processor {after_cpu - cpu:.1f} s\n")
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds + 1):  # the first is a warm-up
            order = HOW if number % 2 else HOW[::-1]
            found = {how: answer(sessions[how], requests, Path(folder, how)) for how in order}
            (plain, *before), (isolated, *after) = found["none"], found["process"]
            if plain != isolated:
                raise AssertionError("the worker's answers differ from those of this process")
            (wall, cpu), (more_wall, more_cpu) = before, after
            sys.stdout.write(
                f"{'warm-up' if number == 0 else f'round {number}'}: {num_requests} requests; none {wall:.2f} s, "
                f"processor {cpu:.2f} s; process {more_wall:.2f} s, processor {more_cpu:.2f} s; "
                f"load {os.getloadavg()[0]:.1f}\n"
            )
            sys.stdout.flush()
            if number:
                ratios.append((more_wall / wall, more_cpu / cpu))
    for session in sessions.values():
        session.close()
    for name, values in zip(("wall", "processor"), zip(*ratios, strict=True), strict=True):
        low, high = min(values), max(values)
        sys.stdout.write(f"process / none, {name}: {median(values):.3f} ({low:.3f} to {high:.3f})\n")


if __name__ == "__main__":
    main()
