"""What quantization costs the quickstart's model: distances, flips and intervals as plain passes over both models, and
runs that know nothing of each other, give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from olive_ext.config import EvaluationConfig
from olive_ext.report import Report
from olive_ext.report.comparison import ALL
from olive_ext.run import evaluate
from olive_ext.stats.paired_answers import difference_interval
from tests.agreement import references
from tests.agreement.references import causal
from tests.exports import Export
from tests.exports.quickstart import MODEL, TASKS, exported, quantized

TASK = "quickstart_choice"
FIRST = {TASK: "acc", "quickstart_letters": "acc", "quickstart_generate": "exact_match"}
NUM_DOCUMENTS = 40
QUANTIZED = {"int8": (8, 32), "int4 of 32": (4, 32), "int4 of 128": (4, 128)}
NAMES = ["float", *QUANTIZED]
RESIDENT = "int4 of 128"
"""Beside the float graph, which is itself beside the Hugging Face model; the others are compared with its record."""

pytestmark = pytest.mark.usefixtures("forked_exports")


def some(names: Iterable[str]) -> list[Any]:
    """One resident and one recorded comparison for every run, the others long."""
    return [pytest.param(name, marks=() if name in (RESIDENT, "int4 of 32") else pytest.mark.long) for name in names]


Logprobs = Callable[[list[int]], np.ndarray]
"""Token ids to log-probabilities of the next token, [positions, vocabulary]."""


@pytest.fixture(scope="module")
def models() -> dict[str, Path]:
    """The float model as a graph, and that quantized."""
    return {"float": exported(), **{name: quantized(*form) for name, form in QUANTIZED.items()}}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


def evaluated(model: Path, **settings: Any) -> Report:
    values = {
        "model": {"path": str(model)},
        "tasks": list(FIRST),
        "include_path": str(TASKS),
        "limit": NUM_DOCUMENTS,
        "bootstrap_iters": 0,
        "engine": {"num_threads": 1},
    }
    return evaluate(EvaluationConfig.parse({**values, **settings}))


def beside(model: Path, reference: Path, **settings: Any) -> Report:
    return evaluated(model, reference={"path": str(reference), "mode": "resident"}, **settings)


def recorded(model: Path, reference: Path, out: Path, **settings: Any) -> Report:
    given = {"path": str(reference), "mode": "recorded", "records_dir": str(out / "records")}
    return evaluated(model, reference=given, **settings)


def log(folder: Path) -> dict[str, Any]:
    """Settings of a log of every document."""
    return {"sample_log_num": NUM_DOCUMENTS, "output_dir": str(folder)}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], out: Path) -> Path:
    """The log of the float graph alone."""
    evaluated(models["float"], **log(out / "alone"))
    return out / "alone"


@pytest.fixture(scope="module")
def report_of(models: dict[str, Path], out: Path) -> Callable[[str], Report]:
    """The report of a model by name, with a log beside those of quantized ones."""

    @cache
    def made(name: str) -> Report:
        if name == "float":
            return beside(models["float"], MODEL, tasks=[TASK])
        if name == RESIDENT:
            return beside(models[name], models["float"], **log(out / name))
        return recorded(models[name], models["float"], out, **log(out / name))

    return made


@dataclass(frozen=True)
class Plain:
    """What plain passes over two models say of the task."""

    kl: np.ndarray
    """In nats, of every position of every ending."""

    right: np.ndarray
    """[documents, 2]: whether the reference and the candidate choose the right ending."""


def plain(reference: Logprobs, candidate: Logprobs) -> Plain:
    """Every ending behind its story, one pass for each, with nothing shared."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (TASKS / "choice.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_DOCUMENTS]
    positions, right = [], []
    for document in map(json.loads, lines):
        context = tokenizer.encode(document["context"])
        distances, scores = [], []
        for ending in document["endings"]:
            tokens = tokenizer.encode(document["context"] + ending)
            targets = tokens[len(context) :]
            rows = [logprobs(tokens[:-1])[-len(targets) :] for logprobs in (reference, candidate)]
            distances.append((np.exp(rows[0]) * (rows[0] - rows[1])).sum(-1))
            scores.append([float(each[np.arange(len(targets)), targets].sum()) for each in rows])
        positions += distances
        right.append(np.argmax(scores, 0) == document["answer"])
    return Plain(np.concatenate(positions), np.array(right))


@cache
def of_checkpoint(tokens: tuple[int, ...]) -> np.ndarray:
    """The checkpoint's log-probabilities, which every model is held against."""
    return causal(MODEL).logprobs(tokens)


def brute(name: str, path: Path) -> Plain:
    graph = references.Plain(Export(name, path, MODEL, "quickstart"))
    return plain(lambda tokens: of_checkpoint(tuple(tokens)), graph.logprobs)


