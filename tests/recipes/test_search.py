"""The search recipe: valid, and it picks what a reader of its reports would pick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "search"
RECIPE = FOLDER / "recipe.json"


def read() -> dict[str, Any]:
    return json.loads(RECIPE.read_text(encoding="utf-8"))


def test_every_candidate_is_documented() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for entry in read()["passes"]["quantize"]:
        assert f"| `{entry['type']}` | {entry['bits']} | {entry['block_size']} |" in readme


def goals(recipe: dict[str, Any]) -> list[tuple[str, str, float, bool]]:
    """(task, metric, threshold, whether it is a least value) as the recipe says them."""
    (evaluator,) = recipe["evaluators"].values()
    return [
        (*metric["name"].split("/"), sub_type["goal"]["value"], sub_type.get("higher_is_better", True))
        for metric in evaluator["metrics"]
        for sub_type in metric["sub_types"]
        if "goal" in sub_type
    ]


def values(report: Path) -> dict[tuple[str, str], float]:
    return {(item["task"], item["metric"]): item["value"] for item in json.loads(report.read_text())["metrics"]}


@pytest.mark.long
def test_search_picks_the_smallest_model_that_meets_both_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from olive.workflows import run

    import olive_ext.workflow  # noqa: F401

    monkeypatch.chdir(ROOT)
    recipe = read()
    evaluator = recipe["evaluators"]["against_float"]
    evaluator["output_dir"] = str(tmp_path / "reports")
    evaluator["reference"]["records_dir"] = str(tmp_path / "records")
    evaluator["engine"] = {"num_threads": 1}
    recipe.update(output_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))

    output = run(recipe)

    reports = {path.parent.name: path for path in (tmp_path / "reports").glob("*/report.json")}
    found = {name: values(path) for name, path in reports.items()}
    damaged = {name for name, path in reports.items() if json.loads(path.read_text())["comparison"]["damaged"]}
    assert len(damaged) == 4  # of OnnxBlockWiseRtnQuantization
    assert len(found) == len(recipe["passes"]["quantize"])
    size = ("size_on_disk", "bytes")
    meeting = {
        name: metrics
        for name, metrics in found.items()
        if name not in damaged
        and all(
            metrics[task, metric] >= bound if is_least else metrics[task, metric] <= bound
            for task, metric, bound, is_least in goals(recipe)
        )
    }
    smallest = min(meeting, key=lambda name: meeting[name][size])
    assert output.get_best_candidate().model_id == smallest
    assert (tmp_path / "out" / "model.onnx").stat().st_size == meeting[smallest][size]
    assert len(meeting) < len(found)  # the goals cost something
