"""The only door to matplotlib: figures become inline SVG that takes colours and fonts from the page it stands in.

The same figure is always the same text, and has no id that another figure on the page could have.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

# Colours that stand for the page's own: matplotlib draws in these, and each becomes a CSS variable.
INK, SOFT, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
LOSS, GAIN = "#050505", "#060606"
SERIES = ("#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1)), (0, (8, 3)))
_VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    LINE: "--line",
    PAPER: "--paper",
    LOSS: "--loss",
    GAIN: "--gain",
    **{color: f"--series-{number}" for number, color in enumerate(SERIES, 1)},
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "olive-ext",
    "path.simplify": False,
    "text.parse_math": False,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), LINE),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), SOFT),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 11.5),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 1),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.unicode_minus", "axes.axisbelow"), True),
    "font.size": 12,
    "text.color": INK,
}


@contextmanager
def drawing(width: float, height: float) -> Iterator[Any]:
    """An empty figure of so many CSS pixels; its points are pixels. Raises `ImportError` without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc would show through
        matplotlib.rcParams.update(_STYLE)
        yield Figure(figsize=(width / 72, height / 72))


def svg(figure: Any, label: str, name: str) -> str:
    """The figure as an `<svg>` element; `label` is read out by screen readers, `name` is unique on the page."""
    written = io.StringIO()
    figure.savefig(
        written, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r" ?font-family: [^;\"]*;?", "", text)
    text = _own_ids(text, name).replace("xlink:href", "href")
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    frame = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert frame is not None, "matplotlib's SVG has a viewBox"
    width, height = frame.groups()
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" style="max-width:{width}px">'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()


def _own_ids(text: str, name: str) -> str:
    """Ids that something refers to get `name` in front; the others go."""
    used = set(re.findall(r"(?:href=\"#|url\(#)([\w-]+)", text))

    def renamed(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    text = re.sub(r'\s+id="([\w.:-]+)"', renamed, text)
    return re.sub(r"(href=\"#|url\(#)([\w-]+)", rf"\g<1>{name}-\g<2>", text)


def ticks(most: int) -> Any:
    """A locator of at most so many round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most)
