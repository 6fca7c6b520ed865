"""Names of metrics, against what will be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import WorkflowSettings
from olive_ext.errors import ConfigError
from olive_ext.run.bounds import check_names, refuse_names
from tests.backends.local_tasks import write_tasks
from tests.refusals import refused

TASKS = {
    "choice": {"acc", "acc,none", "acc_norm", "acc_norm,none"},
    "generate": {"exact_match", "exact_match,strict-match"},
    "size_on_disk": {"bytes", "bytes,none"},
}
COMPARED = ("kl_mean", "accuracy_difference_low")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (None, "acc"),
        ("choice", "acc_norm"),
        (None, "choice/acc"),
        (None, "choice/acc,none"),
        (None, "size_on_disk"),
        ("generate", "exact_match,strict-match"),
        (None, "generate/exact_match,strict-match"),
    ],
)
def test_name_that_some_task_declares_passes_before_anything_runs(task: str | None, name: str) -> None:
    check_names([(task, name)], TASKS, (), "passes.g.require")
    with refused(ConfigError, "unknown_name", "passes.g.require"):
        check_names([(task, name)], {"other": {"f1"}}, (), "passes.g.require")


@pytest.mark.parametrize(("task", "name"), [(None, "kl_mean"), ("all", "kl_mean,none"), ("choice", "kl_mean")])
def test_name_of_a_comparison_passes_where_there_is_a_reference(task: str | None, name: str) -> None:
    check_names([(task, name)], TASKS, COMPARED, "passes.g.require")
    with pytest.raises(ConfigError):
        check_names([(task, name)], TASKS, (), "passes.g.require")


@pytest.mark.parametrize(
    ("task", "name", "message"),
    [
        (None, "ac", "'w': no metric 'ac' is measured: did you mean 'acc'?"),
        (
            "choice",
            "word_perplexity",
            "no metric 'word_perplexity' of task 'choice' is measured; there are acc, acc_norm",
        ),
        ("choise", "acc", "'w': no task 'choise' is measured: did you mean 'choice'?"),
        (None, "kl_mean", "no metric 'kl_mean' is measured: it needs 'reference'"),
        ("choice", "kl_p99", "no metric 'kl_p99' of task 'choice' is measured: it needs 'reference'"),
        (None, "all/kl_mean", "no metric 'all/kl_mean' is measured: it needs 'reference'"),
        (
            "generate",
            "exact_match,strict",
            "'exact_match,strict' of task 'generate' is measured: did you mean 'exact_match,strict-match'?",
        ),
    ],
)
def test_name_that_no_report_will_have_is_refused_with_the_nearest(task: str | None, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_names([(task, name)], TASKS, (), "w")
    assert message in str(raised.value)


def test_name_may_be_of_a_task_whose_metrics_are_not_known_yet() -> None:
    asked = [(None, "anything"), ("later", "anything")]
    check_names(asked, {**TASKS, "later": None}, (), "w")
    with refused(ConfigError, "unknown_name", "w", holds="anything"):
        check_names(asked, {**TASKS, "later": {"acc"}}, (), "w")


def test_distance_needs_a_reference_even_where_the_tasks_are_not_known() -> None:
    check_names([("any", "acc"), (None, "kl_mean")], None, COMPARED, "w")
    with refused(ConfigError, "missing", "w", holds=("kl_mean", "reference")):
        check_names([("any", "acc"), (None, "kl_mean")], None, (), "w")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_tasks(tmp_path / "tasks"))


def refusal(folder: str, bound: dict[str, Any], *, loads_tasks: bool = True, **settings: Any) -> str:
    given = {"tasks": ["tiny_group", "tiny_generate"], "include_path": folder, "require": [{"max": 1, **bound}]}
    try:
        refuse_names(WorkflowSettings.parse({**given, **settings}), "passes.g", loads_tasks=loads_tasks)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"metric": "acc", "task": "tiny_choice"}, ""),
        ({"metric": "acc", "task": "tiny_group"}, ""),
        ({"metric": "exact_match", "filter": "loose"}, ""),
        (
            {"metric": "acc_norm", "task": "tiny_group"},
            "no metric 'acc_norm' of task 'tiny_group' is measured; there are acc",
        ),
        ({"metric": "acc", "task": "tiny_rolling"}, "; there are bits_per_byte, word_perplexity"),
        (
            {"metric": "exact_match", "filter": "lose"},
            "no metric 'exact_match,lose' is measured: did you mean 'exact_m",
        ),
        ({"metric": "acc", "task": "tiny_grup"}, "no task 'tiny_grup' is measured: did you mean 'tiny_group'?"),
        ({"metric": "kl_mean", "task": "all"}, "no metric 'kl_mean' of task 'all' is measured: it needs 'reference'"),
    ],
)
def test_group_is_loaded_to_know_what_it_measures(folder: str, bound: dict[str, Any], message: str) -> None:
    found = refusal(folder, bound)
    assert message in found
    assert bool(message) == bool(found)


def test_names_of_a_group_pass_where_nothing_is_loaded(folder: str) -> None:
    assert refusal(folder, {"metric": "ac"}, loads_tasks=False) == ""
    assert "needs 'reference'" in refusal(folder, {"metric": "kl_mean"}, loads_tasks=False)
    assert refusal(folder, {"metric": "kl_mean", "task": "all"}, loads_tasks=False, reference="m") == ""


@pytest.mark.parametrize("name", ["kl_max", "all/kl_p99", "flips_right_to_wrong", "mcnemar_p,none"])
def test_bound_on_what_drawn_documents_do_not_tell_is_refused(name: str) -> None:
    given = {"tasks": ["a"], "reference": "r", "documents": "enough", "certain": {"within": 0.01}}
    settings = WorkflowSettings.parse({**given, "require": [{"metric": name, "max": 1}]})
    with refused(ConfigError, "not_comparable", "passes.g.require", holds=("documents", "enough", "all")):
        refuse_names(settings, "passes.g")
