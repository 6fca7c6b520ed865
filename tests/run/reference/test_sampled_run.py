"""Evaluations that stop: on two tiny torch models, against the evaluation of all documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.backends.task_loading import LoadedTasks, load_tasks
from olive_ext.config import Bound, ClaimConfig, EvaluationConfig
from olive_ext.errors import LostRequestsError, TaskError
from olive_ext.report.comparison import ALL
from olive_ext.report.metrics import comparison_metrics, read_metrics
from olive_ext.report.verdict import verdict
from olive_ext.run.bounds import broken_bounds
from olive_ext.run.reference.answers import Answers, DocumentAnswer
from olive_ext.run.reference.comparison_run import Mode, TaskRun
from olive_ext.run.reference.observer import Observer
from olive_ext.run.reference.sampled_run import ReferenceRun, question_of, sampled_metrics
from tests.backends.local_tasks import CHOICE, LOADER, write_tasks
from tests.backends.reference import model
from tests.refusals import refused, tells
from tests.run.duo import TwoModels, perturbed

COUNT = 160
MANY = """
def many(**_):
    rows = [{"question": " ".join(WORDS[(7 * n + k) %% 14] for k in range(3 + n %% 5)), "answer": n %% 3,
             "choices": [f" {WORDS[(n + k) %% 14]}{n %% 11}" for k in range(3)], "text": WORDS[n %% 14]}
            for n in range(%d)]
    return {"test": datasets.Dataset.from_list(rows)}
