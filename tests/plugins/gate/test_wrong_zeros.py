"""What must never leave the gate as passed: losses that the logs, the baseline or the choice of a metric would hide."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.errors import ConfigError
from olive_ext.plugins.gate.bounds import Bound
from olive_ext.plugins.gate.decision import (
    Gated,
    _decided,
    gate,
    gate_answers,
    read_baseline,
    refuse_other_definitions,
)
from olive_ext.plugins.gate.forms import lines
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import Reason, Verdict
from olive_ext.run.reference.answers import Answers, DocumentAnswer
from tests.plugins.gate.test_gate import NUMBER, baseline, folder
from tests.refusals import refused
from tests.report.test_comparison import outcome
from tests.report.test_sampled import certainty
from tests.run.test_earlier_reports import line, place

__all__ = ["baseline"]


def decided(run: Path, file: Path, within: float = 5.0) -> Gated:
    """The decision on a folder."""
    gated = gate(str(run), str(file), within)
    assert isinstance(gated, Gated)
    return gated


def test_logs_of_some_documents_are_refused(baseline: Path) -> None:
    """The report knows of 400 documents, the log of the first 200: the others may all be lost."""
    run = folder(baseline.parent, "after", 40)
    log = run / "samples_colours.jsonl"
    log.write_text("\n".join(log.read_text().split("\n")[:200]) + "\n")
    for update in (False, True):
        with refused(ConfigError, "missing", "sample_log_num", holds=("colours", "200", "400")):
            gate(str(run), str(baseline), 5.0, update=update)


@pytest.mark.parametrize("keep", [True, False])
def test_documents_without_a_value_may_be_lost(keep: bool, baseline: Path) -> None:
    """Of 400 documents 100 have NaN for a value, or are not there: what is left proves nothing of them."""
    nan = [line(number, True, prompt_hash=f"p{number}", acc=float("nan")) for number in range(300, NUMBER) if keep]
    known = [line(number, number >= 40, prompt_hash=f"p{number}") for number in range(300)]

    def number_known(values: dict[str, Any]) -> None:
        values["metrics"][0] |= {"value": 260 / 300, "n": 300}

    gated = decided(place(baseline.parent, "after", [*known, *nan], number_known), baseline)
    assert gated.decision == "cannot tell"
    assert any("100" in note for note in gated.notes)


def scores(task: str, columns: dict[str, list[float]], *, better: bool = True) -> Answers:
    """Answers with a column of values a metric."""
    count = len(next(iter(columns.values())))
    documents = {
        number: DocumentAnswer("d", {name: column[number] for name, column in columns.items()}, "")
        for number in range(count)
    }
    return Answers(task, "none", dict.fromkeys(columns, better), documents)


def test_a_second_metric_that_is_no_share_of_right_answers_is_judged() -> None:
    """F1 falls by 30 points while the exact match stays: a loss; by chance of five documents it is none."""
    right = [float(number % 2) for number in range(NUMBER)]
    f1 = [0.6 + 0.001 * (number % 7) for number in range(NUMBER)]
    fallen = [value - 0.3 for value in f1]
    before, after = (scores("squad", {"exact_match": right, "f1": values}) for values in (f1, fallen))
    gated = gate_answers([before], [after], Comparison({}, matters=5.0))
    assert gated.decision == "loss"
    assert [bound.decision for bound in gated.bounds] == ["passed", "loss"]
    assert gate_answers([before], [before], Comparison({}, matters=5.0)).decision == "passed"
    few = gate_answers([before.of(range(5))], [after.of(range(5))], Comparison({}, matters=5.0))
    assert few.decision == "cannot tell"


def test_a_metric_whose_direction_turned_is_refused() -> None:
    """Values of the same name of which less is better now are another metric."""
    before = scores("task", {"acc": [1.0, 0.0] * 50})
    with refused(ConfigError, "not_comparable", "--baseline", "the baseline"):
        gate_answers([before], [replace(before, metrics={"acc": False})])


def test_a_task_twice_in_a_baseline_is_refused(baseline: Path) -> None:
    """Else the last one would count, unseen."""
    values = json.loads(baseline.read_text())
    values["documents"] *= 2
    baseline.write_text(json.dumps(values))
    with refused(ConfigError, "damaged", "--baseline", holds=("colours", "none")):
        gate(str(folder(baseline.parent, "after", 40)), str(baseline))


def test_a_failed_evaluation_becomes_no_baseline(tmp_path: Path) -> None:
    """Against answers of NaN or none every later model would pass."""

    def failed(values: dict[str, Any]) -> None:
        values["missing"] = [{"task": "colours", "doc_id": 3, "reason": "too long"}]

    run = place(tmp_path, "before", [line(number, True) for number in range(9)], failed)
    file = tmp_path / "baseline.json"
    assert main(["gate", str(run), "--baseline", str(file), "--update-baseline"]) == 2
    assert not file.exists()


def test_names_start_no_line_of_their_own() -> None:
    """GitHub obeys lines that start with two colons: a task's name must not make one."""
    bad = "task\n::error title=x::y"
    gated = Gated(
        "loss", Verdict("loss", f"loss found in {bad}", (Reason("loss", bad),)), (Bound(bad, "loss", bad),), (bad,)
    )
    assert [text for text in lines(gated) if "\n" in text] == []


@pytest.mark.parametrize("how", ["version", "definition"])
def test_task_that_is_scored_otherwise_is_refused(how: str, baseline: Path) -> None:
    """Prompts and targets are the same; the task has another version, or counts another metric's aggregation."""

    def changed(values: dict[str, Any]) -> None:
        results = values["results"]
        results["versions"] = {"colours": 2.0} if how == "version" else results.get("versions", {})
        if how == "definition":
            results.setdefault("configs", {}).setdefault("colours", {})["metric_list"] = [{"metric": "acc", "x": 1}]

    rows = [line(number, True, prompt_hash=f"p{number}") for number in range(NUMBER)]
    run = place(baseline.parent, "after", rows, changed)
    with refused(ConfigError, "not_comparable", holds="colours"):
        gate(str(run), str(baseline), 5.0)


def test_task_that_the_run_lacks_is_not_said_to_be_asked_otherwise(baseline: Path) -> None:
    """As where drawn documents are of fewer tasks than the baseline's."""
    known = replace(read_baseline(baseline), definitions={"colours": "0"})
    with pytest.raises(ConfigError, match="'colours' is in the baseline and not in the run"):
        refuse_other_definitions(known, {"configs": {"shapes": {}}})


def test_a_metric_over_the_corpus_beside_an_accuracy_is_named(baseline: Path) -> None:
    """F1 of all documents together has no value for each: that it may have fallen is told."""

    def with_f1(values: dict[str, Any]) -> None:
        values["results"]["results"] = {"colours": {"acc,none": 0.9, "f1,none": 0.1}}

    rows = [line(number, number >= 40, prompt_hash=f"p{number}") for number in range(NUMBER)]
    gated = decided(place(baseline.parent, "after", rows, with_f1), baseline)
    assert gated.notes == ("colours f1: not held, there is no value for each document",)


@pytest.mark.parametrize(("task", "metric", "decision"), [("all", "accuracy", "passed"), ("essay", "f1", "loss")])
def test_a_claim_that_is_kept_passes_no_loss_that_it_is_not_about(task: str, metric: str, decision: str) -> None:
    lost = outcome(task, metric, difference=-0.2, low=-0.3, high=-0.1, mcnemar_p=1e-6, is_binary=metric == "accuracy")
    assert _decided(Comparison({}, outcomes=(lost,), certainty=certainty()), ()).decision == decision
