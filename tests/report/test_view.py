"""What people read of a report on a terminal and in markdown, and the table of a chain's reports. Names that others
wrote are in markdown the names, as a parser that is not ours reads them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from olive_ext.report import Metric, Report, view
from olive_ext.report.comparison import Comparison
from olive_ext.report.numbers import NO_VALUE, predicted
from olive_ext.report.page import column_of
from olive_ext.report.plain_text import (
    ChainStep,
    Table,
    chain_steps,
    chain_table,
    literal,
    markdown_page,
    markdown_table,
    print_cells,
    print_table,
    to_markdown,
)
from olive_ext.report.report_files import write_chain
from tests.report.synthetic import comparison
from tests.report.test_comparison import divergence, outcome

MINUS = "\N{MINUS SIGN}"


def printed(call: Callable[..., object], *values: Any) -> str:
    with redirect_stdout(io.StringIO()) as file:
        call(*values)
    return file.getvalue()


def test_rows_of_an_estimated_distance_and_of_a_grade_without_flips() -> None:
    graded = outcome(metric="bleu", is_binary=False, documents_needed={})
    text = to_markdown(Report((), comparison=Comparison({}, (divergence(),), (graded,))))
    assert "| wiki | mean KL, nats ↓ |  |  | 0.0123 ± 0.0010 (estimated ± 0.000200, at least 0.0119) |" in text
    assert f"| choice | bleu, difference (95 %) | 400 |  | ○ {MINUS}0.40 pt ({MINUS}1.20 to +0.40) |" in text


def test_answers_of_an_earlier_run_are_noted() -> None:
    journal = {"answers_known": 2000, "answers_used": 1240}
    noted = str(Report((), model={"path": "m", "journal": journal}))
    assert "answers to 1,240 requests are from an earlier run" in noted.splitlines()


def test_table_is_not_cut_and_a_terminal_obeys_no_name_in_it() -> None:
    long = "[bold]a_very_long_task_name_" * 8
    assert long in printed(print_table, Report((Metric(long, "acc", "none", 1.0, n=4),), engine={"seconds": 1.25}))
    name = "\x1b]0;owned\x07[b]\x9b31m\u202e é 東"
    text = printed(print_cells, Table(name, (name,), [(name,)], (name,)))
    text += printed(print_table, Report((Metric(name, "acc", "none", 1.0, n=4),), providers=({"name": name},)))
    assert text.count("\ufffd]0;owned\ufffd[b]\ufffd31m\ufffd é 東") == 5
    assert not set(text) & set("\x1b\x07\x9b\u202e")


ACC, SIZE = Metric("choice", "acc", "none", 0.75), Metric("size_on_disk", "bytes", "none", 4_290_000)


def chained(passes: list[str] | None, *metrics: Metric) -> Report:
    return Report(metrics=metrics, model={"path": "some/model", **({} if passes is None else {"passes": passes})})


def speed(value: float) -> Metric:
    return Metric("tokens_per_second", "tokens_per_second", "none", value)


KL = Metric("all", "kl_mean", "none", 0.0125)
CHAIN = chain_steps(
    [
        chained([], ACC, replace(ACC, metric="acc_norm"), SIZE, speed(0.0)),
        chained(["float"], ACC, SIZE, speed(1000.0), Metric("requests_per_second", "requests_per_second", "none", 9.0)),
        chained(["float", "int4"], ACC, SIZE, KL, Metric("choice", "kl_mean", "n", 1)),
    ]
)


def test_each_report_of_a_chain_is_a_step_with_cost_distances_and_first_metrics(tmp_path: Path) -> None:
    table = chain_table(CHAIN)
    assert table.heads == ["step", "size_on_disk", "tokens_per_second", "kl_mean", "choice acc"]
    assert table.rows == [
        ["input model", "4.29 MB", "", "", "0.7500"],
        ["float", "4.29 MB", "1,000", "", "0.7500"],
        ["float -> int4", "4.29 MB", "", "0.0125", "0.7500"],
    ]
    assert [cell for row in table.rows for cell in row if cell not in printed(print_cells, table)] == []
    json_path, markdown_path = write_chain(CHAIN, tmp_path / "new")
    assert json.loads(json_path.read_text())["steps"][2] == {
        "name": "float -> int4",
        "values": {"size_on_disk": 4290000, "kl_mean": 0.0125, "choice acc": 0.75},
        "documents": {},
    }
    assert markdown_path.read_text().startswith("# The chain, step by step\n\n| step |")
    assert "| float -\\> int4 | 4.29 MB |  | 0.0125 | 0.7500 |" in markdown_path.read_text()


def test_numbers_of_drawn_documents_say_of_how_many_and_a_model_without_passes_its_path() -> None:
    drawn = replace(ACC, n=342, num_population=10_042)
    (step,) = chain_steps([chained(None, drawn, replace(KL, n=342, num_population=10_042, is_estimate=False), SIZE)])
    part, unweighted = "342 of 10,042", "342 of 10,042, unweighted"
    assert chain_table([step]).rows == [["some/model", "4.29 MB", f"0.0125 ({unweighted})", f"0.7500 ({part})"]]
    assert step.documents == {"choice acc": part, "kl_mean": unweighted}


def test_resumed_run_is_not_timed_beside_a_fresh_one() -> None:
    fresh = Report((), engine={"seconds": 60.0, "tokens_fed": 900}, model={"path": "a"})
    resumed = replace(
        fresh, engine={"seconds": 2.0, "tokens_fed": 9}, model={"path": "b", "journal": {"answers_used": 7}}
    )
    both = view.cost_rows([column_of("a", fresh), column_of("b", resumed)])
    assert [cells[1] for _, cells in both] == [NO_VALUE, NO_VALUE]
    assert NO_VALUE not in [cells[0] for _, cells in [*both, *view.cost_rows([column_of("b", resumed)])]]


def test_time_that_is_predicted_has_two_digits() -> None:
    times = (0.3, 1, 76.9, 99.6, 135, 36_000, 1e6)
    told = ["less than 1 s", *(f"about {time}" for time in ("1 s", "77 s", "1.7 min", "2.2 min", "10 h", "280 h"))]
    assert [predicted(time).replace("\N{NO-BREAK SPACE}", " ") for time in times] == told


PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
LINK = "[x](javascript:alert(1)) ![y](http://evil/p.png) <img src=x onerror=alert(1)> **b** _i_ `c` ~~d~~ | e\n# f"
HARMLESS = {"strong", "code", "table", "thead", "tbody", "tr", "th", "td", "p", "h1", "h2", "ul", "li"}


class Seen(HTMLParser):
    """Tags and cells of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.is_parted = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        """Text on both sides of a comment is one text."""
        if self.is_parted and self.texts:
            self.texts[-1] += data.strip()
        else:
            self.texts.append(data.strip())
        self.is_parted = False

    def handle_comment(self, data: str) -> None:
        self.is_parted = True


