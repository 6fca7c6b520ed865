"""Evalution's suites on `OrtEngine` and on its own transformers engine: the same rows, the same fp32 weights, by turns.

    pip install -c constraints.txt '.[cpu,evalution]'
    python docs/benchmarks/make_models.py MODELS --shape smollm2-135m --precision fp32
    python docs/benchmarks/evalution_engines.py MODELS --output out/evalution.json

MODELS holds hf and fp32. Each engine opens its model in a process of its own, runs the suites on two rows to warm up,
and is then timed over each suite, by the clock and by the processor. Its transformers engine runs at each batch size of
--batch-sizes, and the fastest counts, suite by suite. Ends with 1 where metrics or predictions differ.
The suites' data need the network once; --data DIR takes them from DIR/NAME-SPLIT.jsonl (mmlu-test, mmlu-dev,
hellaswag-validation, gsm8k-test, gsm8k-train).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

from harness import measured, parser_of, timed, write
from harness import table as markdown

NUM_NEW_TOKENS = 64


def suites(rows: int, given: argparse.Namespace) -> list[Any]:
    """Those of `given.suites`: scores in a stream, scores in lists, generations after eight examples."""
    from evalution.benchmarks.gsm8k import GSM8K
    from evalution.benchmarks.hellaswag import HellaSwag
    from evalution.benchmarks.mmlu import MMLU

    own: dict[str, tuple[Any, dict[str, Any]]] = {
        "mmlu": (MMLU, {"num_fewshot": 5}),
        "hellaswag": (HellaSwag, {}),
        "gsm8k": (GSM8K, {"variant": "cot", "max_new_tokens": NUM_NEW_TOKENS}),
    }
    chosen = ((name, *own[name]) for name in given.suites.split(","))
    return [_local(suite, name, given.data)(max_rows=rows, stream=False, **options) for name, suite, options in chosen]


def _local(suite: Any, name: str, data: str | None) -> Any:
    """The suite with its rows from files of `data`, in the place of `datasets.load_dataset`."""
    if data is None:
        return suite
    from datasets import Dataset

    def load(*_: object, split: str, **__: object) -> Any:
        lines = (Path(data) / f"{name}-{split}.jsonl").read_text(encoding="utf-8").splitlines()
        return Dataset.from_list([json.loads(line) for line in lines])

    def dataset_loader(_: object) -> Callable[..., Any]:
        return load

    return type(f"Local{suite.__name__}", (suite,), {"dataset_loader": dataset_loader, "__slots__": ()})


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the suites in this process: seconds by clock and processor, metrics and predictions of each."""
    from evalution import Model
    from evalution.engines import TransformersCompat

    from olive_ext.plugins.suites.evalution import OrtEngine

    threads = {"num_threads": given.num_threads} if given.num_threads else {}
    if given.engine == "ours":
        session = OrtEngine(engine=threads).build(Model(path=str(given.models / "fp32")))
    else:
        import torch

        torch.set_num_threads(given.num_threads or torch.get_num_threads())
        engine = TransformersCompat(dtype="float32", device="cpu", batch_size=given.batch_size)
        session = engine.build(Model(path=str(given.models / "hf")))
    for suite in suites(2, given):
        suite.evaluate(session)
    session.gc()
    results = []
    for suite in suites(given.rows, given):
        result, seconds, processor = timed(lambda suite=suite: suite.evaluate(session))
        session.gc()
        answers = [sample.prediction for sample in result.samples]
        results.append({"suite": result.name, "seconds": seconds, "processor": processor,
                      "metrics": dict(result.metrics), "answers": answers})  # fmt: skip
    session.close()
    return results


def run(given: argparse.Namespace, engine: str, batch_size: int) -> list[dict[str, Any]]:
    """One engine in a process of its own."""
    words = [given.models, "--engine", engine, "--batch-size", batch_size, "--rows", given.rows]
    words += ["--suites", given.suites, *(["--data", given.data] if given.data else [])]
    words += ["--num-threads", given.num_threads] if given.num_threads else []
    return list(measured(__file__, words))


def compare(ours: list[list[dict[str, Any]]], theirs: dict[int, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """For each suite: seconds of both, ratios within a round at the fastest batch size, whether the answers agree."""
    results = []
    for index, mine in enumerate(ours[0]):
        best = min(theirs, key=lambda size: median(run[index]["processor"] for run in theirs[size]))
        pairs = [(own[index], other[index]) for own, other in zip(ours, theirs[best], strict=True)]
        agree = all(own["metrics"] == other["metrics"] and own["answers"] == other["answers"] for own, other in pairs)
        row = {"suite": mine["suite"], "batch_size": best, "agree": agree}
        for what in ("seconds", "processor"):
            row |= {f"ours_{what}": median(own[what] for own, _ in pairs)}
            row |= {f"theirs_{what}": median(other[what] for _, other in pairs)}
            row |= {f"ratio_{what}": median(other[what] / own[what] for own, other in pairs)}
        results.append(row)
    return results


def table(rows: list[dict[str, Any]], count: int) -> str:
    """A line for each suite: processor time, and the ratios of processor time and of the clock."""
    heads = ("suite", "rows", "its batch size", "ours, s", "its, s", "ratio", "by the clock", "answers")
    keys = ("ours_processor", "theirs_processor", "ratio_processor", "ratio_seconds")
    ends = {True: "equal", False: "DIFFER"}
    lines = [
        (row["suite"], count, row["batch_size"], *(f"{row[key]:.1f}" for key in keys), ends[row["agree"]])
        for row in rows
    ]
    return markdown(heads, lines)


def main() -> int:
    parser = parser_of(__doc__, "models", rounds=1)
    parser.add_argument("--data", metavar="DIR")
    parser.add_argument("--suites", metavar="A,B", default="mmlu,hellaswag,gsm8k")
    parser.add_argument("--rows", metavar="N", type=int, default=24)
    parser.add_argument("--batch-sizes", metavar="A,B", default="1,4,8")
    parser.add_argument("--num-threads", metavar="N", type=int)
    parser.add_argument("--engine", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        with redirect_stdout(sys.stderr):  # Evalution's bars
            results = measure(given)
        print(json.dumps(results))
        return 0
    ours: list[list[dict[str, Any]]] = []
    theirs: dict[int, list[list[dict[str, Any]]]] = {}
    for _ in range(given.rounds):
        ours.append(run(given, "ours", 1))
        for size in map(int, given.batch_sizes.split(",")):
            theirs.setdefault(size, []).append(run(given, "theirs", size))
    rows = compare(ours, theirs)
    write(given.output, given, table=rows, ours=ours, theirs=theirs)
    print(table(rows, given.rows))
    return 0 if all(row["agree"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
