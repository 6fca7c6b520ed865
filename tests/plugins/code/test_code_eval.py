"""Tasks of code on local documents, answered by a model that knows its answers beforehand."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.api.model import LM

from olive_ext.backends import code_eval
from olive_ext.backends.task_loading import load_tasks, loaded_metrics
from olive_ext.config import EvaluationConfig
from olive_ext.errors import OliveExtError, TaskError
from olive_ext.plugins.code.code_eval import CODE_EVAL, CodeEval, Outcome, Sandbox
from olive_ext.report import Report
from olive_ext.run import evaluate
from tests.backends.known_answers import Knows
from tests.refusals import refused

RIGHT, WRONG, STOPPED = "    return a + b\n", "    return a - b\n", "    import os\n    os._exit(0)\n"
FUNCTIONS = """
import datasets
import evaluate as hf_evaluate

compute_ = hf_evaluate.load("code_eval")
compute_.compute(references=["assert add(2, 3)==5"], predictions=[["def add(a,b): return a*b"]], k=[1])


def load(**_):
    rows = [{"prompt": f"def add(a, b):\\n    # {n}\\n", "test": f"assert add({n}, 2) == {n + 2}"} for n in range(4)]
    return {"test": datasets.Dataset.from_list(rows)}


def pass_at_k(references, predictions, k):
    return compute_.compute(references=references, predictions=predictions, k=k)[0]


def build_predictions(resps, docs):
    return [[doc["prompt"] + r for r in resp] for resp, doc in zip(resps, docs)]


def own_means(references, predictions, k):
    return {"pass@1": 0.0}
"""
TASK = """task: toy_code
unsafe_code: true
custom_dataset: !function toy.load
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{test}}"
repeats: 3
metric_list:
  - metric: !function toy.pass_at_k
    aggregation: mean
    higher_is_better: true
    k: [1, 2]
generation_kwargs:
  until: ["\\ndef"]
  do_sample: true
  temperature: 0.8
filter_list:
  - name: create_test
    filter:
      - function: custom
        filter_fn: !function toy.build_predictions
metadata:
  version: 1
"""
ANSWERS = {
    0: [RIGHT, RIGHT, RIGHT],
    1: [RIGHT, WRONG, STOPPED],
    2: [WRONG, STOPPED, WRONG],
    3: [WRONG, RIGHT, RIGHT],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(FUNCTIONS, encoding="utf-8")
    (tmp_path / "toy_code.yaml").write_text(TASK, encoding="utf-8")
    return tmp_path


def evaluated(folder: Path, **settings: Any) -> Report:
    given = {"tasks": ["toy_code"], "include_path": str(folder), "confirm_run_unsafe_code": True, **settings}
    return evaluate(EvaluationConfig.parse({"model": {"path": "nowhere"}, **given}), lm=Knows(ANSWERS))


def test_pass_at_k_counts_answers_that_pass_with_errors_by_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of all documents run at once."""
    monkeypatch.setitem(CODE_EVAL.__dict__, "sandbox", counting := Counting(CODE_EVAL.sandbox))
    load_tasks(["toy_code"], str(folder), runs_code=True)
    counting.asked.clear()
    report = evaluated(folder)
    different = len({(number, answer) for number, answers in ANSWERS.items() for answer in answers})
    assert [number for number in counting.asked if number] == [different]
    found = {metric.metric: metric for metric in report.metrics if metric.task == "toy_code"}
    for k in (1, 2):
        values = [
            statistics.fmean(any(chosen) for chosen in itertools.combinations([a == RIGHT for a in answers], k))
            for answers in ANSWERS.values()
        ]
        metric = found[f"pass@{k}"]
        assert metric.value == pytest.approx(statistics.fmean(values), abs=1e-12)
        assert metric.stderr == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-12)
        assert (metric.filter, metric.n, metric.higher_is_better) == ("create_test", 4, True)
    assert report.hardware["generated_code"].startswith(CODE_EVAL.sandbox.mode)


def test_results_have_the_form_of_evaluates_own() -> None:
    """The example of its documentation, and a number of k that is larger than a task's answers: left out."""
    candidates = [["def add(a,b): return a*b", "def add(a, b): return a+b"]]
    passes, told = CODE_EVAL.compute(references=["assert add(2,3)==5"], predictions=candidates, k=[1, 2, 10])
    assert passes == {"pass@1": 0.5, "pass@2": 1.0}
    assert {type(value).__name__ for value in passes.values()} == {"float64"}
    assert dict(told) == {
        0: [
            (0, {"task_id": 0, "passed": False, "result": "failed: ", "completion_id": 0}),
            (1, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 1}),
        ]
    }


class Counting:
    """A sandbox that notes how many programs it was given at once."""

    def __init__(self, own: Sandbox) -> None:
        self._own = own
        self.asked: list[int] = []
        self.mode, self.description = own.mode, own.description

    def run(self, programs: list[str], cpu_s: float) -> list[Outcome]:
        self.asked.append(len(programs))
        return self._own.run(programs, cpu_s)


