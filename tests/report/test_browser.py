"""The page in a real browser: opened, searched, turned, on a phone, dark, on paper; nothing on the console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from olive_ext.report.html.render import render, to_html
from tests.report.chromium import NAMES, Chromium, find_chromium
from tests.report.synthetic import HOSTILE, comparison, pair_of, report

PATH = find_chromium()
REASON = f"no Chromium: none of {', '.join(NAMES)} is on PATH, and CHROMIUM does not name one"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(PATH is None, reason=REASON)]

READY = "document.querySelectorAll('.flip').length > 0"
COUNT = "document.getElementById('flip-count').textContent"
MANY = 50_000
SEVERAL = 0


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The page of 400 flips, the one of as many as there can be among 50,000 samples, and two models against one."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, found in ((400, comparison(400)), (MANY, comparison(MANY))):
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(to_html(report(found=found)), encoding="utf-8")
    paths[SEVERAL] = folder / "compare.html"
    paths[SEVERAL].write_text(render(pair_of("int8", "int4-block128")), encoding="utf-8")
    return paths


@pytest.fixture
def browser() -> Iterator[Chromium]:
    assert PATH is not None
    with Chromium(PATH) as opened:
        opened.show(1200, 900)
        yield opened
        assert opened.problems == []


def search(browser: Chromium, text: str) -> float:
    """Types into the search field; returns the seconds until the number of matches stands there."""
    begin = time.monotonic()
    browser.run(
        f"(() => {{ const field = document.getElementById('flip-search'); field.value = {text!r};"
        "field.dispatchEvent(new Event('input')); })()"
    )
    browser.wait(f"document.getElementById('flip-list').dataset.query === {text.lower()!r}")
    return time.monotonic() - begin


def choose(browser: Chromium, name: str, value: str) -> None:
    browser.run(
        f"(() => {{ const list = document.getElementById('{name}'); list.value = {value!r};"
        "list.dispatchEvent(new Event('change')); })()"
    )


@pytest.mark.parametrize(("size", "seconds"), [(400, 3), (MANY, 8)])
def test_page_is_ready_soon_and_search_finds_a_document(
    size: int, seconds: float, pages: dict[int, Path], browser: Chromium
) -> None:
    assert browser.open(pages[size]) < seconds
    assert browser.run(READY)
    assert browser.run("document.querySelectorAll('.flip').length") == 20
    assert search(browser, "photosynthesis food") < seconds
    assert browser.run("[...document.querySelectorAll('.flip')].every((card) => /photosynthesis/.test(card.innerText))")
    assert browser.run("document.querySelectorAll('mark.found').length") >= 20


def test_flips_are_found_turned_to_marked_and_shown_as_they_are(pages: dict[int, Path], browser: Chromium) -> None:
    browser.open(pages[MANY])
    assert browser.run("document.title") == "int4 against float"
    assert browser.run("document.querySelectorAll('script[src], img, iframe, link').length") == 0
    assert "50\u202f000 flips" in browser.run(COUNT)
    height = "document.querySelector('.text.cut, .text.was').getBoundingClientRect().height"
    before = browser.run(height)
    browser.run("(() => { const cut = document.querySelector('.text.cut'); cut.classList.add('was');"
                "cut.nextElementSibling.click(); })()")  # fmt: skip
    assert browser.run(height) > before
    assert browser.run("document.querySelector('.text.was').nextElementSibling.textContent") == "Show less"
    search(browser, "</script><script>")
    assert HOSTILE[0] in browser.run("document.querySelector('.flip .question').innerText")
    search(browser, "turned")
    shown = browser.run("document.querySelector('.flip .question').innerText")
    assert "U+202E" in shown
    assert "\u202e" not in shown
    assert browser.run("document.querySelector('.flip .question .text').dir") == "auto"
    search(browser, "49999")
    assert browser.run(COUNT).startswith("1 of")
    browser.run("document.getElementById('flip-search').value = ''")
    choose(browser, "flip-direction", "1")
    browser.wait("[...document.querySelectorAll('.flip strong')].every((item) => item.textContent.includes('Won'))")
    browser.run("document.querySelector('[data-turn=\"1\"]').click()")
    assert browser.run("document.querySelector('.place').textContent").startswith("2 of")


@pytest.mark.parametrize(
    ("one", "other", "marked"),
    [
        ("115 rolls are left. So 115", "125 rolls are left. So 125", [["115", "115"], ["125", "125"]]),
        ("the old cat", "a new dog", [["the old cat"], ["a new dog"]]),
        (
            "It is a warm day",
            "It has rained for three long weeks",
            [["is a warm day"], ["has rained for three long weeks"]],
        ),
        (f"x {'a ' * 600}y", f"x {'b ' * 600}y", [[("a " * 600).strip()], [("b " * 600).strip()]]),
        ("", "a new dog", [[], ["a new dog"]]),
        ("the same", "the same", [[], []]),
    ],
)
def test_answers_with_little_in_common_are_marked_where_they_differ(
    one: str, other: str, marked: list[list[str]], browser: Chromium, tmp_path: Path
) -> None:
    found = comparison(400)
    flip = replace(found.flips[0], reference_answer=one, candidate_answer=other)
    page = tmp_path / "page.html"
    page.write_text(to_html(report(found=replace(found, flips=(flip,)))), encoding="utf-8")
    browser.open(page)
    marks = "[...document.querySelectorAll('.flip .answers > div')].map((side) => [...side.querySelectorAll('mark')]"
    assert browser.run(f"{marks}.map((mark) => mark.textContent.trim()))") == marked


def test_theme_follows_the_system_until_the_reader_chooses(pages: dict[int, Path], browser: Chromium) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages[400])
    light = browser.run(background)
    browser.show(1200, 900, scheme="dark")
    dark = browser.run(background)
    assert dark != light
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == light
    browser.run("document.getElementById('theme').click()")
    browser.show(1200, 900, scheme="light")
    assert browser.run(background) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str, pages: dict[int, Path], browser: Chromium) -> None:
    """WCAG 2.2, 1.4.3: at least 4.5 to 1 between text and what it stands on."""
    browser.show(1200, 900, scheme=scheme)
    browser.open(pages[400])
    assert browser.run(CONTRAST) == []


WIDER = "[...document.querySelectorAll('.scroll, nav')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"


@pytest.mark.parametrize(("width", "name"), [(1280, 400), (390, 400), (320, 400), (1280, SEVERAL), (390, SEVERAL)])
def test_nothing_is_wider_than_the_window(width: int, name: int, pages: dict[int, Path], browser: Chromium) -> None:
    browser.show(width, 800, mobile=width < 1000)
    browser.open(pages[name])
    browser.run("document.querySelectorAll('details').forEach((one) => one.open = true)")
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(WIDER) == 0
    if width < 1000:
        named = "[...document.querySelectorAll('#differences tr.total td')].map((cell) => cell.dataset.name)"
        assert browser.run(named)[0] == ("Candidate" if name == SEVERAL else "Difference")


def test_page_prints_on_some_sheets_of_paper(pages: dict[int, Path], browser: Chromium) -> None:
    browser.open(pages[400])
    paper = browser.pdf()
    assert paper.startswith(b"%PDF")
    assert 3 <= paper.count(b"/Type /Page\n") + paper.count(b"/Type/Page/") <= 40
    assert browser.run("document.querySelectorAll('details:not([open])').length") > 0


CONTRAST = """
(() => {
  const part = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("script, style, :disabled")) continue;
    const style = getComputedStyle(element), svg = element.closest("svg");
    const [a, b] = [light(numbers(svg ? style.fill : style.color)), light(ground(svg ? svg.parentElement : element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${ratio.toFixed(2)} ${element.tagName}: ${walker.currentNode.data.slice(0, 40)}`);
  }
  return [...found];
})()
"""
