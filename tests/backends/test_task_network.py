from __future__ import annotations

import logging
from pathlib import Path

import pytest

from olive_ext.backends.code_eval import network_calls, warn_of_network
from olive_ext.backends.task_loading import load_tasks
from olive_ext.errors import TaskError
from olive_ext.model.files import hub
from olive_ext.model.files.hub import asked_where_it_answers
from tests.refusals import refused

PYTHON = """
import datasets
import urllib.request
import evaluate as hf_evaluate
from nltk import download


def load(**_):
    return {"test": datasets.Dataset.from_list([{"t": "a"}])}


def score(doc, results):
    download("punkt")
    metric = hf_evaluate.load("rouge")
    hf_evaluate.load("code_eval")
    datasets.load_dataset("json", data_files={"test": "local.jsonl"})
    datasets.load_dataset("json", data_files="https://localhost:1/x.jsonl")
    page = urllib.request.urlopen("http://localhost:1")
    return {"acc": len(results), "other": load(), "more": page.read(metric)}
"""
TASK = """task: asks_the_network
custom_dataset: !function needs.load
test_split: test
output_type: generate_until
doc_to_text: "{{t}}"
doc_to_target: "{{t}}"
process_results: !function needs.score
metric_list:
  - metric: acc
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "needs.py").write_text(PYTHON.replace("from nltk import download", "download = print"), "utf-8")
    (tmp_path / "asks_the_network.yaml").write_text(TASK, "utf-8")
    return tmp_path


def test_calls_are_found_by_what_imports_have_bound(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text(PYTHON, "utf-8")
    assert network_calls(tmp_path / "needs.py") == [
        (13, "nltk.download"),
        (14, "evaluate.load"),
        (17, "datasets.load_dataset"),
        (18, "urllib.request.urlopen"),
    ]
    (tmp_path / "broken.py").write_text("def f(:", "utf-8")
    assert network_calls(tmp_path / "broken.py") == network_calls(tmp_path / "none.py") == []


def test_task_is_told_with_file_and_line_once_it_is_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tasks = load_tasks(["asks_the_network"], str(folder)).tasks
        warn_of_network(tasks)
    assert not [record for record in caplog.records if "--metadata" in record.getMessage()]
    told = [record.getMessage() for record in caplog.records if record.name.endswith("code_eval")]
    assert told == [
        f"asks_the_network: functions of '{folder / 'needs.py'}' need the network: "
        "evaluate.load (line 14), datasets.load_dataset (line 17), urllib.request.urlopen (line 18)"
    ]


def test_library_that_was_set_offline_says_why_the_hub_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_silent", lambda: "no route to host")
    with refused(TaskError, "needs_network", holds="no route to host"), asked_where_it_answers(has_data=True):
        raise TaskError("task 't': ConnectionError: Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)")
