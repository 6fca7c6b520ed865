"""The page by itself: what it says, that it parses, that it needs nothing else, that no text can break out of it."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from olive_ext.config import EvaluationConfig
from olive_ext.report import Metric, Report, from_json, to_json
from olive_ext.report import write as write_report
from olive_ext.report.comparison import Bin, Comparison, Flip
from olive_ext.report.html.render import CHUNK, MAX_CHARACTERS, flip_data, render, to_html
from olive_ext.report.page import ComparedModels
from olive_ext.report.verdict import Reason
from tests.report.synthetic import HOSTILE, comparison, pair_of, report

pytest.importorskip("jinja2")

VOID = {"meta", "br", "wbr", "input", "path", "use", "img", "link", "hr"}
MODEL = {"path": "models/my model"}
COMPARED = comparison()
OUTSIDE = ("https://example.com/a.png", "data:text/html,x", "../a.png")
OWN = "data:image/jpeg;base64,AAAA"


class Reader(HTMLParser):
    """A page that is well formed, with ids of which each is there once: its elements, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []
        self.ids = Counter(value for _, name, value in self.attributes if name == "id")
        assert set(self.ids.values()) <= {1}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1:] == [tag]
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def shown(found: Comparison = COMPARED, **changes: Any) -> str:
    """The page of `COMPARED`, or of another comparison, changed."""
    return to_html(report(found=replace(found, **changes)))


