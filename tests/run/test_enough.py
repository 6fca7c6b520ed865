"""`evaluate` on real tiny exports: enough documents, then all of them from what was answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.report import Report
from olive_ext.run import evaluate
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export
from tests.run.reference.test_sampled_run import COUNT, write_many


def run(folder: Path, output: str, mode: str, **settings: Any) -> Report:
    model = str(genai_export("llama"))
    reference = {"path": model, "mode": mode, "records_dir": str(folder / "records")}
    given = {"model": {"path": model}, "reference": reference, "tasks": ["many_choice"], "include_path": str(folder)}
    return evaluate(EvaluationConfig.parse({**given, "output_dir": str(folder / output), **settings}), progress=True)


def answered(*folders: Path) -> set[str]:
    """Keys of the answers in the journals of `folders`; none may be there twice."""
    found: list[str] = []
    for path in (path for folder in folders for path in folder.glob("answers_*.jsonl")):
        for line in path.read_text().splitlines():
            found += [f"{path.name} {key}" for key in json.loads(line.partition(" ")[2]).get("answers", ())]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("mode", ["resident", pytest.param("recorded", marks=pytest.mark.long)])
def test_enough_goes_on_to_all_without_asking_anything_twice(
    tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_many(write_tasks(tmp_path))
    first = run(tmp_path, "out", mode, documents="enough", certain={"within": 0.1})
    said = [line for line in capfd.readouterr().err.splitlines() if "to compute" in line]
    assert len(said) == 2, "one of the reference, and one of the model, which is asked in many batches"
    own = tmp_path / "out" / "journal"
    after = answered(own)
    assert first.comparison.certainty.num_evaluated < COUNT
    again = run(tmp_path, "out", mode, documents="enough", certain={"within": 0.1})
    assert again.comparison is not None
    for name in ("certainty", "outcomes", "divergences", "flips"):
        assert getattr(again.comparison, name) == getattr(first.comparison, name)
    assert answered(own) == after
    whole = run(tmp_path, "out", mode)
    assert answered(own) > after
    alone = run(tmp_path, "alone", mode)
    for own_metric, metric in zip(whole.metrics, alone.metrics, strict=True):
        assert own_metric.value == pytest.approx(metric.value, abs=1e-6)  # other steps add up in another order
    assert [item.n for item in whole.metrics if item.metric == "acc"] == [COUNT]


@pytest.mark.long
def test_candidates_share_what_a_resident_reference_said(tmp_path: Path) -> None:
    write_many(write_tasks(tmp_path))
    chat = {"documents": "enough", "apply_chat_template": True}
    for output in ("one", "two"):
        run(tmp_path, output, "resident", **chat, certain={"within": 0.1})
        said = answered(tmp_path / "records")
        assert len(said) > COUNT
    run(tmp_path, "three", "resident", **chat, certain={"within": 0.2})
    assert answered(tmp_path / "records") == said
