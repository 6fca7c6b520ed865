"""The command `python -m lmms_eval --model olive_ext`, in a process of its own, on a task in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmms_eval")

from tests.exports.media import media_export
from tests.plugins.suites.lmms_eval.local_documents import WORDS, write

pytestmark = [pytest.mark.slow, pytest.mark.other_env]

TASK = """\
task: drawn
dataset_path: {documents}
test_split: validation
output_type: generate_until
doc_to_visual: !function drawn.visuals
doc_to_text: question
doc_to_target: answers
generation_kwargs: {{max_new_tokens: 4, temperature: 0, do_sample: false}}
process_results: !function drawn.length
metric_list:
  - {{metric: length, aggregation: mean, higher_is_better: true}}
"""
FUNCTIONS = """\
def visuals(document):
    return [document["image"]]

def length(document, results):
    return {"length": float(len(results[0]) > 0)}
"""


def test_the_command_finds_the_model_and_resumes_from_its_cache(tmp_path: Path) -> None:
    """By the entry point, with an answer to each of --limit documents; the second run asks for the two new ones."""
    documents, tasks = write(tmp_path / "documents", "docvqa_val", WORDS), tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "drawn.yaml").write_text(TASK.format(documents=documents))
    (tasks / "drawn.py").write_text(FUNCTIONS)
    command = [sys.executable, "-m", "lmms_eval", "--model", "olive_ext", "--include_path", str(tasks)]
    command += ["--model_args", f"pretrained={media_export('llava')[0]}", "--tasks", "drawn", "--batch_size", "auto"]
    command += ["--use_cache", "cache", "--log_samples"]
    found = []
    for limit, hits in ((3, "0 hits, 3 misses"), (5, "3 hits, 3 from shared DB, 2 misses")):
        asked = [*command, "--limit", str(limit), "--output_path", f"out{limit}"]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        assert hits in done.stdout + done.stderr
        (samples,) = (tmp_path / f"out{limit}").rglob("*_samples_drawn.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found.append([line["filtered_resps"] for line in sorted(lines, key=lambda line: int(line["doc_id"]))])
    assert [len(answers) for answers in found] == [3, 5]
    assert found[1][:3] == found[0]
    assert all(answer for answers in found[1] for answer in answers)
