"""How much memory this process takes while a model is evaluated with many tasks, task by task.

    python -m docs.benchmarks.subject_memory MODEL --include-path TASKS --tasks mmlu

Prints the resident size as the first answer of each task comes, and behind the report. `--separately` makes an
evaluation of each task instead, one after the other in this process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from olive_ext.backends.task_loading import load_tasks
from olive_ext.config import EvaluationConfig
from olive_ext.run import evaluate
from olive_ext.run import evaluation
from olive_ext.run.models import Models


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def say(what: str) -> None:
    memory = psutil.Process().memory_full_info()
    sys.stdout.write(f"{what}: {resident_mib():.0f} MiB resident, {memory.uss / 2**20:.0f} MiB of its own\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--include-path", required=True)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--output")
    parser.add_argument("--separately", action="store_true")
    arguments = parser.parse_args()
    names = list(load_tasks(arguments.tasks, arguments.include_path).tasks)
    say(f"{len(names)} tasks loaded")
    given: dict[str, Any] = {
        "model": {"path": arguments.model},
        "include_path": arguments.include_path,
        "num_fewshot": arguments.num_fewshot,
        "limit": arguments.limit,
        "isolation": "none",
        "bootstrap_iters": 0,
        "output_dir": arguments.output,
        "engine": {"num_threads": 1},
    }
    if arguments.separately:
        for number, name in enumerate(names, 1):
            evaluate(EvaluationConfig.parse({**given, "tasks": [name]}))
            say(f"{number} {name}")
        return

    seen: set[str] = set()

    candidate = Models.candidate
    def open_candidate(self: Models, observer: Any = None) -> Any:
        lm = candidate(self, observer)
        own = lm.observer
        say("model opened")

        def observe(instance: Any, request: Any, output: Any) -> None:
            if instance.task_name not in seen:
                seen.add(instance.task_name)
                say(f"{len(seen)} {instance.task_name}")
            own(instance, request, output)

        lm.observer = observe
        return lm

    Models.candidate = open_candidate
    report = evaluate(EvaluationConfig.parse({**given, "tasks": arguments.tasks}))
    say("reported")
    gc.collect()
    say(f"collected; {len(report.metrics)} metrics")


if __name__ == "__main__":
    main()
