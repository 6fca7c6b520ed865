"""Bounds on metrics: kept, broken, unknown; and their names, against what will be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check.recipe import metrics_of
from olive_ext.config import Bound, EvaluationConfig, EvaluationSettings
from olive_ext.errors import ConfigError, TaskError
from olive_ext.report import Metric
from olive_ext.report.comparison import ClaimResult, Comparison
from olive_ext.report.metrics import comparison_metrics, matching
from olive_ext.report.verdict import Reason
from olive_ext.run.bounds import broken_bounds, kept_bounds, refuse_names
from olive_ext.run.evaluation import evaluate, load_requested_tasks
from olive_ext.run.models import Models
from tests.backends.local_tasks import write_tasks
from tests.exports.hf import hf_model
from tests.refusals import refused, tells
from tests.report.test_comparison import outcome

METRICS = [
    Metric("choice", "acc", "none", 0.5),
    Metric("letters", "acc", "none", 0.75),
    Metric("letters", "kl_mean", "none", 0.5, higher_is_better=False),
    Metric("all", "kl_mean", "none", 0.03125, higher_is_better=False),
    Metric("generate", "exact_match", "strict", 0.125),
    Metric("generate", "exact_match", "loose", 0.75),
    Metric("size_on_disk", "bytes", "none", 1_200_000, higher_is_better=False),
    Metric("broken", "f1", "none", math.nan),
    Metric("near", "error", "none", 0.02000004, higher_is_better=False),
]


def broken(metrics: Sequence[Metric] = METRICS, **bound: Any) -> list[str]:
    return [reason.words for reason in broken_bounds([Bound.parse(bound)], metrics)]


@pytest.mark.parametrize(
    ("bound", "lines"),
    [
        ({"metric": "acc", "task": "choice", "min": 0.5, "max": 0.5}, []),
        ({"metric": "kl_mean", "max": 0.04}, []),
        ({"metric": "kl_mean", "task": "letters", "min": 0.4}, []),
        ({"metric": "exact_match", "task": "generate", "filter": "loose", "min": 0.7}, []),
        ({"metric": "size_on_disk", "max": 2e6}, []),
        ({"metric": "letters/acc", "min": 0.7}, []),
        ({"metric": "kl_mean", "max": 0.02}, ["all/kl_mean = 0.0312, required at most 0.0200"]),
        (
            {"metric": "acc", "task": "letters", "min": 0.8, "max": 0.9},
            ["letters/acc = 0.7500, required at least 0.8000"],
        ),
        (
            {"metric": "exact_match", "filter": "strict", "min": 0.5},
            ["generate/exact_match,strict = 0.1250, required at least 0.5000"],
        ),
        ({"metric": "bytes", "max": 1e6}, ["size_on_disk/bytes = 1200000, required at most 1000000"]),
        # as many digits as distinguish a value from its bound; no number breaks every bound
        ({"metric": "error", "max": 0.02}, ["near/error = 0.02000004, required at most 0.0200"]),
        (
            {"metric": "f1", "min": 0, "max": 1},
            ["broken/f1 = nan, required at most 1", "broken/f1 = nan, required at least 0"],
        ),
    ],
)
def test_each_broken_bound_has_its_line_with_the_value_and_the_bound(bound: dict[str, Any], lines: list[str]) -> None:
    assert broken(**bound) == lines


def test_kept_bounds_have_the_value_and_the_limits_as_written() -> None:
    bounds = [{"metric": "kl_mean", "max": 0.0412345}, {"metric": "acc", "task": "letters", "min": 0.7, "max": 0.8}]
    made = [Bound.parse(bound) for bound in [*bounds, {"metric": "kl_mean", "max": 0.01}]]
    one, other = kept_bounds(made, METRICS)
    assert one == "all/kl_mean = 0.0312, required at most 0.0412345"
    assert other == "letters/acc = 0.7500, required at most 0.8000 and at least 0.7000"


def test_loss_is_told_in_points_as_fail_on_loss_is_written() -> None:
    bounds = EvaluationSettings.parse({"tasks": ["a"], "reference": "r", "fail_on_loss": 1}).bounds
    lost = [Metric("all", "accuracy_difference", "none", value) for value in (-0.0114, -0.010004, -0.01)]
    told = ["1.1 pt, 1 (`fail_on_loss`)", "1.0004 pt, 1 (`fail_on_loss`)"]
    found = [broken_bounds(bounds, [one]) for one in lost]
    assert [[tells(reason.words, told[number]) for reason in reasons] for number, reasons in enumerate(found)] == [
        [True],
        [True],
        [],
    ]
    whole = Reason("bound_broken", "all", "accuracy_difference", -0.0114, "", "", field="fail_on_loss", bound=-0.01)
    assert [replace(reason, words="") for reason in found[0]] == [whole]


@pytest.mark.parametrize(
    ("bound", "holds"),
    [
        ({"metric": "acc"}, ("'acc'", "choice/acc, letters/acc")),
        ({"metric": "f2", "task": "choice"}, ("'f2'", "'choice'", "choice/acc")),
        ({"metric": "tokens_per_second"}, ("'tokens_per_second'",)),
        ({"metric": "requests_per_second", "task": "requests_per_second"}, ("requests_per_second",)),
        ({"metric": "exact_match"}, ("'exact_match'", "generate/exact_match,strict, ")),
    ],
)
def test_bound_on_no_metric_or_on_several_is_refused_with_what_there_is(
    bound: dict[str, Any], holds: tuple[str, ...]
) -> None:
    with refused(ConfigError, "wrong_value", "require", holds=holds):
        broken(**bound, max=1)


def test_metric_whose_filter_is_empty_has_any() -> None:
    olive, *_ = metrics = [
        Metric("t", "wer", "", 0.5),
        Metric("t", "wer", "none", 0.6),
        Metric("u", "wer", "none", 0.7),
    ]
    assert matching(metrics, "wer", "t", "strict") == [olive]
    assert matching(metrics, "wer", "t", "none") == metrics[:2]


def test_number_of_drawn_documents_alone_holds_no_bound() -> None:
    drawn = Metric("wiki", "word_perplexity", "none", 9.0, n=5, num_population=40, is_estimate=False)
    (line,) = broken([drawn], metric="word_perplexity", max=10)
    assert tells(line, "wiki/word_perplexity (5 of 40")
    for whole in replace(drawn, is_estimate=True), replace(drawn, n=40), replace(drawn, num_population=None):
        assert broken([whole], metric="word_perplexity", max=10) == []


@pytest.mark.parametrize(("tasks", "is_open"), [(("choice",), True), (("choice", "letters", "all"), False)])
def test_open_claim_meets_no_bound_on_its_only_task(tasks: Sequence[str], is_open: bool) -> None:
    """Whose numbers are those over all tasks; and bounds on its metric alone."""
    outcomes = tuple(outcome(task, "acc", difference=-0.004) for task in tasks)
    given = ("accuracy_difference", "above", -0.01, 0.95, "unknown", -0.004, -0.02, 0.01, 6, 6, "a")
    claim = ClaimResult(*given, (tasks[-1], "acc", "none"), num_unknown=2)
    metrics = [*comparison_metrics(Comparison({}, (), outcomes, certainty=claim)), *METRICS]
    for asked in {"task": "choice"}, {"metric": "choice/accuracy_difference"}:
        assert bool(broken(metrics, **{"metric": "accuracy_difference", "min": -0.01, **asked})) == is_open
    (line,) = broken(metrics, metric="accuracy_difference", min=-0.5)
    assert line.startswith("all/accuracy_difference ")
    assert broken(metrics, metric="kl_mean", task="all", max=0.04) == []


TASKS = {
    "choice": {"acc", "acc,none", "acc_norm", "acc_norm,none"},
    "generate": {"exact_match", "exact_match,strict-match"},
    "size_on_disk": {"bytes", "bytes,none"},
}
COMPARED = ("kl_mean", "accuracy_difference_low")


LISTED = {"metric": "acc_norm", "task": "tiny_group"}
TEXTS = {"reference": "m", "tasks": ["tiny_rolling"]}


@pytest.mark.parametrize(
    ("bound", "more", "code", "words"),
    [
        # a group is loaded to know what it measures
        ({"metric": "acc", "task": "tiny_choice"}, {}, "", ""),
        ({"metric": "acc", "task": "tiny_group"}, {}, "", ""),
        ({"metric": "exact_match", "filter": "loose"}, {}, "", ""),
        (LISTED, {}, "unknown_name", "'acc_norm' 'tiny_group' acc"),
        ({"metric": "foo"}, {"reference": "m"}, "unknown_name", "acc, acc_norm, docs/comparison.md"),
        ({"metric": "acc", "task": "tiny_rolling"}, {}, "unknown_name", "bits_per_byte, word_perplexity"),
        ({"metric": "exact_match", "filter": "lose"}, {}, "unknown_name", "'exact_match,lose' 'exact_match,loose'"),
        ({"metric": "acc", "task": "tiny_grup"}, {}, "unknown_name", "'tiny_grup' 'tiny_group'"),
        ({"metric": "kl_mean", "task": "all"}, {}, "missing", "'kl_mean' 'all' 'reference'"),
        # whole texts alone have no answers that are right or wrong
        ({"metric": "accuracy_difference"}, TEXTS, "unknown_name", "'accuracy_difference' kl_mean"),
        ({"metric": "acc@tiny_group"}, {}, "unknown_name", "'tiny_group/acc'"),
        # names of a group pass where nothing is loaded
        ({"metric": "ac"}, {"loads": False}, "", ""),
        ({"metric": "kl_mean"}, {"loads": False}, "missing", "'reference'"),
        ({"metric": "kl_mean", "task": "all"}, {"loads": False, "reference": "m"}, "", ""),
    ],
)
def test_names_of_bounds_are_refused_by_the_tasks(
    tmp_path: Path, bound: dict[str, Any], more: dict[str, Any], code: str, words: str
) -> None:
    given = {"tasks": ["tiny_group", "tiny_generate"], "include_path": str(write_tasks(tmp_path / "tasks"))}
    how = {"loads": more.get("loads", True)}
    more = {key: value for key, value in more.items() if key != "loads"}
    settings = EvaluationSettings.parse({**given, "require": [{"max": 0.5, **bound}], **more})
    with refused(ConfigError, code, "passes.g.require", holds=tuple(words.split())) if code else nullcontext():
        refuse_names(settings, metrics_of(settings, **how), "passes.g")


@pytest.mark.parametrize(("loss", "lines"), [(0.01, 1), (1, 0)])
def test_loss_that_looks_like_a_share_is_said_in_points(
    loss: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TaskError):
        evaluate(str(hf_model("llama")), reference=str(hf_model("gpt2")), tasks=["no_such"], fail_on_loss=loss)
    assert sum("'fail_on_loss' = 0.01 is 0.01 points" in line for line in caplog.messages) == lines


@pytest.mark.parametrize("given", [{"fail_on_loss": 1}, {"require": ["kl_mean<=0.01"]}])
def test_bound_on_a_model_against_itself_is_refused_before_anything_is_measured(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """The whole evaluation ran first, and the error named `require`. Scores keep their bounds."""
    path, tasks = str(hf_model("llama")), {"tasks": ["tiny_choice"], "include_path": str(write_tasks(tmp_path / "t"))}
    given = {"model": {"path": path, "kind": "hf"}, "reference": path, **tasks, **given}
    models = Models(EvaluationConfig.parse(given))
    code = "not_comparable" if "fail_on_loss" in given else "missing"
    with refused(ConfigError, code, next(reversed(given)), holds="reference"):
        load_requested_tasks(models, None)
    scores = models.config.model_copy(update={"fail_on_loss": None, "require": [Bound(metric="acc", min=0.5)]})
    assert load_requested_tasks(Models(scores), None) is not None