def metric(report: Report, name: str, task: str = TASK) -> float:
    (value,) = (item.value for item in report.metrics if (item.task, item.metric) == (task, name))
    return value


@pytest.mark.long
def test_distance_orders_the_models_where_accuracy_cannot(report_of: Callable[[str], Report]) -> None:
    assert abs(metric(report_of("float"), "kl_mean", ALL)) < 1e-6
    found = []
    for name in QUANTIZED:
        comparison = report_of(name).comparison
        found.append(next(item.kl for item in comparison.divergences if item.task == ALL))
    assert found[0].mean * 100 < found[1].mean
    for first, second in pairwise(found):
        assert first.stderr is not None
        assert second.stderr is not None
        assert second.mean - first.mean > 2 * (first.stderr**2 + second.stderr**2) ** 0.5


@pytest.mark.parametrize("name", some(NAMES))
def test_distance_flips_and_p_value_are_those_of_plain_passes(
    name: str, models: dict[str, Path], report_of: Callable[[str], Report]
) -> None:
    report, expected_of = report_of(name), brute(name, models[name])
    kl, (before, after) = expected_of.kl, expected_of.right.T
    assert metric(report, "kl_mean") == pytest.approx(kl.mean(), rel=1e-3, abs=1e-6)
    assert metric(report, "kl_median") == pytest.approx(np.median(kl), rel=1e-2, abs=1e-6)
    assert metric(report, "kl_p99") == pytest.approx(np.quantile(kl, 0.99), rel=1e-2, abs=1e-6)
    assert metric(report, "kl_max") == pytest.approx(kl.max(), rel=1e-2, abs=1e-5)
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    assert metric(report, "flips_right_to_wrong") == lost
    assert metric(report, "flips_wrong_to_right") == won
    assert metric(report, "acc") == after.mean()
    assert metric(report, "accuracy_difference") == pytest.approx(after.mean() - before.mean())
    ends = [metric(report, f"accuracy_difference_{end}") for end in ("low", "high")]
    assert ends == list(difference_interval(after.astype(float) - before)[:2])
    expected = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert metric(report, "mcnemar_p") == pytest.approx(expected)
    flips = [flip for flip in report.comparison.flips if (flip.task, flip.metric) == (TASK, "acc")]
    assert {flip.doc_id for flip in flips} == set(np.flatnonzero(before != after).tolist())


def values(folder: Path, task: str) -> np.ndarray:
    """A task's first metric by document, from the log of a run."""
    lines = (folder / f"samples_{task}.jsonl").read_text().splitlines()
    by_document = {line["doc_id"]: line[FIRST[task]] for line in map(json.loads, lines)}
    return np.array([by_document[number] for number in range(NUM_DOCUMENTS)])


@pytest.mark.parametrize("name", some(QUANTIZED))
def test_flips_and_intervals_are_those_of_two_separate_runs(
    name: str, alone: Path, out: Path, report_of: Callable[[str], Report]
) -> None:
    comparison = report_of(name).comparison
    pooled = []
    for task, first in FIRST.items():
        before, after = values(alone, task), values(out / name, task)
        found = next(item for item in comparison.outcomes if (item.task, item.metric) == (task, first))
        lost, won = (set(np.flatnonzero(sign * (after - before) > 0).tolist()) for sign in (-1, 1))
        assert (found.right_to_wrong, found.wrong_to_right) == (len(lost), len(won))
        flips = {(flip.doc_id, flip.direction) for flip in comparison.flips if flip.task == task}
        assert flips == {(item, "right_to_wrong") for item in lost} | {(item, "wrong_to_right") for item in won}
        assert found.difference == pytest.approx(after.mean() - before.mean())
        pooled.append(after - before)
    differences = np.concatenate(pooled)
    whole = next(item for item in comparison.outcomes if item.task == ALL)
    assert (whole.low, whole.high) == difference_interval(differences)[:2]
    down, up = int((differences < 0).sum()), int((differences > 0).sum())
    assert (whole.num_documents, whole.right_to_wrong, whole.wrong_to_right) == (3 * NUM_DOCUMENTS, down, up)
    assert whole.mcnemar_p == pytest.approx(stats.binomtest(down, down + up).pvalue if down + up else 1)


@pytest.mark.long
def test_both_modes_say_the_same(models: dict[str, Path], report_of: Callable[[str], Report], out: Path) -> None:
    report = recorded(models[RESIDENT], MODEL, out, tasks=[TASK])
    whole = report.comparison.divergences[0]
    exact = metric(report_of(RESIDENT), "kl_mean")
    assert abs(whole.kl.mean - exact) <= 4 * whole.kl_sampling_error + 1e-6
    assert whole.kl_lower <= exact + 1e-6