def test_page_of_a_comparison_is_well_formed_and_refers_to_nothing_outside() -> None:
    page = shown()
    read = Reader(page)
    links = {value for _, name, value in read.attributes if name in ("href", "src", "srcset", "action", "data")}
    assert all(value.startswith("#") for value in links)
    assert {value[1:] for _, name, value in read.attributes if name == "href"} <= set(read.ids)
    assert not re.search(r"https?://|url\((?!#)|@import", page)
    policy = next(value for _, name, value in read.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy


def test_page_without_a_comparison_says_so_and_leaves_parts_out() -> None:
    text = to_html(Report(metrics=(Metric("arc", "acc", "none", 0.25, 0.0125, True, 400),), model={"path": "m"}))
    ids = set(Reader(text).ids)
    assert "scores" in ids
    assert not {"differences", "divergence", "flips", "cost"} & ids
    assert "1 task, without a reference" in text
    assert "scores" not in Reader(to_html(Report(metrics=()))).ids


def test_page_of_several_candidates_tells_them_apart_by_more_than_colour() -> None:
    text = render(pair_of("int8", "int4", "a_very_long_name_of_a_quantized_model"))
    Reader(text)
    assert text.count('class="verdict') == 3
    assert 'class="key s3">▲ a_very' in text


def test_charts_have_no_empty_rows_and_say_what_they_leave_out() -> None:
    classes = (Bin("word start", 4, 0.5), Bin("number", 0, None), Bin("special", 0, None))
    page = shown(divergences=tuple(replace(item, by_class=classes) for item in COMPARED.divergences))
    assert page.count('<table class="chart">') == 3 * 4 + 1, "one is of perplexities"
    assert "none of number and special" in page
    assert ">special<" not in page


def test_perplexity_is_of_whole_texts_alone_and_records_give_estimates() -> None:
    answers = tuple(item for item in COMPARED.divergences if not item.is_text)
    assert "Perplexity is shown for tasks that score whole texts" in shown(divergences=answers)
    more = {"is_text": True, "kl_sampling_error": 0.0004, "kl_lower": 0.0101}
    page = shown(divergences=tuple(replace(item, **more) for item in COMPARED.divergences))
    assert "Perplexity is shown" not in page
    assert "estimated \N{PLUS-MINUS SIGN} 0.000400, at least 0.0101" in page


def test_sizes_stand_beside_each_other_whether_they_were_asked_for_or_not() -> None:
    made = report(found=replace(COMPARED, reference={"path": "float", "size_bytes": 400e6}))
    metrics = tuple(metric for metric in made.metrics if metric.task != "size_on_disk")
    page = to_html(replace(made, metrics=metrics, model={**made.model, "size_bytes": 100e6}))
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
    assert read.tags["img"] == 0
    assert "49" not in "".join(read.text["h1"])


def test_broken_bound_stands_in_the_verdict_and_flips_before_scores() -> None:
    pages = [
        to_html(replace(report(found=found), broken=(Reason("bound_broken", words="kl_mean is 0.02, above 0.01"),)))
        for found in (None, comparison(20))
    ]
    for page in pages:
        assert page.index('"verdict loss"') < page.index("Bound broken: kl_mean is 0.02, above 0.01.")
        assert page.index("Bound broken: kl_mean is 0.02, above 0.01.") < page.index("</section>")
    places = [page.index(f'<section id="{name}">') for name in ("differences", "flips", "scores", "divergence", "cost")]
    assert places == sorted(places)


def test_flips_survive_the_way_into_the_page_and_out() -> None:
    """In chunks, long texts cut."""
    texts = (*HOSTILE, "x" * (MAX_CHARACTERS + 7))
    flips = [Flip("t", place, "right_to_wrong", *[text] * 4, "acc", "none") for place, text in enumerate(texts)]
    flips += [flips[-1]] * (CHUNK + 1 - len(flips))
    head, chunks = flip_data([ComparedModels("candidate", "reference", Comparison({}, flips=tuple(flips)))])
    assert not re.search(r"[<>&]", "".join(chunks) + head)
    rows, (last,) = (json.loads(chunk) for chunk in chunks)
    assert len(rows) == CHUNK
    assert [row[4] for row in rows[: len(HOSTILE)]] == list(HOSTILE)
    assert last[4].endswith("[7 more characters]")
    assert json.loads(head)["tasks"] == ["t · acc"]
    chunks[0].encode()


def test_page_shows_thumbnails_that_are_in_it_and_nothing_from_elsewhere() -> None:
    page = shown(flips=(Flip("t", 1, "wrong_to_right", "x", "", "", "", pictures=(OWN, *OUTSIDE)),))
    assert "img-src data:;" in page
    assert OWN in page
    assert not any(url in page for url in OUTSIDE)


def test_page_that_cannot_be_made_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(report: Report) -> str:
        raise RuntimeError("fonts are broken")

    files = ["report.json", "report.md", "report.html"]
    assert [path.name for path in write_report(report(found=COMPARED), tmp_path)] == files
    Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    with caplog.at_level(logging.WARNING):
        assert [path.name for path in write_report(report(), tmp_path, failing)] == files[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == files[:2], "that of the earlier report is gone"
    (message,) = (record.message for record in caplog.records)
    assert message.startswith("no report.html: ")


@pytest.mark.parametrize(
    "values",
    [
        {"tasks": ["arc_easy", "gsm8k"], "limit": 400, "num_fewshot": 0, "seed": 7},
        {"tasks": [{"task": "inline", "doc_to_text": "{{q}}, 'quoted'"}, "a"], "limit": 0.5},
        {"tasks": ["a"], "gen_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "engine": {"num_slots": 4}},
        {"tasks": ["a"], "apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "$HOME's"},
        {"tasks": ["a"], "execution_provider": ["CUDA", ["CPU", {"threads": 2}]], "allow_cpu_fallback": True},
        {"tasks": ["a"], "include_path": "tasks", "tokenizer": "t", "batch_size": "auto", "output_dir": "-odd"},
        {"tasks": ["a"], "system_instruction": "-1", "device": "null", "reference": "models/float"},
        {"tasks": ["a"], "reference": {"path": "models/float", "kind": "hf"}, "model": {**MODEL, "kind": "onnx"}},
    ],
)
def test_configuration_of_a_report_repeats_the_evaluation(values: dict[str, Any]) -> None:
    config = EvaluationConfig.parse({"model": MODEL, **values})
    made = Report((), config=config.model_dump(mode="json", exclude_unset=True))
    assert EvaluationConfig.parse(from_json(to_json(made)).config) == config
    assert "<code>config</code> of report.json" in to_html(made)
