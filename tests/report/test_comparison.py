"""Comparisons survive the way through JSON, and have names that goals and bounds use."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from olive_ext.report import Metric, Report, from_json, to_json
from olive_ext.report.comparison import ALL, Bin, Comparison, Divergence, Flip, Outcome, Spread
from olive_ext.report.metrics import COMPARISON_NAMES, comparison_metrics
from olive_ext.report.verdict import Reason


def divergence(task: str = "wiki", kl: float = 0.0123, **values: object) -> Divergence:
    given = {
        "task": task,
        "num_documents": 200,
        "num_positions": 40_000,
        "kl": Spread(kl, 0.001, 0.004, 0.03, 0.2, 0.9, 3.5),
        "kl_lower": 0.0119,
        "kl_sampling_error": 0.0002,
        "top1_agreement": 0.971,
        "top1_agreement_stderr": 0.002,
        "top_probability_difference": -0.01,
        "top_probability_rms": 0.03,
        "perplexity_reference": 10.0,
        "perplexity_candidate": 10.2,
        "perplexity_ratio": 1.02,
        "perplexity_ratio_stderr": 0.004,
        "histogram": (Bin("0", 3, 1e-7), Bin("1e-06", 0, None)),
        "by_position": (Bin("0-15", 3, 0.5),),
        "by_class": (Bin("word start", 3, 0.5),),
        "is_text": task == "wiki",
    }
    return Divergence(**{**given, **values})


def outcome(task: str = "choice", metric: str = "acc", **values: object) -> Outcome:
    given = {
        "task": task,
        "metric": metric,
        "filter": "none",
        "num_documents": 400,
        "reference": 0.77,
        "candidate": 0.766,
        "difference": -0.004,
        "low": -0.012,
        "high": 0.004,
        "right_to_wrong": 4,
        "wrong_to_right": 2,
        "mcnemar_p": 0.6875,
        "documents_needed": {"0.01": 1500, "0.005": None},
    }
    given |= values
    if "mcnemar_p" not in values and not given["low"] <= 0 <= given["high"]:
        given["mcnemar_p"] = 0.001  # as the interval says
    return Outcome(**given)


def comparison() -> Comparison:
    flip = Flip("choice", 7, "right_to_wrong", "2 + 2 =", "4", "4", "5", "acc", "none")
    return Comparison(
        {"path": "float", "kind": "onnx", "mode": "recorded"}, (divergence(),), (outcome(),), (flip,), {"a": {"b": 1}}
    )


def test_comparisons_survive_json_with_numbers_that_json_lacks() -> None:
    report = Report(metrics=(Metric("choice", "acc", "none", 0.5),), comparison=comparison())
    assert from_json(to_json(report)) == report
    assert from_json(to_json(Report(metrics=()))).comparison is None
    old = json.loads(to_json(Report(metrics=())))
    del old["comparison"]
    assert from_json(json.dumps(old)).comparison is None
    broken = Reason("bound_broken", "a", "acc", math.nan, words="acc = nan, required at least 0.5", field="require")
    kept = json.loads(to_json(replace(report, broken=(replace(broken, bound=0.5),))))
    assert from_json(json.dumps(kept)).broken[0].bound == 0.5
    spread = Spread(math.inf, None, math.nan, 0.0, 0.0, 0.0, math.inf)
    found = from_json(to_json(Report((), comparison=Comparison({}, (replace(divergence(), kl=spread),)))))
    (back,) = found.comparison.divergences
    assert (back.kl.mean, back.kl.maximum, back.kl.stderr) == (math.inf, math.inf, None)
    assert math.isnan(back.kl.median)


def test_text_that_is_no_report_is_refused_with_the_key() -> None:
    old = json.loads(to_json(Report(metrics=(), comparison=comparison())))
    del old["comparison"]["outcomes"][0]["low"]
    with pytest.raises(ValueError, match=r"^comparison\.outcomes\.0\.low: Field required$"):
        from_json(json.dumps(old))
    with pytest.raises(ValueError, match=r"^newer: Unexpected keyword argument$"):
        from_json('{"metrics": [], "newer": 1}')
    with pytest.raises(ValueError, match=r"^as a whole: "):
        from_json("[]")


def values(*items: Divergence | Outcome) -> dict[tuple[str, str], float]:
    divergences = tuple(item for item in items if isinstance(item, Divergence))
    found = Comparison({}, divergences, tuple(item for item in items if isinstance(item, Outcome)))
    return {(metric.task, metric.metric): metric.value for metric in comparison_metrics(found)}


def test_every_number_has_a_name_for_its_task_and_for_all_tasks() -> None:
    """Of several the first metric that is right or wrong, and of errors the gain in being right."""
    found = values(divergence("choice"), outcome("choice"))
    assert found.keys() == {(task, name) for task in ("choice", ALL) for name in COMPARISON_NAMES}
    assert found[ALL, "kl_mean"] == found["choice", "kl_mean"] == 0.0123
    assert (found["choice", "accuracy_difference_low"], found["choice", "flips_right_to_wrong"]) == (-0.012, 4.0)
    several = (divergence("a", 0.1), divergence("b", 0.3), divergence(ALL, 0.2))
    found = values(*several, outcome("a"), outcome(ALL, "accuracy", difference=-0.5))
    assert (found[ALL, "kl_mean"], found[ALL, "accuracy_difference"]) == (0.2, -0.5)
    graded = outcome("a", "bleu", is_binary=False, difference=9.0)
    binary = (outcome("a", "acc", difference=-0.1), outcome("a", "acc_norm", difference=-0.2))
    assert values(graded, *binary)["a", "accuracy_difference"] == -0.1
    assert values(graded) == {}
    found = values(outcome("a", difference=0.1, low=0.05, high=0.2, higher_is_better=False))
    names = ("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
    assert [found["a", name] for name in names] == [-0.1, -0.2, -0.05]


def test_directions_are_set() -> None:
    metrics = comparison_metrics(Comparison({}, (divergence(),), (outcome(),)))
    better_high = ["top1_agreement", "flips_wrong_to_right", "accuracy_difference", "mcnemar_p"]
    better_high += ["accuracy_difference_low", "accuracy_difference_high"]
    assert {metric.metric for metric in metrics if metric.higher_is_better} == set(better_high)
