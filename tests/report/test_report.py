"""Reports survive the way through JSON, and are written as a whole or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from olive_ext.errors import RunError
from olive_ext.report import Metric, Report, from_json, to_json
from olive_ext.report import write as write_report
from olive_ext.report.plain_text import to_eval_results, to_markdown
from olive_ext.report.report import has_several_filters
from tests.refusals import refused

ACC = Metric("arc", "acc", "none", 0.25, 0.0125, True, 400)
STRICT = Metric("gsm8k", "exact_match", "strict-match", 0.5)
FLEXIBLE = Metric("gsm8k", "exact_match", "flexible-extract", 0.75)
REPORT = Report(
    metrics=(ACC, STRICT, FLEXIBLE),
    results={"results": {"arc": {"acc,none": 0.25}}},
    model={"path": "models/a|b", "kv": ["float16", 2]},
    providers=({"name": "CPUExecutionProvider", "device": "cpu", "options": {"threads": "2"}, "origin": "default"},),
    versions={"onnxruntime": "1.31.1"},
    engine={"tokens_fed": 10, "tokens_naive": 40, "seconds": 1.25},
    config={"tasks": ["arc", "gsm8k"]},
    created="2026-11-21T12:00:00+00:00",
)


def strict_loads(text: str) -> object:
    def refuse(name: str) -> object:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_nan_and_infinity_leave_strict_json_and_come_back() -> None:
    metrics = tuple(Metric("t", "m", "none", value) for value in (math.nan, math.inf, -math.inf))
    text = to_json(Report(metrics=metrics, results={"x": math.nan, "y": [math.inf]}))
    strict_loads(text)
    nan, positive, negative = (metric.value for metric in from_json(text).metrics)
    assert math.isnan(nan)
    assert (positive, negative) == (math.inf, -math.inf)


def test_foreign_values_become_plain_json() -> None:
    class Color(str, Enum):
        RED = "red"

    results = {
        "scalar": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "array": np.arange(3),
        "path": Path("a") / "b",
        "enum": Color.RED,
        "set": {"b", "a"},
        "function": strict_loads,
        7: None,
    }
    assert json.loads(to_json(Report(metrics=(), results=results)))["results"] == {
        "scalar": 0.5,
        "count": 3,
        "flag": True,
        "array": [0, 1, 2],
        "path": str(Path("a") / "b"),
        "enum": "red",
        "set": ["a", "b"],
        "function": "tests.report.test_report.strict_loads",
        "7": None,
    }


def test_task_has_several_filters_where_a_metric_comes_once_for_each() -> None:
    assert not has_several_filters(REPORT, "arc")
    assert has_several_filters(REPORT, "gsm8k")


def test_three_files_are_written_whole_and_nothing_else(tmp_path: Path) -> None:
    """A report that fails leaves those of the earlier one."""

    class Unreadable:
        def tolist(self) -> object:
            raise MemoryError

    folder = tmp_path / "new" / "folder"
    json_path, markdown_path, _ = write_report(REPORT, folder)
    with pytest.raises(MemoryError):
        write_report(Report(metrics=(), results={"x": Unreadable()}), folder)
    assert from_json(json_path.read_text(encoding="utf-8")) == REPORT
    assert markdown_path.read_text(encoding="utf-8") == to_markdown(REPORT)
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "report.md"]


def scored(dataset: str, part: str | None = None, **more: object) -> dict[str, object]:
    return {"dataset_path": dataset, "dataset_name": part, **more}


GROUP = Metric("mmlu_pro", "exact_match", "custom-extract", 0.5, 0.01, True, 12_032)
HUB = Report(
    metrics=(
        *(replace(ACC, task=task) for task in ("gpqa_diamond_zeroshot", "local", "pro_law")),
        *(replace(ACC, task="gsm8k", metric=name, n=1319) for name in ("exact_match", "other")),
        GROUP,
        replace(ACC, task="json", n=None),
        replace(ACC, task="of_two_datasets"),
        replace(ACC, task="no_number", value=math.nan),
        *(replace(ACC, task=task) for task in ("arc_challenge", "arc_challenge_chat", "of_a_tag")),
    ),
    results={
        "configs": {
            "gpqa_diamond_zeroshot": scored("Idavidrein/gpqa", "gpqa_diamond"),
            "gsm8k": scored("openai/gsm8k", "main", num_fewshot=5),
            "pro_law": scored("TIGER-Lab/MMLU-Pro", num_fewshot=5),
            "pro_math": scored("TIGER-Lab/MMLU-Pro"),
            "local": scored("json"),
            "no_number": scored("owner/data"),
            **dict.fromkeys(("arc_challenge", "arc_challenge_chat"), scored("allenai/ai2_arc", "ARC-Challenge")),
            "of_a_tag": scored("owner/other"),
        },
        "group_subtasks": {
            "mmlu_pro": ["mmlu_pro_humanities"],
            "mmlu_pro_humanities": ["pro_law", "pro_math"],
            "of_two_datasets": ["pro_law", "no_number", "arc_challenge"],
            "tag_without_a_metric": ["of_a_tag"],
        },
    },
    created="2026-11-21T12:00:00+00:00",
)


@pytest.mark.parametrize("part", ["", "main", None])
def test_score_on_a_dataset_of_one_configuration_has_the_tasks_name(part: str | None) -> None:
    report = replace(HUB, results={"configs": {"gsm8k": scored("openai/gsm8k", part)}})
    (entry,) = yaml.safe_load(to_eval_results(report))
    assert entry["dataset"]["task_id"] == "gsm8k"


def test_scores_on_datasets_of_the_hub_are_written_as_it_reads_them(tmp_path: Path) -> None:
    *_, path = write_report(HUB, tmp_path)
    entries = parse_eval_result_entries(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert [(one.dataset_id, one.task_id, one.value, one.date, one.notes) for one in entries] == [
        ("Idavidrein/gpqa", "gpqa_diamond", 0.25, HUB.created, "acc, 0-shot, 400 documents"),
        ("openai/gsm8k", "gsm8k", 0.25, HUB.created, "exact_match, 5-shot, 1,319 documents"),
        (
            "TIGER-Lab/MMLU-Pro",
            "mmlu_pro",
            0.5,
            HUB.created,
            f"exact_match ({GROUP.filter}), 0- and 5-shot, 12,032 documents",
        ),
        ("allenai/ai2_arc", "arc_challenge", 0.25, HUB.created, "acc, 0-shot, 400 documents"),
        ("allenai/ai2_arc", "arc_challenge_chat", 0.25, HUB.created, "acc, 0-shot, 400 documents"),
        ("owner/other", "of_a_tag", 0.25, HUB.created, "acc, 0-shot, 400 documents"),
    ]
    assert len(write_report(replace(HUB, missing=({"task": "gsm8k"},)), tmp_path)) == 3
    assert not path.exists()


@pytest.mark.parametrize("taken", ["file", "report.json"])
def test_place_that_is_taken_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path, taken: str) -> None:
    folder = tmp_path / "file" / "below" if taken == "file" else tmp_path
    (tmp_path / taken).touch() if taken == "file" else (tmp_path / taken).mkdir()
    with refused(RunError, "no_access", holds=folder.name):
        write_report(REPORT, folder)
    assert [path.name for path in tmp_path.iterdir()] == [taken]
