"""The first quarter of an hour on a GPU: one command for a bare machine, no network.

    python docs/benchmarks/gpu.py OUT --models DIR

Seven parts, the most telling first, each in a process of its own, because an error of CUDA poisons its process. OUT has
a JSON file for each part as soon as it ends, also where it failed or ran out of its time, and parts.md with a line for
each.

DIR has packages: `llama-3.2-1b/fp16` and `/int4`, `gemma-4-e2b/fp16` with `hf/` beside it (make_models.py).
Weights of a package that came without them (`hollow.py`) are made on the machine. A part whose package is missing says
so. `--device cpu` tries everything out; the CUDA stub does, with numbers that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT


@dataclass(frozen=True)
class Part:
    """A function of `gpu_parts` or `gpu_engine_parts`, the seconds that it may take, and its environment."""

    function: str
    seconds: int
    environment: Mapping[str, str] = field(default_factory=dict)


CUDNN = "ORT_ENABLE_CUDNN_FLASH_ATTENTION"
PARTS = {
    "1-load": Part("load", 30),
    "2-attention": Part("attention", 45, {CUDNN: "0"}),
    "3-new-lengths": Part("new_lengths", 25, {CUDNN: "0"}),
    "3-new-lengths-with-cudnn": Part("new_lengths", 25, {CUDNN: "1"}),
    "6-llama": Part("llama", 110),
    "6-llama-rows": Part("llama_rows", 60),
    "6-llama-rows-with-cudnn": Part("llama_rows", 60, {CUDNN: "1"}),
    "7-gemma": Part("gemma", 130),
    "8-int4": Part("int4", 60),
    "9-decode": Part("decode", 120),
    "9-decode-with-cudnn": Part("decode", 120, {CUDNN: "1"}),
    "9-decode-with-xqa": Part("decode", 120, {"ORT_ENABLE_XQA": "1"}),
}
"""Fifteen minutes together. An engine runs without cuDNN's attention unless the variable says otherwise."""


def run_part(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The results of the part, or `error`; `seconds` in any case."""
    part, file = PARTS[name], given.out / f"{name}.json"
    script = Path(__file__).with_name("gpu_parts.py")
    command = [sys.executable, str(script), part.function, str(file), str(given.models), given.device]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **part.environment, "PYTHONPATH": path}
    file.unlink(missing_ok=True)
    begin = time.perf_counter()
    try:
        limit = part.seconds * given.patience
        done = subprocess.run(
            command, env=environment, timeout=limit, capture_output=True, text=True, errors="replace", check=False
        )
        results = json.loads(file.read_text()) if file.exists() else {}
        if done.returncode:
            results["error"] = f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    except subprocess.TimeoutExpired:
        results = json.loads(file.read_text()) if file.exists() else {}
        results["error"] = f"stopped after {limit:g} s"
    results["seconds"] = round(time.perf_counter() - begin, 1)
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


def line(name: str, results: Mapping[str, Any]) -> str:
    """A row of parts.md."""
    facts = {key: value for key, value in results.items() if key != "seconds" and not isinstance(value, list)}
    return f"| {name} | {results['seconds']} | {json.dumps(facts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--models", metavar="DIR", type=Path, default=Path("models"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", metavar="A,B", default=",".join(PARTS))
    parser.add_argument("--patience", metavar="FACTOR", type=float, default=1.0, help="of every part's time")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = ["| part | seconds | found |", "|---|--:|---|"]
    for name in given.parts.split(","):
        lines.append(line(name, run_part(name, given)))
        print(lines[-1], flush=True)
        (given.out / "parts.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
