"""Evaluates a quantized form of the quickstart's model against its float export on all documents of a task, and on
enough; wall clock beside what was decided.

    python docs/benchmarks/enough_run.py [--documents 1000] [--form 8,32] [--certain within=0.01]

The documents are those of `record_margins.py`, written as a task of lm-eval's; both runs are whole evaluations with
their reports. The reference is not counted: all candidates share what it said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT
from record_margins import questions

TASK = """task: enough_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: endings
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def write_task(folder: Path, count: int) -> None:
    """The task `enough_choice` of `count` documents in `folder`."""
    rows = [{"context": context, "endings": endings, "answer": answer} for context, endings, answer in questions(count)]
    (folder / "documents.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "enough_choice.yaml").write_text(TASK.format(file=folder / "documents.jsonl"))


def evaluated(folder: Path, candidate: Path, reference: Path, **settings: Any) -> tuple[float, Any]:
    from olive_ext.config import EvaluationConfig
    from olive_ext.run import evaluate

    how = {"path": str(reference), "mode": "recorded", "records_dir": str(folder / "records")}
    values = {"model": {"path": str(candidate)}, "reference": how, "tasks": ["enough_choice"]}
    config = EvaluationConfig.parse({**values, "include_path": str(folder), **settings})
    begin = time.monotonic()
    report = evaluate(config)
    return time.monotonic() - begin, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--form", default="8,32", help="bits and block size")
    parser.add_argument("--certain", type=float, default=0.01)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from olive_ext.report import print_table
    from tests.exports import quickstart

    bits, block = map(int, args.form.split(","))
    reference, candidate = quickstart.exported(), quickstart.quantized(bits, block)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, args.documents)
        for what in ("reference and all", "all", "enough"):
            settings = {"documents": "enough", "certain": {"within": args.certain}} if what == "enough" else {}
            seconds, report = evaluated(folder, candidate, reference, **settings)
            print(f"{what}: {seconds:.1f} s, of these {report.engine['seconds']:.1f} s on the candidate", flush=True)
            print_table(report)


if __name__ == "__main__":
    main()