"""
MODES: tuple[Mode, ...] = ("recorded", "resident", "answers")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> LoadedTasks:
    return _tasks(tmp_path_factory.mktemp("tasks"), "many_choice")


def _tasks(folder: Path, *names: str) -> LoadedTasks:
    write_many(write_tasks(folder))
    return load_tasks(list(names), str(folder))


def write_many(folder: Path) -> None:
    """Adds the task `many_choice` of `COUNT` documents, whose shots are drawn anew for each, to those in `folder`."""
    (folder / "local.py").write_text(LOADER + MANY % COUNT)
    many = CHOICE.replace("tiny_choice", "many_choice").replace("local.load", "local.many")
    (folder / "many_choice.yaml").write_text(many + "fewshot_split: test\nnum_fewshot: 1\n")


class Run:
    """One evaluation, as `evaluate` makes it."""

    def __init__(
        self,
        tasks: LoadedTasks,
        mode: Mode,
        candidate: Any,
        *,
        loses: Any = None,
        reference_loses: Any = None,
        **settings: Any,
    ) -> None:
        given = {"model": {"path": "m"}, "reference": {"path": "r", "kind": "onnx"}, "tasks": list(tasks.tasks)}
        config = EvaluationConfig.parse({**given, "bootstrap_iters": 0, **settings})
        models = TwoModels(candidate, config)
        if reference_loses is not None:
            for name in "open_reference", "open_resident":
                setattr(models, name, partial(_losing_model, getattr(models, name), reference_loses))
        task_run = TaskRun(models, mode, tasks)
        task_run.run_reference_alone()
        lm: Any = task_run.open_candidate()
        self.asked: Counter[Any] = Counter()
        ask = lm.session.run_slices

        def counted(call: str, slices: Any, whose: Any = None) -> Any:
            asked = [item for part in slices for item in part]
            if call == "loglikelihood":
                self.asked.update((*request.context, -1, *request.target) for _, request in asked)
            return ask(call, [asked], whose)

        lm.session.run_slices = counted
        if loses is not None:
            _lose(lm, loses)
        self.results = task_run.run(lm)
        task_run.read(self.results["samples"])
        comparison = task_run.finish(lm)
        assert comparison is not None
        self.comparison = comparison
        metrics = sampled_metrics(read_metrics(self.results), self.comparison, self.results)
        self.metrics = {(item.task, item.metric): item for item in (*metrics, *comparison_metrics(self.comparison))}


def _losing_model(opens: Any, loses: Any, *arguments: Any) -> Any:
    lm = opens(*arguments)
    _lose(lm, loses)
    return lm


def _lose(lm: Any, loses: Any) -> None:
    """As workers that crash on every request that `loses` names."""
    ask = lm.session.run_slices

    def lossy(call: str, slices: Any, whose: Any = None) -> Any:
        asked = [item for part in slices for item in part]
        lost = {key: "crashed" for key, one in asked if call == "loglikelihood" and loses(one)}
        yield from ((key, output) for key, output in ask(call, [asked], whose) if key not in lost)
        if lost:
            raise LostRequestsError(lost)

    lm.session.run_slices = lossy


def some(request: Any) -> bool:
    """A few per cent of the requests, the same in every run."""
    return sum(request.context) % 29 == 0


def enough(tasks: LoadedTasks, mode: Mode, noise: float, **certain: Any) -> Run:
    return Run(tasks, mode, perturbed(noise), documents="enough", certain=certain)


@pytest.fixture(scope="module")
def whole(tasks: LoadedTasks) -> Run:
    return Run(tasks, "recorded", perturbed(0.6))


@pytest.fixture(scope="module")
def stopped(tasks: LoadedTasks) -> Callable[[Mode], Run]:
    """The run of a mode that stops as a loss of 20 points is excluded."""
    return cache(lambda mode: enough(tasks, mode, 0.6, within=0.2))


@pytest.mark.parametrize("mode", MODES)
def test_stops_when_a_claim_is_certain(stopped: Callable[[Mode], Run], whole: Run, mode: Mode) -> None:
    found = stopped(mode)
    certainty = found.comparison.certainty
    truth = whole.metrics[ALL, "accuracy_difference"].value
    assert certainty.verdict == ("ok" if truth >= -0.2 else "loss")
    assert certainty.low <= truth <= certainty.high
    assert 0 < certainty.num_evaluated < certainty.num_documents == COUNT
    lines = found.results["samples"]["many_choice"]
    assert len({line["doc_id"] for line in lines}) == len(lines) == certainty.num_evaluated
    assert found.results["n-samples"]["many_choice"]["effective"] == certainty.num_evaluated
    words = f"{certainty.num_evaluated} of 160 documents, 20 (95 %"
    assert any(tells(text, words) for text in verdict(found.comparison).lines)


def test_modes_draw_the_same_documents(stopped: Callable[[Mode], Run]) -> None:
    recorded, resident = map(stopped, ("recorded", "resident"))
    assert recorded.comparison.certainty == resident.comparison.certainty
    assert recorded.comparison.divergences == resident.comparison.divergences
    assert recorded.metrics == resident.metrics


def test_document_is_asked_as_in_the_whole_run_and_once(stopped: Callable[[Mode], Run], whole: Run) -> None:
    found = stopped("recorded")
    assert found.asked.keys() < whole.asked.keys()
    assert all(count <= whole.asked[request] for request, count in found.asked.items())


def test_claims_on_distributions_are_decided_by_documents_as_clusters(tasks: LoadedTasks, whole: Run) -> None:
    kl, agreement = (whole.metrics[ALL, name].value for name in ("kl_mean", "top1_agreement"))
    below = enough(tasks, "recorded", 0.6, metric="kl_mean", below=2 * kl).comparison.certainty
    above = enough(tasks, "resident", 0.6, metric="top1_agreement", above=agreement / 2).comparison.certainty
    assert (below.verdict, above.verdict) == ("ok", "ok")
    assert below.low <= kl <= below.high
    assert above.low <= agreement <= above.high
    assert below.num_evaluated < COUNT
    assert above.num_evaluated < COUNT
    assert "KL below" in below.sentence()
    assert "top-1 agreement above" in above.sentence()


def test_tasks_without_right_answers_are_refused_for_accuracy(tmp_path: Path) -> None:
    tasks = _tasks(tmp_path, "tiny_choice", "tiny_rolling")
    with refused(TaskError, "task", "documents", holds="tiny_rolling"):
        enough(tasks, "recorded", 0.1, within=0.01)


def test_distributions_cannot_be_claimed_of_models_without_them(tasks: LoadedTasks) -> None:
    with refused(TaskError, "unsupported", holds="kl_mean"):
        enough(tasks, "answers", 0.1, metric="kl_mean", below=0.1)


def test_generations_count_as_positions(tmp_path: Path) -> None:
    tasks = _tasks(tmp_path, "tiny_generate", "tiny_rolling")
    whole = Run(tasks, "recorded", perturbed(0.6))
    found = enough(tasks, "resident", 0.6, metric="kl_mean", below=whole.metrics[ALL, "kl_mean"].value)
    assert found.comparison.certainty is not None
    for own, true in zip(found.comparison.divergences, whole.comparison.divergences, strict=True):
        assert own.num_positions == true.num_positions
        assert own.kl.mean == pytest.approx(true.kl.mean)


def test_identical_model_is_certain_as_well(tasks: LoadedTasks) -> None:
    found = Run(tasks, "resident", model(), documents="enough", certain={"within": 0.1})
    assert found.comparison.certainty.verdict == "ok"
    assert found.comparison.certainty.num_evaluated < COUNT


@pytest.mark.parametrize(
    ("metric", "side", "distances"),
    [
        ("kl_mean", "below", (1.0, -0.5)),
        ("top1_agreement", "above", (-0.5, 0.5)),
        ("accuracy_difference", "above", (-0.3, 0.3)),
    ],
)
def test_bounds_are_judged_as_the_claim_was_decided(
    tasks: LoadedTasks, whole: Run, metric: str, side: str, distances: tuple[float, float]
) -> None:
    truth = whole.metrics[ALL, metric].value
    size = 1.0 if metric == "accuracy_difference" else truth
    for distance, expected in zip(distances, ("ok", "loss"), strict=True):
        bound = truth + distance * size
        found = enough(tasks, "resident", 0.6, metric=metric, **{side: bound})
        assert found.comparison.certainty.verdict == expected
        required = Bound.model_validate({"metric": metric, "min" if side == "above" else "max": bound})
        assert bool(broken_bounds([required], list(found.metrics.values()))) == (expected == "loss")


CLAIMS: list[dict[str, Any]] = [
    {"within": 0.08},
    {"metric": "kl_mean", "below": 9.0},
    {"metric": "top1_agreement", "above": 0.01},
]


@pytest.mark.parametrize(("mode", "certain"), zip(("recorded", "resident", "recorded"), CLAIMS, strict=True))
def test_document_without_an_answer_is_whatever_breaks_the_claim(
    tasks: LoadedTasks, mode: Mode, certain: dict[str, Any]
) -> None:
    found = Run(tasks, mode, perturbed(0.6), loses=some, documents="enough", certain=certain)
    certainty = found.comparison.certainty
    assert certainty.num_unknown > 0
    assert found.comparison.missing >= certainty.num_unknown
    assert "answer" in certainty.sentence()
    assert "requests" in verdict(found.comparison).finding
    assert verdict(found.comparison).code != "no_loss_found"


@pytest.mark.parametrize("mode", MODES)
def test_claim_stays_open_where_what_is_lost_would_decide(tasks: LoadedTasks, whole: Run, mode: Mode) -> None:
    truth = whole.metrics[ALL, "accuracy_difference"].value
    found = Run(tasks, mode, perturbed(0.6), loses=some, documents="enough", certain={"above": truth - 1e-6})
    certainty = found.comparison.certainty
    assert (certainty.verdict, certainty.num_evaluated) == ("unknown", COUNT)
    assert certainty.low <= truth <= certainty.high
    assert any(text.startswith("all 160 documents, ") for text in verdict(found.comparison).lines)
    assert "not certain" in verdict(found.comparison).finding
    required = Bound.model_validate({"metric": "accuracy_difference", "min": -0.99})
    (reason,) = broken_bounds([required], list(found.metrics.values()))
    assert "is undecided" in reason.words


@pytest.mark.parametrize(("mode", "certain"), zip(("resident", "recorded", "resident"), CLAIMS, strict=True))
def test_documents_that_the_reference_lost_are_not_drawn(
    tasks: LoadedTasks, mode: Mode, certain: dict[str, Any]
) -> None:
    found = Run(tasks, mode, perturbed(0.6), reference_loses=some, documents="enough", certain=certain)
    certainty = found.comparison.certainty
    assert 0 < certainty.num_documents < COUNT
    assert certainty.num_unknown == 0
    assert found.comparison.missing >= COUNT - certainty.num_documents


NAN = float("nan")


@pytest.mark.parametrize(
    ("kl", "error", "expected"), [(0.3, 0.0, 0.3), (-0.1, 0.05, 0.0), (0.9, 0.1, 1.0), (5.0, 0.0, 1.0), (NAN, 0.0, NAN)]
)
def test_records_error_is_a_part_of_the_value_and_what_is_not_finite_is_not_known(
    kl: float, error: float, expected: float
) -> None:
    answers = Answers("t", "none", {}, {0: DocumentAnswer("", {}, "")})
    asked = question_of(ClaimConfig(metric="kl_mean", below=0.1), ReferenceRun({}, [answers], _Positions()))
    rows = np.zeros(1, [("document", "i4"), ("kl", "f4"), ("kl_lower", "f4"), ("kl_variance", "f4"), ("same_top", "?")])
    rows["kl"], rows["kl_lower"], rows["kl_variance"] = kl, np.minimum(kl, 0.05), error**2
    values, lows, variances = asked.values(asked.documents, [], (), _Positions(rows))
    assert values == pytest.approx(expected, nan_ok=True)
    assert lows == pytest.approx(np.maximum(np.minimum(kl, 0.05), 0), nan_ok=True)
    assert variances == pytest.approx(error**2)


class _Positions(Observer):
    """One target of each document."""

    def __init__(self, rows: Any = None) -> None:
        super().__init__()
        self._rows = rows

    def rows(self, task: str) -> Any:
        return self._rows

    def targets_of(self, task: str, document: int) -> tuple[int, float]:
        return 1, -1.0
