"""The table over a chain's reports."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

from olive_ext.report import Metric, Report, chain_markdown, print_cells, write_chain
from olive_ext.report.tables import chain_steps as steps
from olive_ext.report.tables import chain_table

ACC = Metric("choice", "acc", "none", 0.75)
NORM = Metric("choice", "acc_norm", "none", 0.5)
SIZE = Metric("size_on_disk", "bytes", "none", 4_290_000, higher_is_better=False)
REQUESTS = Metric("requests_per_second", "requests_per_second", "none", 9.0)


def report(passes: list[str] | None, *metrics: Metric) -> Report:
    model = {"path": "some/model", **({} if passes is None else {"passes": passes})}
    return Report(metrics=metrics, model=model)


def speed(value: float) -> Metric:
    return Metric("tokens_per_second", "tokens_per_second", "none", value)


CHAIN = [
    report([], ACC, NORM, SIZE, speed(0.0)),
    report(
        ["float"], ACC, NORM, SIZE, speed(1000.0), Metric("requests_per_second", "requests_per_second", "none", 9.0)
    ),
    report(["float", "int4"], ACC, SIZE, Metric("all", "kl_mean", "none", 0.0125), Metric("choice", "kl_mean", "n", 1)),
]


def test_each_report_is_a_step_with_cost_distances_and_first_metrics() -> None:
    table = chain_table(steps(CHAIN))
    assert table.heads == ["step", "size_on_disk", "tokens_per_second", "kl_mean", "choice acc"]
    assert table.rows == [
        ["input model", "4.29 MB", "", "", "0.7500"],
        ["float", "4.29 MB", "1,000", "", "0.7500"],
        ["float -> int4", "4.29 MB", "", "0.0125", "0.7500"],
    ]


def test_numbers_of_drawn_documents_say_of_how_many() -> None:
    drawn = Metric("choice", "acc", "none", 0.75, n=342, num_population=10_042)
    distance = Metric("all", "kl_mean", "none", 0.0125, n=342, num_population=10_042, is_estimate=False)
    (step,) = steps([report(["int4"], drawn, distance, SIZE)])
    assert chain_table([step]).rows == [
        ["int4", "4.29 MB", "0.0125 (342 of 10\u202f042, unweighted)", "0.7500 (342 of 10\u202f042)"]
    ]
    assert step.documents == {"choice acc": "342 of 10\u202f042", "kl_mean": "342 of 10\u202f042, unweighted"}


def test_model_outside_of_a_workflow_is_called_by_its_path() -> None:
    assert steps([report(None, ACC)])[0].name == "some/model"


def test_files_hold_the_same_numbers(tmp_path: Path) -> None:
    found = steps(CHAIN)
    json_path, markdown_path = write_chain(found, tmp_path / "new")
    assert json.loads(json_path.read_text())["steps"][2] == {
        "name": "float -> int4",
        "values": {"size_on_disk": 4290000, "kl_mean": 0.0125, "choice acc": 0.75},
        "documents": {},
    }
    assert markdown_path.read_text() == chain_markdown(found)
    assert "| float -\\> int4 | 4.29 MB |  | 0.0125 | 0.7500 |" in chain_markdown(found)


def test_printed_table_has_every_step() -> None:
    with redirect_stdout(io.StringIO()) as file:
        print_cells(chain_table(steps(CHAIN)))
    assert all(name in file.getvalue() for name in ("input model", "float -> int4", "kl_mean", "0.0125"))
