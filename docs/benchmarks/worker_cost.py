"""What workers cost and gain: the same requests in this process, in a worker process, on workers of Ray, by turns.

    python -m docs.benchmarks worker_cost MODEL --tasks quickstart_letters --include-path recipes/quickstart/tasks
    python -m docs.benchmarks worker_cost MODEL --forms 2x1,1x2,1x1 --tasks ...     needs [ray] and two idle cores

A form is `none`, `process`, or WORKERSxTHREADS on one Ray of this machine; `--num-threads` are those of the others. All
sessions are open all the time, answer in the same chunks, and write a journal, anew in each round. Processor seconds
are those of this process and of all that it has started, so other work on the machine counts in the wall clock only.
Raises where an answer differs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import parser_of, spread, table, timed, turns, write

import olive_ext
from docs.benchmarks.speed.peers import instances, record
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import EvaluationSettings
from olive_ext.session import Session


def opened(given: argparse.Namespace, form: str) -> Session:
    """The session of a form; what opening took is printed."""
    count, _, threads = form.partition("x")
    options: dict[str, Any] = {"workers": int(count)} if threads else {"isolation": form}
    engine = {"num_threads": int(threads or given.num_threads)}
    session, wall, processor = timed(lambda: olive_ext.open(given.model, engine=engine, deterministic=True, **options))
    print(f"opening, {form}: {wall:.1f} s, processor {processor:.1f} s", flush=True)
    return session


def answers(session: Session, requests: dict[str, list[Any]], journal: Path) -> list[object]:
    """The answers of lm-eval's requests, kept in a journal that begins anew."""
    session.keep_answers(journal, resume=False)
    lm = OrtLM(session=session)
    results = [answer for kind, own in requests.items() for answer in getattr(lm, kind)(own, disable_tqdm=True)]
    session.keep_answers(None)
    return results


def main() -> None:
    """Prints a line for each round, and the medians: seconds of each form, and the first form's against them."""
    parser = parser_of(__doc__, "model", rounds=5)
    parser.add_argument("--forms", metavar="A,B", default="process,none")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include-path")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--num-threads", type=int, default=1)
    given = parser.parse_args()
    forms = given.forms.split(",")
    if any("x" in form for form in forms):
        import ray  # type: ignore[import-not-found,unused-ignore]

        ray.init("local", num_cpus=8, object_store_memory=128 << 20, include_dashboard=False, log_to_driver=False)
    asked = EvaluationSettings(tasks=given.tasks, include_path=given.include_path, limit=given.limit)
    recorded = record(asked)
    kinds = dict.fromkeys(one.kind for one in recorded)
    requests = {kind: instances([one for one in recorded if one.kind == kind]) for kind in kinds}
    sessions = {form: opened(given, form) for form in forms}
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, order in turns(forms, given.rounds):
            runs = {
                form: timed(lambda form=form: answers(sessions[form], requests, Path(folder, form))) for form in order
            }
            if any(run[0] != runs[order[0]][0] for run in runs.values()):
                raise AssertionError("the answers differ with the form")
            rounds.append({form: (wall, processor) for form, (_, wall, processor) in runs.items()})
            line = "; ".join(f"{form} {wall:.2f} s, processor {cpu:.2f} s" for form, (_, wall, cpu) in runs.items())
            print(f"round {number}: {line}; {len(recorded)} requests, load {os.getloadavg()[0]:.1f}", flush=True)
    for session in sessions.values():
        session.close()
    first, rows = forms[0], []
    for form in forms:
        seconds = [f"{median(one[form][clock] for one in rounds[1:]):.2f}" for clock in (0, 1)]
        ratios = [spread([one[first][clock] / one[form][clock] for one in rounds[1:]], 3) for clock in (0, 1)]
        rows.append((form, *seconds, *(ratios if form != first else ("", ""))))
    print(table(("form", "wall s", "processor s", f"{first} / it, wall", f"{first} / it, processor"), rows))
    write(given.output, given, rounds=rounds)


if __name__ == "__main__":
    main()