def test_equal_programs_are_run_once_until_they_are_forgotten() -> None:
    metric = CodeEval()
    metric.__dict__["sandbox"] = counting = Counting(metric.sandbox)
    for _ in range(2):
        metric.compute(predictions=[["x = 1", "x = 1", "x = 2"]], references=["assert x"], k=[1])
    metric.forget()
    metric.compute(predictions=[["x = 1"]], references=["assert x"], k=[1])
    assert counting.asked == [2, 1]


@pytest.mark.long
def test_time_of_a_program_is_what_the_task_asks_for() -> None:
    counting = "import time\nend = time.process_time() + 1.3\nwhile time.process_time() < end:\n    pass"
    results = [
        CodeEval().compute(predictions=[[counting]], references=["assert True"], k=[1], timeout=seconds)[1][0][0][1]
        for seconds in (1.0, 3.0)
    ]
    assert [result["result"] for result in results] == ["timed out", "passed"]


def test_task_of_code_is_refused_before_its_python_unless_it_is_confirmed(folder: Path) -> None:
    sys.modules.pop(str(folder / "toy"), None)
    for _ in range(2):
        with refused(TaskError, "task", holds=("toy_code", "confirm_run_unsafe_code")):
            evaluated(folder, confirm_run_unsafe_code=False)
    assert str(folder / "toy") not in sys.modules


def test_task_that_runs_code_by_its_own_python_is_refused(folder: Path) -> None:
    own = FUNCTIONS[: FUNCTIONS.index("import evaluate")] + FUNCTIONS[FUNCTIONS.index("def load") :]
    (folder / "toy.py").write_text(own, encoding="utf-8")
    (folder / "toy_code.yaml").write_text(TASK.replace("toy.pass_at_k", "toy.own_means"), encoding="utf-8")
    with refused(TaskError, "untrusted", holds="toy_code"):
        evaluated(folder)


def test_names_of_pass_at_k_are_known_before_the_run_and_evaluates_own_door_is_as_it_was(folder: Path) -> None:
    import evaluate as library

    own = library.load
    names = loaded_metrics(load_tasks(["toy_code"], str(folder), runs_code=True))["toy_code"]
    assert names is not None
    assert {"pass@1", "pass@2,create_test"} <= set(names)
    assert library.load is own


HUMANEVAL = [
    {
        "prompt": "def add(a, b):\n",
        "test": f"def check(candidate):\n    assert candidate({n}, 2) == {n + 2}\n",
        "entry_point": "add",
    }
    for n in ANSWERS
]
MBPP = [
    {"text": "Add.", "test_list": [f"assert add({n}, {m}) == {n + m}" for m in range(1, 4)], "task_id": n}
    for n in ANSWERS
]


class Writes(LM):
    """Answers documents with an even number rightly, in the form that each task's prompt asks for."""

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        head = "" if "[BEGIN]" not in requests[0].args[0] else "def add(a, b):\n"
        return [head + (WRONG if request.doc_id % 2 else RIGHT) for request in requests]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize(
    ("file", "rows", "metric"),
    [("humaneval/humaneval.yaml", HUMANEVAL, "pass@1"), ("mbpp/mbpp.yaml", MBPP, "pass_at_1")],
)
def test_lm_evals_own_tasks_run_with_their_own_python(
    tmp_path: Path, file: str, rows: list[dict[str, Any]], metric: str
) -> None:
    data, name = tmp_path / "test.jsonl", f"own_{Path(file).stem}"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / f"{name}.yaml").write_text(
        f"task: {name}\ninclude: {Path(lm_eval.tasks.__file__).parent / file}\n"
        f"dataset_path: json\ndataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {data}\n",
        encoding="utf-8",
    )
    settings = {"tasks": [name], "include_path": str(tmp_path), "confirm_run_unsafe_code": True}
    report = evaluate(EvaluationConfig.parse({"model": {"path": "nowhere"}, **settings}), lm=Writes())
    values = {each.metric: (each.value, each.stderr) for each in report.metrics if each.task == name}
    assert values[metric] == pytest.approx((0.5, 0.57735 / 2), abs=1e-5)


@pytest.mark.parametrize("when", ["loaded", "scored"])
def test_metric_is_not_a_script_of_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, when: str
) -> None:
    """evaluate looks for ./shown/shown.py before it looks for the metric "shown"."""
    here = tmp_path_factory.mktemp("here")
    (here / "shown").mkdir()
    (here / "shown" / "shown.py").write_text("from pathlib import Path\nPath('ran').touch()\n", encoding="utf-8")
    clone = Path(code_eval.__file__).parents[2]  # where importing evaluate would take 2 s of every command
    assert (code_eval._has_scripts(here), code_eval._has_scripts(clone)) == (True, False)
    monkeypatch.chdir(here)
    body = '    return {"pass@1": 0.0}\n'  # of the last function
    asked = {"loaded": f"{body}\n\nhf_evaluate.load('shown')\n", "scored": f"    hf_evaluate.load('shown')\n{body}"}
    (folder / "toy.py").write_text(FUNCTIONS.replace(body, asked[when]), encoding="utf-8")
    (folder / "toy_code.yaml").write_text(TASK.replace("toy.pass_at_k", "toy.own_means"), encoding="utf-8")
    with refused(OliveExtError, "unknown_name", holds=("'shown'", "'shown/shown.py'")):
        evaluated(folder)
    assert not (here / "ran").exists()
