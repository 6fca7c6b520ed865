"""The page by itself: what it says, that it parses, that it needs nothing else, that no text can break out of it."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from olive_ext.report import Metric, Report, to_html
from olive_ext.report import write as write_report
from olive_ext.report.comparison import Bin, Comparison, Flip
from olive_ext.report.html.render import CHUNK, MAX_CHARACTERS, flip_data, render
from olive_ext.report.page import Column, Contrast, Page
from tests.report.synthetic import HOSTILE, comparison, report

pytest.importorskip("jinja2")

VOID = {"meta", "br", "wbr", "input", "path", "use", "img", "link", "hr"}


class Reader(HTMLParser):
    """Elements, text by element, and what is opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open[-1] != tag:
            self.wrong.append(f"</{tag}> in {self.open[-3:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(scope="module")
def page() -> str:
    return to_html(report(found=comparison(400)))


def test_page_is_well_formed_with_unique_ids(page: str) -> None:
    read = Reader(page)
    assert read.wrong == []
    assert read.open == []
    ids = Counter(value for _, name, value in read.attributes if name == "id")
    assert [name for name, count in ids.items() if count > 1] == []
    named = {value[1:] for _, name, value in read.attributes if name == "href"}
    assert named <= set(ids)


def test_page_refers_to_nothing_outside_and_forbids_it(page: str) -> None:
    read = Reader(page)
    links = [item for item in read.attributes if item[1] in ("href", "src", "srcset", "action", "data")]
    assert all(value.startswith("#") for _, _, value in links)
    assert not re.search(r"https?://|url\((?!#)|@import", page)
    policy = next(value for _, name, value in read.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy


def test_same_report_makes_the_same_page(page: str) -> None:
    assert to_html(report(found=comparison(400))) == page


def test_page_of_a_comparison_has_every_part(page: str) -> None:
    read = Reader(page)
    ids = {value for _, name, value in read.attributes if name == "id"}
    assert {"scores", "differences", "divergence", "flips", "cost", "setup"} <= ids
    text = " ".join("".join(parts) for parts in read.text.values())
    for expected in (
        "Loss found in accuracy and hellaswag acc_norm",
        "all tasks",
        "98.0\u00a0MB",
        "1.42\u00a0GB",
        "McNemar",
    ):
        assert expected in text.replace("<wbr>", "")
    assert "olive-ext evaluate models/quickstart-135m-int4 --tasks" in text


def test_page_without_a_comparison_says_so_and_leaves_parts_out() -> None:
    text = to_html(Report(metrics=(Metric("arc", "acc", "none", 0.25, 0.0125, True, 400),), model={"path": "m"}))
    read = Reader(text)
    ids = {value for _, name, value in read.attributes if name == "id"}
    assert "scores" in ids
    assert not {"differences", "divergence", "flips", "cost"} & ids
    assert "1 task, without a reference" in text


def test_empty_report_has_a_page() -> None:
    assert Reader(to_html(Report(metrics=()))).wrong == []


def test_page_of_several_candidates_tells_them_apart_by_more_than_colour() -> None:
    names = ["int8", "int4", "a_very_long_name_of_a_quantized_model"]
    reports = [report(f"models/{name}", comparison(100, seed=seed)) for seed, name in enumerate(names)]
    columns = [
        Column("float", report().metrics, report()),
        *map(Column, names, [item.metrics for item in reports], reports),
    ]
    found = [item.comparison or Comparison({}) for item in reports]
    contrasts = tuple(Contrast(name, "float", item) for name, item in zip(names, found, strict=True))
    text = render(Page("three against one", tuple(columns), contrasts))
    read = Reader(text)
    assert read.wrong == []
    ids = Counter(value for _, name, value in read.attributes if name == "id")
    assert [name for name, count in ids.items() if count > 1] == []
    assert text.count('class="verdict') == 3
    assert 'class="key s3">▲ a_very' in text


def test_charts_have_no_empty_rows_and_say_what_they_leave_out() -> None:
    found = comparison(100)
    classes = (Bin("word start", 4, 0.5), Bin("number", 0, None), Bin("special", 0, None))
    found = replace(found, divergences=tuple(replace(item, by_class=classes) for item in found.divergences))
    page = to_html(report(found=found))
    assert page.count('<table class="chart">') == 3 * 5
    assert "none of number and special" in page
    assert ">special<" not in page


def test_perplexity_is_told_of_whole_texts_alone() -> None:
    found = comparison(100)
    assert "Perplexity is shown for tasks that score whole texts" in to_html(report(found=found))
    texts = replace(found, divergences=tuple(replace(item, is_text=True) for item in found.divergences))
    page = to_html(report(found=texts))
    assert "Perplexity is shown" not in page
    change = 100 * (found.divergences[0].perplexity_ratio - 1)
    assert f"+{change:.1f} %" in page


def test_workflow_s_report_points_to_its_recipe_and_not_into_a_cache() -> None:
    made = report("out/cache/runs/711b2471/models")
    assert "olive-ext evaluate out/cache" in to_html(made)
    page = to_html(replace(made, model={**made.model, "name": "ModelBuilder int4"}))
    assert "olive-ext evaluate" not in page
    assert "olive run --config RECIPE" in page


def test_sizes_stand_beside_each_other_whether_they_were_asked_for_or_not() -> None:
    made = report(found=comparison(20))
    metrics = tuple(metric for metric in made.metrics if metric.task != "size_on_disk")
    found = replace(comparison(20), reference={"path": "float", "size_bytes": 400e6})
    page = to_html(replace(made, metrics=metrics, model={**made.model, "size_bytes": 100e6}, comparison=found))
    assert "100\u00a0MB" in page
    assert "of 400\u00a0MB" in page


def test_hostile_names_and_texts_stay_text() -> None:
    name = "</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
    made = Report(
        metrics=(Metric(name, name, name, 0.5, 0.1, True, 4),),
        model={"path": name, name: name},
        versions={name: name},
        config={"model": {"path": name}, "tasks": [name]},
        comparison=comparison(50),
    )
    read = Reader(to_html(made))
    assert read.wrong == []
    assert read.tags["img"] == 0
    assert "49" not in "".join(read.text["h1"])


def test_flips_survive_the_way_into_the_page_and_out() -> None:
    flips = [
        Flip("t", number, "right_to_wrong", text, text, text, text, "acc", "none")
        for number, text in enumerate(HOSTILE)
    ]
    data = flip_data([Contrast("candidate", "reference", Comparison({}, flips=tuple(flips)))])
    assert len(data.chunks) == 1
    assert not re.search(r"[<>&]", data.chunks[0] + data.head)
    rows = json.loads(data.chunks[0])
    assert [row[4] for row in rows] == list(HOSTILE)
    assert json.loads(data.head)["tasks"] == ["t · acc"]
    data.chunks[0].encode()


def test_page_shows_thumbnails_that_are_in_it_and_nothing_from_elsewhere() -> None:
    own, others = "data:image/jpeg;base64,AAAA", ("https://example.com/a.png", "data:text/html,x", "../a.png")
    flip = Flip("t", 1, "wrong_to_right", "x", "", "", "", pictures=(own, *others))
    found = comparison(20)
    page = to_html(report(found=replace(found, flips=(flip,))))
    assert "img-src data:;" in page
    assert own in page
    assert not any(url in page for url in others)


def test_many_flips_come_in_chunks_and_long_texts_are_cut() -> None:
    long = Flip("t", 1, "wrong_to_right", "x" * (MAX_CHARACTERS + 7), "", "", "")
    data = flip_data([Contrast("c", "r", Comparison({}, flips=(long,) * (CHUNK + 1)))])
    assert [len(json.loads(chunk)) for chunk in data.chunks] == [CHUNK, 1]
    assert json.loads(data.chunks[1])[0][4].endswith("[7 more characters]")


def test_page_is_written_beside_the_report(tmp_path: Path) -> None:
    paths = write_report(report(found=comparison(20)), tmp_path)
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    assert Reader((tmp_path / "report.html").read_text(encoding="utf-8")).wrong == []


def test_evaluation_survives_a_page_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(report: Report) -> str:
        raise RuntimeError("fonts are broken")

    (tmp_path / "report.html").write_text("of an earlier report")
    with caplog.at_level(logging.WARNING):
        paths = write_report(report(), tmp_path, failing)
    assert [path.name for path in paths] == ["report.json", "report.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    (message,) = (record.message for record in caplog.records)
    assert message.startswith("no report.html: ")


def test_mean_of_recorded_distributions_tells_that_it_is_estimated(page: str) -> None:
    found = comparison(100)
    recorded = tuple(replace(item, kl_sampling_error=0.0004, kl_lower=0.0101) for item in found.divergences)
    text = to_html(report(found=replace(found, divergences=recorded)))
    assert "estimated \N{PLUS-MINUS SIGN} 0.000400, at least 0.0101" in text
    assert "estimated" not in page


def test_charts_tell_candidates_apart_by_what_their_names_end_in() -> None:
    names = [f"ModelBuilder float -> OnnxBlockWiseRtnQuantization int4_block{size}" for size in (32, 64)]
    page = Page(
        title="two",
        columns=tuple(Column(name, ()) for name in ("float", *names)),
        contrasts=tuple(Contrast(name, "float", comparison(50)) for name in names),
    )
    chart = render(page).partition('<table class="chart">')[2].partition("</table>")[0]
    assert "…block32" in chart
    assert "…block64" in chart
    assert "ModelBuilder" not in chart
