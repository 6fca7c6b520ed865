"""Several answers to each document, given by a model that knows them beforehand: `avg@n`, `maj@n`, `pass@k` against
counts by hand and lm-eval's own majority, and standard errors over documents."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.report import Metric, Report
from olive_ext.run import evaluate
from tests.backends.known_answers import Knows

NUM_DOCUMENTS, NUM_ANSWERS = 7, 6
FUNCTIONS = """
import datasets
import numpy as np


def load(**_):
    rows = [{"question": f"what is {n}?", "answer": str(n)} for n in range(7)]
    return {"test": datasets.Dataset.from_list(rows)}


def length(doc, results):
    return {"close": 1 / (1 + abs(len(results[0]) - len(doc["answer"])))}


def partial(doc, results):
    is_right = results[0].endswith(doc["answer"])
    return {"name": "x", "share": is_right or (0.5 if results[0] == "is 99" else 0.0)}


def unread(doc, results):
    return {} if results[0] == "nothing" else {"wrong": np.bool_(not results[0].endswith(doc["answer"])), "pass@3": 7.0}
"""
TASK = """task: {name}
custom_dataset: !function toy.load
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], do_sample: true, temperature: 0.7}}
{more}
metadata:
  version: 1
"""
EXTRACTED = """
metric_list:
  - metric: exact_match
filter_list:
  - name: found
    filter:
      - {function: regex, regex_pattern: "is ([0-9]+)"}
      - {function: take_first}
  - name: voted
    filter:
      - {function: regex, regex_pattern: "is ([0-9]+)"}
      - {function: majority_vote}
      - {function: take_first}
  - name: raw
    filter:
      - {function: remove_whitespace}
      - {function: take_first}
"""
OWN = """
process_results: !function toy.length
metric_list:
  - metric: close
    aggregation: mean
    higher_is_better: true
"""
SHARES = """
process_results: !function toy.partial
metric_list:
  - {metric: name, aggregation: bypass, higher_is_better: true}
  - {metric: share, aggregation: mean, higher_is_better: true}
"""
UNREAD = """
process_results: !function toy.unread
metric_list:
  - {metric: wrong, aggregation: mean, higher_is_better: false}
  - {metric: "pass@3", aggregation: mean, higher_is_better: true}
