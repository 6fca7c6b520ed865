"""A comparison's numbers under the names that goals and bounds use."""

from __future__ import annotations

from olive_ext.report.comparison import ALL, Comparison
from olive_ext.report.metrics import COMPARISON_NAMES, comparison_metrics
from tests.report.test_comparison import divergence, outcome


def values(comparison: Comparison) -> dict[tuple[str, str], float]:
    return {(metric.task, metric.metric): metric.value for metric in comparison_metrics(comparison)}


def test_every_name_is_there_for_the_task_and_for_all() -> None:
    found = values(Comparison({}, (divergence("choice"),), (outcome("choice"),)))
    assert {name for task, name in found if task == "choice"} == set(COMPARISON_NAMES)
    assert {name for task, name in found if task == ALL} == set(COMPARISON_NAMES)
    assert found[ALL, "kl_mean"] == found["choice", "kl_mean"] == 0.0123
    assert found["choice", "accuracy_difference_low"] == -0.012
    assert found["choice", "flips_right_to_wrong"] == 4.0


def test_all_is_over_all_tasks_where_there_are_several() -> None:
    several = (divergence("a", 0.1), divergence("b", 0.3), divergence(ALL, 0.2))
    found = values(Comparison({}, several, (outcome("a"), outcome(ALL, "accuracy", difference=-0.5))))
    assert found[ALL, "kl_mean"] == 0.2
    assert found[ALL, "accuracy_difference"] == -0.5


def test_first_right_or_wrong_metric_counts() -> None:
    outcomes = (
        outcome("a", "bleu", is_binary=False, difference=9.0),
        outcome("a", "acc", difference=-0.1),
        outcome("a", "acc_norm", difference=-0.2),
    )
    assert values(Comparison({}, (), outcomes))["a", "accuracy_difference"] == -0.1
    assert values(Comparison({}, (), outcomes[:1])) == {}


def test_difference_is_of_being_right_where_lower_is_better() -> None:
    found = values(
        Comparison({}, (), (outcome("a", difference=0.1, low=0.05, high=0.2, higher_is_better=False),)),
    )
    names = ("accuracy_difference", "accuracy_difference_low", "accuracy_difference_high")
    assert [found["a", name] for name in names] == [-0.1, -0.2, -0.05]


def test_directions_are_set() -> None:
    metrics = comparison_metrics(Comparison({}, (divergence(),), (outcome(),)))
    better_high = ["top1_agreement", "flips_wrong_to_right", "accuracy_difference", "mcnemar_p"]
    better_high += ["accuracy_difference_low", "accuracy_difference_high"]
    assert {metric.metric for metric in metrics if metric.higher_is_better} == set(better_high)
