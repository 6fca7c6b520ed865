"""Sample logs are lm-eval's own lines, and what we add stands under one key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

from olive_ext.errors import RunError
from olive_ext.run.sample_logs import write_samples
from tests.refusals import refused

TASK = "group/colours"


def sample(number: int, filter_name: str = "none") -> dict[str, Any]:
    """As lm-eval hands it over."""
    return {
        "doc_id": number,
        "doc": {"question": "Which?\u2028", "half": "\ud83d"},
        "target": 1,
        "arguments": [("Which?", " red"), ("Which?", " green")],
        "resps": [[(-1.5, False)], [(-0.25, True)]],
        "filtered_resps": [(-1.5, False), (-0.25, True)],
        "filter": filter_name,
        "metrics": ["acc"],
        "doc_hash": "d",
        "prompt_hash": "p",
        "target_hash": "t",
        "acc": 1.0,
    }


SAMPLES = {TASK: [sample(number, name) for name in ("strict", "loose") for number in range(3)]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n") if text]


def test_lines_are_those_that_lm_eval_writes(tmp_path: Path) -> None:
    plain = {TASK: [{**item, "doc": {"question": "Which?\u2028"}} for item in SAMPLES[TASK]]}
    (ours,) = write_samples(plain, 3, tmp_path)
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    tracker.general_config_tracker.model_name_sanitized = "m"
    tracker.date_id = "now"
    tracker.save_results_samples("colours", copy.deepcopy(plain[TASK]))
    assert lines(ours) == lines(tmp_path / "theirs" / "m" / "samples_colours_now.jsonl")


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(RunError, "no_access", holds="file"):
        write_samples(SAMPLES, 1, tmp_path / "file" / "below")