"""


def _answers() -> dict[int, list[str]]:
    """Right, wrong and unreadable ones, with ties."""
    rng = random.Random(3)
    said = lambda number: [f"it is {number}", f"so is {number}.", f"is {number + 1}", "is 99", "nothing"]  # noqa: E731
    return {number: [rng.choice(said(number)) for _ in range(NUM_ANSWERS)] for number in range(NUM_DOCUMENTS)}


ANSWERS = _answers()


TASKS = {"toy": EXTRACTED, "toy_own": OWN, "toy_three": f"repeats: 3\n{OWN}", "shares": SHARES, "unread": UNREAD}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(FUNCTIONS, encoding="utf-8")
    for name, more in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, more=more), encoding="utf-8")
    return tmp_path


def evaluated(folder: Path, task: str, answers: Mapping[int, list[str]] | None = None, **settings: Any) -> Report:
    given = {"tasks": [task], "include_path": str(folder), **settings}
    return evaluate(EvaluationConfig.parse({"model": {"path": "nowhere"}, **given}), lm=Knows(answers or ANSWERS))


def _by_name(report: Report) -> dict[tuple[str, str], Metric]:
    return {(metric.metric, metric.filter): metric for metric in report.metrics}


def _found(number: int) -> list[str]:
    """What the filter finds of each answer to a document."""
    return [text.partition("is ")[2].rstrip(".") or "[invalid]" for text in ANSWERS[number]]


def _is(metric: Metric, values: list[float]) -> None:
    assert metric.value == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert metric.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)
    assert (metric.n, metric.higher_is_better) == (NUM_DOCUMENTS, True)


def test_metrics_of_all_answers_are_those_counted_by_hand_and_the_majority_lm_evals(folder: Path) -> None:
    """Whole answers have no majority, and shares no pass."""
    found = _by_name(evaluated(folder, "toy", repeats=NUM_ANSWERS))
    right = [[text == str(number) for text in _found(number)] for number in range(NUM_DOCUMENTS)]
    _is(found["exact_match", "found"], [float(each[0]) for each in right])
    _is(found["avg@6", "found"], [statistics.fmean(each) for each in right])
    for k in (2, 4, 6):
        chosen = [[any(some) for some in itertools.combinations(each, k)] for each in right]
        _is(found[f"pass@{k}", "found"], [statistics.fmean(each) for each in chosen])
    votes = [Counter(_found(number)).most_common(1)[0][0] for number in range(NUM_DOCUMENTS)]
    _is(found["maj@6", "found"], [float(vote == str(number)) for number, vote in enumerate(votes)])
    assert len({*right[0], *right[1]}) == 2
    assert any(list(Counter(_found(number)).values()).count(2) > 1 for number in range(NUM_DOCUMENTS))  # ties
    assert found["maj@6", "found"].value == found["exact_match", "voted"].value
    assert found["maj@6", "found"].stderr == found["exact_match", "voted"].stderr
    assert ("avg@6", "voted") not in found
    assert ("avg@6", "raw") in found
    assert ("maj@6", "raw") not in found
    own = _by_name(evaluated(folder, "toy_own", repeats=4))
    values = [
        statistics.fmean(1 / (1 + abs(len(text) - 1)) for text in ANSWERS[number][:4])
        for number in range(NUM_DOCUMENTS)
    ]
    _is(own["avg@4", "none"], values)
    assert own.keys() == {("close", "none"), ("avg@4", "none")}


def test_no_pass_where_some_documents_alone_are_right_or_wrong(folder: Path) -> None:
    """A mean over the documents whose answers happen to be 0 or 1 would be one of the easiest and the hardest."""
    found = _by_name(report := evaluated(folder, "shares", repeats=4, sample_log_num=9, sample_log_dir=str(folder)))
    each = [
        [float(ans.endswith(str(number))) or 0.5 * (ans == "is 99") for ans in ANSWERS[number][:4]]
        for number in range(7)
    ]
    assert {0.5} < {value for values in each for value in values}
    assert any({*values} <= {0.0, 1.0} for values in each)
    _is(found["avg@4", "none"], [statistics.fmean(values) for values in each])
    assert not [name for name in report.results["results"]["shares"] if "pass" in name]
    assert "pass@" not in (folder / "samples_shares.jsonl").read_text(encoding="utf-8")


def test_lower_is_better_and_answers_without_a_value(folder: Path) -> None:
    """An answer that the task's code gives no value counts in no mean; `pass@k` is of right ones, 0 here."""
    answers = {number: ["is 99" if text == "nothing" else text for text in ANSWERS[number]] for number in ANSWERS}
    for known, has_all in ((ANSWERS, False), (answers, True)):
        found = _by_name(evaluated(folder, "unread", known, repeats=3))
        judged = [[not text.endswith(str(at)) for text in known[at][:3] if text != "nothing"] for at in range(7)]
        means = [statistics.fmean(each) for each in judged if each]
        assert found["avg@3", "none"].value == pytest.approx(statistics.fmean(means), abs=1e-12)
        assert not found["avg@3", "none"].higher_is_better
        assert (("pass@2", "none") in found) == has_all
    chosen = [[not all(some) for some in itertools.combinations(each, 2)] for each in judged]
    _is(found["pass@2", "none"], [statistics.fmean(each) for each in chosen])
    assert found["pass@3", "none"].value == 7.0  # the task's own


def test_number_of_answers_is_the_tasks_own_where_none_is_given(folder: Path) -> None:
    assert ("avg@3", "none") in _by_name(evaluated(folder, "toy_three"))
    assert ("avg@2", "none") in _by_name(evaluated(folder, "toy_three", repeats=2))
    assert _by_name(evaluated(folder, "toy_three", repeats=1)).keys() == {("close", "none")}
    assert _by_name(evaluated(folder, "toy_own")).keys() == {("close", "none")}
