"""How much memory this process takes while a model is evaluated with many tasks at once.

    python -m docs.benchmarks.subject_memory MODEL --include-path TASKS --tasks mmlu --num-fewshot 0

Prints the resident size as the first answer of each task comes, and behind the report.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import psutil

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.config import EvaluationConfig
from olive_ext.run import evaluate


def say(what: str) -> None:
    """Prints what has happened, and the resident size."""
    sys.stdout.write(f"{what}: {psutil.Process().memory_info().rss / 2**20:.0f} MiB\n")
    sys.stdout.flush()


def main() -> None:
    """Prints a line for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--include-path", required=True)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int)
    given = vars(parser.parse_args())
    model, seen = given.pop("model"), set[str]()

    def observe(instance: Any, request: Any, output: Any) -> None:
        if instance.task_name not in seen:
            seen.add(instance.task_name)
            say(f"{len(seen)} {instance.task_name}")

    config = EvaluationConfig.parse({"model": {"path": model}, "bootstrap_iters": 0, **given})
    with OrtLM(model, observer=observe, engine={"num_threads": 1}) as lm:
        say("model opened")
        evaluate(config, lm=lm)
    say("reported")


if __name__ == "__main__":
    main()
