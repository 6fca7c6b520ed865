"""What a report's markdown shows of names that others wrote: the names, as a parser of markdown that is not ours reads
them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from olive_ext.report import Metric, Report
from olive_ext.report.plain_text import ChainStep, chain_table, literal, markdown_page, markdown_table, to_markdown
from tests.report.synthetic import comparison

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
