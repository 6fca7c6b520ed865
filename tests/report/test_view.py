"""What people read of a comparison."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

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
    with redirect_stdout(io.StringIO()) as file:
        print_table(report)
    return file.getvalue()


def test_markdown_leads_with_the_verdict_and_has_one_table_of_all() -> None:
    text = to_markdown(REPORT)
    assert "\n**Loss found in wiki perplexity.**\n" in text
    rows = [line for line in text.split("## ")[0].splitlines() if line.startswith("| ")]
    assert [" ".join(row.split(" | ")[:2]) for row in rows] == [
        "| task metric",
        "| --- ---",
        "| choice acc ↑",
        "| choice acc, difference (95 %)",
        "| choice bleu, difference (95 %)",
        "| all tasks mean KL, nats ↓",
        "| all tasks same top token ↑",
        "| wiki mean KL, nats ↓",
        "| wiki same top token ↑",
        "| wiki perplexity, change ↓",
        "| choice mean KL, nats ↓",
        "| choice same top token ↑",
    ]
    assert "○ \N{MINUS SIGN}0.40 pt (\N{MINUS SIGN}1.20 to +0.40), lost 4, won 2, p 0.688 |" in text


def test_estimated_divergence_says_so() -> None:
    assert "0.0123 ± 0.0010 (estimated ± 0.000200, at least 0.0119)" in to_markdown(REPORT)
    exact = replace(FOUND, divergences=(divergence(kl_sampling_error=0.0),))
    assert "estimated" not in to_markdown(replace(REPORT, comparison=exact))


def test_terminal_ends_with_the_verdict_and_the_page() -> None:
    with redirect_stdout(io.StringIO()) as file:
        print_table(REPORT, Path("out/report.html"))
    *_, headline, figures, page_line = file.getvalue().splitlines()
    assert headline == "m: loss found in wiki perplexity"
    assert figures.startswith("  choice acc difference")
    assert page_line == f"page: {Path('out/report.html')}"


def test_time_by_phase_and_answers_of_an_earlier_run_are_told() -> None:
    spent = {"seconds": 9.0, "seconds_load": 1.0, "seconds_reference": 2.5, "seconds_candidate": 4.0}
    report = replace(
        REPORT, engine=spent, model={"path": "m", "journal": {"answers_known": 2000, "answers_used": 1240}}
    )
    text = printed(report)
    assert "1,240 answers from an earlier run" in text.splitlines()
    rows = {cells[2].strip(): cells[-2].strip() for line in text.splitlines() if len(cells := line.split("│")) > 4}
    assert (rows["Time, all of it"], rows["of which the reference"]) == (
        "9.0\N{NO-BREAK SPACE}s",
        "2.5\N{NO-BREAK SPACE}s",
    )
