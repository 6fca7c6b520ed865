"""Sample logs are lm-eval's own lines, and what we add stands under one key."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.loggers import EvaluationTracker

from olive_ext.errors import RunError
from olive_ext.run.reference.answers import packed, question_of, read_answers, target_of, unpacked
from olive_ext.run.sample_logs import OWN, log_path, read_logs, sample_fields, write_samples
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


def test_first_documents_of_every_filter_with_own_fields_under_one_key(tmp_path: Path) -> None:
    """And what UTF-8 cannot hold."""

    def fields(task: str, item: Mapping[str, Any]) -> dict[str, Any]:
        assert task == TASK
        return {"kl_mean": 0.5} if item["doc_id"] else {}

    (path,) = write_samples(SAMPLES, 2, tmp_path, fields)
    assert path == log_path(tmp_path, TASK)
    assert path.name == "samples_group_colours.jsonl"
    written = lines(path)
    assert [(line["doc_id"], line["filter"], line.get(OWN)) for line in written] == [
        (number, name, {"kl_mean": 0.5} if number else None) for name in ("strict", "loose") for number in (0, 1)
    ]
    assert set(written[1]) - {OWN} == set(sample(0))
    assert written[0]["doc"]["half"] == "\ud83d"


def test_texts_of_a_log_are_read_back(tmp_path: Path) -> None:
    task = SimpleNamespace(
        aggregation=lambda: {"acc": mean},
        higher_is_better=dict,
        doc_to_text=lambda doc: doc["question"],
        doc_to_choice=lambda doc: ["red", "green"],
    )
    answers = read_answers(SAMPLES, {TASK: task})
    write_samples(SAMPLES, 1, tmp_path, sample_fields({TASK: task}, answers))
    kept = unpacked(packed(answers))
    assert {item.text for each in kept for item in each.by_document.values()} == {""}
    logged, samples = read_logs(tmp_path, kept)
    assert [[item.text for item in each.by_document.values()] for each in logged] == [["green", "", ""]] * 2
    (first, _) = samples[TASK]
    assert (question_of(None, first), target_of(None, first)) == ("Which?", "green")


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(RunError, "no_access", holds="file"):
        write_samples(SAMPLES, 1, tmp_path / "file" / "below")
