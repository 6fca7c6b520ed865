"""What people read of a comparison."""

from __future__ import annotations

import io
from dataclasses import replace

from olive_ext.report import Metric, Report, print_table, to_markdown
from olive_ext.report.comparison import ALL, Comparison
from tests.report.test_comparison import divergence, outcome

METRICS = (Metric("choice", "acc", "none", 0.766, 0.02, True, 400), Metric(ALL, "kl_mean", "none", 0.0123))
FOUND = Comparison(
    {"path": "models/a|b", "mode": "recorded"},
    (divergence(ALL), divergence("wiki"), divergence("choice", kl_sampling_error=0.0)),
    (outcome(), outcome(metric="bleu", is_binary=False, documents_needed={})),
)
REPORT = Report(METRICS, model={"path": "m"}, comparison=FOUND)


def printed(report: Report) -> str:
    file = io.StringIO()
    print_table(report, file)
    return file.getvalue()


def test_markdown_leads_with_the_verdict() -> None:
    section = to_markdown(REPORT).split("## ")[1]
    assert section.startswith("Compared with models/a\\|b (recorded)\n\nLoss found in wiki perplexity")
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| task",
        "| ---",
        "| wiki",
        "| choice",
        "| all",
        "| task",
        "| ---",
        "| choice",
        "| choice",
    ]
    assert "| -0.0120 to +0.0040 | 4 | 2 | 0.69 | 1500 |" in section


def test_estimated_divergence_says_so() -> None:
    assert "± 0.0002 nats for wiki, where it is at least 0.0119" in to_markdown(REPORT)
    exact = replace(FOUND, divergences=(divergence(kl_sampling_error=0.0),))
    assert "estimated" not in to_markdown(replace(REPORT, comparison=exact))


def test_comparison_has_its_own_tables_and_stays_out_of_the_first() -> None:
    text = printed(REPORT)
    assert "kl_mean" not in text
    assert "Distributions, against models/a|b" in text
    assert "Answers, against models/a|b" in text
    assert "kl_mean" in printed(replace(REPORT, comparison=None))


def test_report_without_a_comparison_is_as_before() -> None:
    assert "Compared" not in to_markdown(replace(REPORT, comparison=None))


def test_time_by_phase_and_answers_of_an_earlier_run_are_told() -> None:
    spent = {"seconds": 9.0, "seconds_load": 1.0, "seconds_reference": 2.5, "seconds_candidate": 4.0}
    report = replace(REPORT, engine=spent, model={"path": "m", "journal": {"answers_known": 1240}})
    lines = printed(report).splitlines()
    assert "1,240 answers from an earlier run" in lines
    assert "9.0 s (load 1.0, reference 2.5, candidate 4.0, rest 1.5)" in lines
