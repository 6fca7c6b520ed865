"""Takes the pictures in docs/images of report.html and compare.html in a headless Chromium.

python docs/screenshots.py                    of made-up numbers
python docs/screenshots.py REPORT [REPORT...] of real ones: folders with a report.json; the page of the last one, and
                                              with several the comparison of all
python docs/screenshots.py --quickstart REPORT  of the quickstart's report alone, quickstart.png
python docs/screenshots.py --measure          no pictures: how long pages of 400 and of 50,000 flips take to open
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from olive_ext.report.html.render import render, to_html  # noqa: E402
from tests.report.chromium import Chromium, find_chromium  # noqa: E402
from tests.report.synthetic import comparison, pair_of, report  # noqa: E402

IMAGES = ROOT / "docs" / "images"
DESK = (1200, 900)
MAX_BYTES = 300_000

# File, page, window, colour scheme, and the first and last element shown.
SHOTS = (
    ("report-light.png", "report", DESK, "light", ("body", "#differences")),
    ("report-flips.png", "report", DESK, "light", ("#flips", ".flip:nth-child(3)")),
    ("compare.png", "compare", DESK, "light", ("body", "#differences table")),
)


QUICKSTART = (("quickstart.png", "report", DESK, "light", ("body", ".verdict")),)


def made_up() -> dict[str, str]:
    """Pages of the tests' report: it alone, and three models of its answers against one."""
    several = pair_of("int8", "int4-block32", "int4-block128")
    return {"report": to_html(report(found=comparison(400))), "compare": render(several)}


def of(paths: Sequence[str]) -> dict[str, str]:
    """Pages of real reports."""
    from olive_ext.run.earlier_reports import compare, load

    pages = {"report": to_html(load(paths)[-1].report)}
    return pages if len(paths) == 1 else {**pages, "compare": render(compare(paths))}


def shoot(browser: Chromium, page: Path, shot: tuple[str, str, tuple[int, int], str, tuple[str, str]]) -> Path:
    """One picture; returns its path."""
    name, _, (width, height), scheme, (first, last) = shot
    browser.show(width, height, scheme=scheme, mobile=False, scale=1)
    browser.open(page)
    target = IMAGES / name
    top = max(0, browser.run(f"document.querySelector({first!r}).getBoundingClientRect().top") - 24)
    bottom = browser.run(f"document.querySelector({last!r}).getBoundingClientRect().bottom") + 24
    browser.screenshot(target, clip=(0, top, width, bottom - top))
    target.write_bytes(smaller(target.read_bytes()))
    return target


def smaller(png: bytes) -> bytes:
    """With a palette of its own: these pages have few colours."""
    from PIL import Image

    written = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


SEARCH = """
(async () => {
  const field = document.getElementById("flip-search"), list = document.getElementById("flip-list");
  const begin = performance.now();
  field.value = "photosynthesis";
  field.dispatchEvent(new Event("input"));
  while (list.dataset.query !== field.value) await new Promise((done) => setTimeout(done, 5));
  return [performance.now() - begin, document.getElementById("flip-count").textContent];
})()
"""
READY = "performance.getEntriesByType('navigation')[0].domInteractive"


def measure(path: str) -> int:
    """Prints size, milliseconds until the scripts have run and of a search, for each page in a fresh browser."""
    with tempfile.TemporaryDirectory() as folder:
        for num_flips in (400, 50_000):
            page = Path(folder) / "page.html"
            page.write_text(to_html(report(found=comparison(400, num_flips=num_flips))), encoding="utf-8")
            with Chromium(path) as browser:
                browser.show(*DESK)
                browser.open(page)
                ready, (milliseconds, found) = browser.run(READY), browser.run(SEARCH)
            size = page.stat().st_size / 1e6
            print(f"{num_flips:6} flips  {size:5.1f} MB  ready {ready:4.0f} ms  search {milliseconds:4.0f} ms  {found}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Writes the pictures; 1 where there is no browser, something is on its console, or a picture is too large."""
    path = find_chromium()
    if path is None:
        print("no Chromium on PATH", file=sys.stderr)
        return 1
    if "--measure" in argv:
        return measure(path)
    is_quickstart = "--quickstart" in argv
    shots, argv = QUICKSTART if is_quickstart else SHOTS, [text for text in argv if text != "--quickstart"]
    pages = of(argv) if argv else made_up()
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Chromium(path) as browser:
        files = {name: Path(folder) / f"{name}.html" for name in pages}
        for name, text in pages.items():
            files[name].write_text(text, encoding="utf-8")
        taken = [shoot(browser, files[shot[1]], shot) for shot in shots if shot[1] in files]
        problems = [*browser.problems, *(f"{item} is large" for item in taken if item.stat().st_size > MAX_BYTES)]
    for item in taken:
        print(f"{item.relative_to(ROOT)}  {item.stat().st_size:,} bytes")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
