"""Measures our backend and the others on real tasks and writes one table.

    python docs/benchmarks/make_models.py MODELS --shape smollm2-135m
    python docs/benchmarks/run.py MODELS --output DIR

MODELS holds hf, fp32 and int4. Tasks are lm-eval's own, which need the network once; --include-path DIR --prefix P
takes tasks from a folder instead, P being the prefix of each name there. --documents caps every row, to try
things out.
Hours at full size on two cores; --rows runs some, and rows that are done already are kept.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from harness import bench, bench_table


@dataclass(frozen=True)
class BenchRow:
    """One comparison: a task, the model's form, how many documents of each (sub)task, and the goals for the ratios."""

    task: str
    model: str
    documents: int
    goals: dict[str, float]
    options: tuple[object, ...] = ()
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    once: tuple[str, ...] = ()


GREEDY = ("--gen-kwargs", "max_gen_toks=128,do_sample=false")
ROWS = {
    # 57 subjects, four documents of each.
    "mmlu-fp32": BenchRow(
        "mmlu", "fp32", 4, {"hf": 8, "onnxruntime": 25, "olive-ort": 6}, ("--num-fewshot", 5), once=("onnxruntime",)
    ),
    "mmlu-int4": BenchRow(
        "mmlu", "int4", 4, {"onnxruntime": 20, "olive-ort": 5}, ("--num-fewshot", 5), once=("onnxruntime",)
    ),
    "arc": BenchRow(
        "arc_challenge", "fp32", 200, {"hf": 4, "onnxruntime": 4}, ("--num-fewshot", 25), once=("onnxruntime",)
    ),
    "hellaswag": BenchRow(
        "hellaswag",
        "fp32",
        200,
        {"hf": 4, "onnxruntime": 3, "olive-ort": 3, "olive-ortgenai": 12},
        ("--num-fewshot", 0),
        once=("olive-ortgenai",),
    ),
    # 62 documents are all there are.
    "wikitext": BenchRow(
        "wikitext", "fp32", 62, {"hf": 1.15, "onnxruntime": 1.3}, ("--max-length", 2048), batch_sizes=(1, 2, 4)
    ),
    "gsm8k": BenchRow(
        "gsm8k",
        "fp32",
        200,
        {"onnxruntime-genai": 3, "hf": 1.5},
        ("--num-fewshot", 5, *GREEDY),
        once=("onnxruntime-genai",),
    ),
    "gsm8k-cot": BenchRow(
        "gsm8k_cot",
        "fp32",
        200,
        {"onnxruntime-genai": 5, "hf": 3},
        ("--num-fewshot", 8, *GREEDY),
        once=("onnxruntime-genai",),
    ),
}


def options(row: BenchRow, given: argparse.Namespace) -> list[object]:
    """The options of `bench` for one row."""
    documents = row.documents if given.documents is None else min(row.documents, given.documents)
    made: list[object] = ["--tasks", given.prefix + row.task, "--limit", documents, *row.options]
    made += ["--rounds", given.rounds, "--peers", ",".join(row.goals)]
    made += ["--batch-sizes", ",".join(map(str, row.batch_sizes))]
    made += ["--probe", given.probe] if given.probe else []
    made += ["--once", ",".join(row.once)] if row.once else []
    made += ["--include-path", given.include_path] if given.include_path else []
    made += ["--hf", given.models / "hf"] if "hf" in row.goals or "olive-ort" in row.goals else []
    made += ["--num-threads", given.num_threads] if given.num_threads else []
    return made


def main() -> None:
    """Runs the rows and writes DIR/table.md after each."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("models", metavar="MODELS", type=Path)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True)
    parser.add_argument("--rows", metavar="A,B", default=",".join(ROWS))
    parser.add_argument("--include-path", metavar="DIR")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--documents", metavar="N", type=int)
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--probe", metavar="N", type=int, default=16, help="documents to try batch sizes on; 0: all")
    parser.add_argument("--num-threads", metavar="N", type=int)
    given = parser.parse_args()
    results = {}
    for name in given.rows.split(","):
        row, folder = ROWS[name], given.output / name
        done = folder / "bench.json"
        is_done = done.exists() and json.loads(done.read_text(encoding="utf-8")).get("finished")
        results[name] = (
            json.loads(done.read_text(encoding="utf-8"))
            if is_done
            else bench(given.models / row.model, folder, options(row, given))
        )
        text = bench_table(results, {name: row.goals for name, row in ROWS.items()})
        (given.output / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