def seen(markdown: str) -> Seen:
    return Seen(PARSER.render(markdown))


@given(st.text(st.sampled_from("\\`*_[]()<>|~&$!#{}+-.:/@ \nabw1é\u202e\x1b"), min_size=1))
@example(LINK)
@example("a_b __c__ snake_case_name _d_ *e* \\_f")
def test_a_cell_shows_exactly_its_text(text: str) -> None:
    shown = " ".join(re.sub("[\u202e\x1b]", "\N{REPLACEMENT CHARACTER}", text).split())
    found = seen(markdown_table(("head",), [("first",), (text,), ("last",)]))
    assert found.tags <= HARMLESS
    assert [cell for cell in found.texts if cell] == [cell for cell in ("head", "first", shown, "last") if cell]


@pytest.mark.parametrize(
    "text",
    [
        *("http://evil.example", "https://evil.example/a", "www.evil.example", "WWW.evil.example"),
        *("a@b.co", "#12", "owner/name#12", "GH-7", "@somebody"),
    ],
)
def test_what_becomes_a_link_by_itself_is_parted_and_plain_names_stay(text: str) -> None:
    assert not re.search(r"https?://|www\.|@\w|#\d|GH-\d", literal(text), re.IGNORECASE)
    assert "".join(seen(literal(text)).texts) == text
    for name in ("arc_easy", "acc_norm", "SmolLM2-135M/model.onnx", "0.25 ± 0.01 (95 %)", "kl_mean, max: 0.02"):
        assert literal(name) == name


def test_a_report_obeys_no_name_in_it() -> None:
    report = Report(
        metrics=(Metric(LINK, LINK, LINK, 1.0), Metric(LINK, LINK, LINK, 1.0, n=4)),
        model={"path": LINK, LINK: LINK},
        providers=({"name": LINK, "options": {LINK: LINK}},),
        versions={LINK: LINK},
        created=LINK,
        comparison=replace(comparison(20), reference={"path": LINK, "mode": LINK}),
    )
    found = seen(to_markdown(report))
    assert found.tags <= HARMLESS
    assert sum(" ".join(LINK.split()) in text for text in found.texts) >= 12
    assert seen(markdown_page((), chain_table([ChainStep(LINK, {LINK: 1.0}, {})]))).tags <= HARMLESS
