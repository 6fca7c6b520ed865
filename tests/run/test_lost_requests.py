"""Requests without an answer or without numbers: the rest is evaluated, what is missing is said, and no gate holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from olive_ext.config import Bound, EvaluationConfig
from olive_ext.engine.requests import KeyedRequest, Lost, Result
from olive_ext.errors import IncompleteError, NonFiniteError
from olive_ext.report import Report, from_json
from olive_ext.report.verdict import verdict
from olive_ext.run import check_complete, evaluate
from olive_ext.run.bounds import broken_bounds
from olive_ext.workflow.evaluator import broken_in, to_metric_result
from tests.backends.local_tasks import write_tasks
from tests.backends.reference import ForwardEngine, ort_lm
from tests.check.tiny import put_model
from tests.refusals import refused
from tests.run.test_evaluate import config, numbers
from tests.session.tiny import byte_level

CRASH = Lost("each worker that ran it ended by SIGSEGV")


class CrashingEngine(ForwardEngine):
    """As workers that crash on the first request of each chunk."""

    def run_chunks(self, chunks: Iterable[Sequence[KeyedRequest]]) -> Iterator[tuple[int, list[Result | Lost]]]:
        for number, results in super().run_chunks(chunks):
            yield number, [CRASH, *results[1:]] if results else []


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_rolling", "tiny_generate"])
def test_documents_of_lost_requests_count_in_no_metric(task: str, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    given = config(folder, [task], output_dir=str(tmp_path / "out"), sample_log_num=9)
    report = evaluate(given, lm=ort_lm(engine=CrashingEngine()))
    (missing,) = report.missing
    assert (missing["task"], missing["reason"]) == (task, CRASH.reason)
    assert from_json((tmp_path / "out" / "report.json").read_text()).missing == report.missing
    with refused(IncompleteError, "incomplete", holds=("1 request", task)):
        check_complete(report, "stop")
    check_complete(report, "report")
    with_the_rest = evaluate(given, lm=ort_lm())  # the others are in the journal
    assert with_the_rest.missing == ()
    assert [metric.value for metric in report.metrics if metric.task == "missing"] == [1]
    assert with_the_rest.model["journal"]["answers_written"] == 1
    assert {*numbers(with_the_rest), ("missing", "requests", "none")} == numbers(report).keys()


def test_document_of_a_lost_request_is_told_by_its_number(tmp_path: Path) -> None:
    """Documents may hold arrays, which have no `==`; and one that is like the lost document counts."""
    folder = write_tasks(tmp_path / "tasks")
    (folder / "local.py").write_text(
        """
import datasets
import numpy as np

WORDS = "the cat sat on the mat and the dog ran off with the hat".split()


def load(**_):
    row = {"question": "the cat", "choices": [" sat", " on", " the"], "answer": 1, "text": "x"}
    rows = [{**row, "question": " ".join(WORDS[:n])} for n in range(1, 5)]
    found = datasets.Dataset.from_list([*rows, rows[0], rows[1]])
    return {"test": found.with_transform(lambda rows: {**rows, "sound": [np.zeros(9) for _ in rows["question"]]})}
""",
        encoding="utf-8",
    )
    report = evaluate(config(folder, ["tiny_choice"], sample_log_num=9, output_dir=str(tmp_path / "out")), lm=ort_lm())
    again = config(folder, ["tiny_choice"], output_dir=str(tmp_path / "again"))
    crashed = evaluate(again, lm=ort_lm(engine=CrashingEngine()))
    lost = {item["doc_id"] for item in crashed.missing}
    assert lost
    lines = (tmp_path / "out").rglob("samples_*.jsonl")
    right = {line["doc_id"]: line["acc"] for file in lines for line in map(json.loads, file.read_text().splitlines())}
    left = [value for number, value in right.items() if number not in lost]
    assert len(left) == 6 - len(lost)
    assert numbers(crashed)["tiny_choice", "acc", "none"] == pytest.approx(sum(left) / len(left))
    assert report.missing == ()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def broken(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NaN in the embedding of the last token of " on": what comes behind it has no distribution."""
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("broken") / "model"))
    graph = onnx.load(folder / "model.onnx")
    tensor = next(found for found in graph.graph.initializer if found.name == "embedding")
    values = numpy_helper.to_array(tensor).copy()
    token = byte_level().encode(" on", add_special_tokens=False)[-1]
    values[token] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(values, "embedding"))
    onnx.save(graph, folder / "model.onnx")
    return folder


def run(path: Path, tmp_path: Path, **values: object) -> Report:
    tasks = {"tasks": ["tiny_choice", "tiny_generate"], "include_path": str(write_tasks(tmp_path / "tasks"))}
    given = {"model": {"path": str(path)}, "max_length": 64, "bootstrap_iters": 0, **tasks, **values}
    return evaluate(EvaluationConfig.parse(given))


@pytest.mark.parametrize("is_kept", [True, False])
def test_run_stops_by_name(is_kept: bool, broken: Path, tmp_path: Path) -> None:
    kept = {"output_dir": str(tmp_path / "out")} if is_kept else {}
    with refused(NonFiniteError, "not_finite", holds=("non_finite", "tiny_choice", "document")):
        run(broken, tmp_path, **kept)


def test_reported_requests_are_counted_and_no_bound_holds(broken: Path, whole: Path, tmp_path: Path) -> None:
    report = run(broken, tmp_path, non_finite="report")
    (counted,) = (metric for metric in report.metrics if metric.task == "non_finite")
    assert counted.value == report.engine["non_finite"] > 0
    bounds = [Bound(metric="tiny_choice/acc", min=0.0), Bound(metric="tiny_choice/acc_norm", min=0.0)]
    for reasons in broken_bounds(bounds, report.metrics), broken_in(to_metric_result(report), bounds):
        assert [reason.words.split()[0] for reason in reasons] == [str(int(counted.value))]
    sound = run(whole, tmp_path)
    assert sound.engine["non_finite"] == 0
    assert broken_bounds(bounds, sound.metrics) == []


@pytest.mark.parametrize("mode", ["resident", "recorded"])
def test_comparison_of_reported_requests_cannot_tell(broken: Path, whole: Path, tmp_path: Path, mode: str) -> None:
    for path, other in ((broken, whole), (whole, broken)):
        reference = {"path": str(other), "mode": mode, "records_dir": str(tmp_path / "records")}
        report = run(path, tmp_path, non_finite="report", reference=reference)
        assert report.comparison is not None
        found = verdict(report.comparison)
        assert (found.code, "requests" in found.finding) == ("cannot_tell", True)
        assert broken_bounds([Bound(metric="tiny_choice/acc", min=0.0)], report.metrics)
