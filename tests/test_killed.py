"""An evaluation that is killed at any moment and run again finds the same bytes, and asks nothing twice but the chunk
that was in flight."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exports import TEXT, genai_export

WORDS = TEXT.split()
LOADER = f"""
import datasets

WORDS = {WORDS[:700]!r}


def load(**_):
    rows = [
        {{"question": " ".join(WORDS[n * 7 : n * 7 + 30]), "choices": WORDS[n * 7 + 30 : n * 7 + 34], "answer": n % 4}}
        for n in range(80)
    ]
    return {{"test": datasets.Dataset.from_list(rows)}}
"""
HEAD = 'custom_dataset: !function local.load\ntest_split: test\ndoc_to_text: "{{question}}"\nmetadata:\n  version: 1\n'
CHOICE = f"""task: kill_choice
{HEAD}output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
"""
GENERATE = f"""task: kill_generate
{HEAD}output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
MAIN = "import sys; from olive_ext.cli import main; sys.exit(main())"


def answers(folder: Path) -> Iterator[str]:
    """Every answer in every journal below `folder`, by file and key."""
    for file in folder.rglob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            checksum, _, body = line.partition(" ")
            if len(checksum) == 8 and body.endswith("}"):
                yield from (f"{file.relative_to(folder)} {key}" for key in json.loads(body).get("answers", ()))


def found(folder: Path) -> Any:
    report = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    comparison = {**(report["comparison"] or {}), "reference": None, "metrics": None}  # how it ran, and when
    return report["metrics"], comparison


@pytest.mark.long
@pytest.mark.parametrize("mode", ["", "resident", "recorded"])
def test_killed_evaluation_that_is_run_again_finds_the_same_bytes(mode: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, content in (("local.py", LOADER), ("choice.yaml", CHOICE), ("generate.yaml", GENERATE)):
        (tasks / name).write_text(content, encoding="utf-8")
    command = [sys.executable, "-c", MAIN, "evaluate", str(genai_export("llama")), "--include-path", str(tasks)]
    command += ["--tasks", "kill_choice,kill_generate", "--output", "out", "--set", "engine.num_threads=1"]
    command += ["--set", "bootstrap_iters=0", "--set", "isolation=none", "--set", "engine.num_slots=4"]
    if mode:
        command += ["--reference", str(genai_export("llama", precision="int4")), "--reference-mode", mode]
        command += ["--set", "reference.records_dir=records"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    root = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    statuses = [subprocess.run(command, cwd=whole, env=root, capture_output=True).returncode]
    asked = Counter(answers(whole))
    for _ in range(2):
        done = len(set(answers(killed)))
        process = subprocess.Popen(command, cwd=killed, env=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(set(answers(killed))) <= done:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        process.wait()
    kept = len(set(answers(killed)))
    statuses.append(subprocess.run(command, cwd=killed, env=root, capture_output=True).returncode)
    assert statuses[0] == statuses[1] in (0, 1, 3)
    assert 0 < kept <= len(asked)
    assert found(killed) == found(whole)
    assert Counter(answers(killed)) == asked, "an answer was computed twice, or is missing"
