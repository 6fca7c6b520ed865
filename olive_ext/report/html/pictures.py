"""The pictures of a page as inline SVG: forest plot, histogram of KL, KL by position and by class of the token.

Knows neither matplotlib's set-up nor the page's colours, which are `svg`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

from olive_ext.report import numbers
from olive_ext.report.comparison import Bin, Divergence
from olive_ext.report.html.svg import DASHES, GAIN, INK, LINE, LOSS, MARKERS, PAPER, SERIES, SOFT, drawing, svg, ticks
from olive_ext.report.view import WORDS, DifferenceRow

Series = Sequence[tuple[str, Sequence[Bin]]]
"""Name of the candidate, and its bins."""

_WIDTH, _HEIGHT = 340, 236
_GAP = "\N{EM SPACE}" * 2
"""SVG runs ordinary spaces together."""

_LEAST_SHARED = 8
"""Characters at the beginning of all candidates' names that are worth leaving out."""

_DECADE = re.compile(r"1(0*|e.*)|0\.0*1")
_TONES = {"loss": (LOSS, "v", LOSS), "gain": (GAIN, "^", GAIN), "unclear": (SOFT, "o", PAPER)}


def forest(rows: Sequence[DifferenceRow], name: str, width: int, several: bool) -> str:
    """Differences in percentage points with their 95 % intervals, a row each; narrow ones have the words above."""
    is_narrow = width < 500
    rows = _told_apart(rows)
    step, top, bottom = (46 if is_narrow else 30), 10, 44
    height = top + bottom + step * len(rows)
    left, right = (8, 8) if is_narrow else (_label_width(rows, several), 186)
    with drawing(width, height) as figure:
        axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
        for place, row in enumerate(rows):
            _interval(axes, row, place + (0.3 if is_narrow else 0.0))
            is_first = place == 0 or _label(rows[place - 1]) != _label(row)
            if several and is_first and place:
                axes.axhline(place - 0.5, color=LINE, linewidth=1, xmin=-1, clip_on=False)
            if is_narrow:
                _words_above(axes, row, place, several)
            else:
                _words_beside(axes, row, place, several, is_first)
        _forest_axes(axes, rows, is_narrow)
        label = "; ".join(f"{row.task} {row.metric} {row.shown} points, {WORDS[row.tone]}" for row in rows)
        return svg(figure, f"Paired differences with 95 % intervals: {label}", name)


def _told_apart(rows: Sequence[DifferenceRow]) -> list[DifferenceRow]:
    """The rows, without what all candidates' long names begin with."""
    names = {row.candidate for row in rows}
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in alike) if len(names) > 1 else ""
    begin = max(shared.rfind(joint) for joint in " _/-") + 1
    if begin < _LEAST_SHARED:
        return list(rows)
    return [replace(row, candidate=f"…{row.candidate[begin:]}") for row in rows]


def _label_width(rows: Sequence[DifferenceRow], several: bool) -> int:
    longest = max((len(_label(row)) for row in rows), default=0)
    longest += max((len(_cut(row.candidate, 24)) + 4 for row in rows), default=0) if several else 0
    return min(440, 24 + round(6.2 * longest))


def _label(row: DifferenceRow) -> str:
    return _cut(f"{row.task} · {row.metric}")


def _cut(text: str, most: int = 48) -> str:
    """Shortens a long name to both of its ends."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def _interval(axes: Any, row: DifferenceRow, place: float) -> None:
    color, marker, face = _TONES[row.tone]
    axes.plot([row.low, row.high], [place, place], color=color, linewidth=2, solid_capstyle="butt", zorder=3)
    for end in (row.low, row.high):
        axes.plot([end, end], [place - 0.13, place + 0.13], color=color, linewidth=1.5, zorder=3)
    dot: dict[str, Any] = {"color": color, "markerfacecolor": face, "markeredgecolor": color}
    axes.plot([row.difference], [place], marker=marker, markersize=9, zorder=4, **dot)


def _words_above(axes: Any, row: DifferenceRow, place: int, several: bool) -> None:
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 11.5, "zorder": 5}
    label = f"{_cut(row.task, 16)} · {_cut(row.candidate, 16)}" if several else _cut(_label(row), 30)
    axes.text(0, place - 0.16, label, ha="left", bbox=ground, **style)
    axes.text(1, place - 0.16, _numbers(row), ha="right", color=SOFT, bbox=ground, **style)


def _words_beside(axes: Any, row: DifferenceRow, place: int, several: bool, is_first: bool) -> None:
    """Writes task and metric on the left, once for all candidates, and a candidate's name next to its interval."""
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    across = axes.get_yaxis_transform()
    if several:
        axes.annotate(_cut(row.candidate, 24), (0, place), (-12, 0), xycoords=across, ha="right", color=SOFT, **style)
        if is_first:
            left = axes.get_position().x0 * axes.figure.get_figwidth() * 72
            axes.annotate(_label(row), (0, place), (-left, 0), xycoords=across, ha="left", **style)
    else:
        axes.annotate(_label(row), (0, place), (-12, 0), xycoords=across, ha="right", **style)
    axes.annotate(_numbers(row), (1, place), (14, 0), xycoords=across, ha="left", color=SOFT, fontsize=11.5, **style)


def _numbers(row: DifferenceRow) -> str:
    return f"{row.shown}\N{EM SPACE}({row.interval})"


def _forest_axes(axes: Any, rows: Sequence[DifferenceRow], is_narrow: bool) -> None:
    low, high = min(0.0, *(row.low for row in rows)), max(0.0, *(row.high for row in rows))
    room = (high - low or 1.0) * 0.06
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(ticks(6))
    axes.grid(axis="x", zorder=0)
    axes.axvline(0, color=INK, linewidth=1.25, zorder=2)
    axes.tick_params(length=0, pad=6)
    middle = "percentage points" if is_narrow else "candidate minus reference, percentage points"
    axes.set_xlabel(f"← lower{_GAP}{middle}{_GAP}higher →", labelpad=8)


def kl_pictures(found: Sequence[tuple[str, Divergence]], name: str) -> list[tuple[str, str]]:
    """Captions and SVG of one task's pictures, those of which the candidates' divergences have the bins."""
    kinds = (
        ("How far apart", "histogram", _histogram),
        ("Where in the text", "by_position", _by_position),
        ("On which tokens", "by_class", _by_class),
    )
    made = []
    for caption, kind, draw in kinds:
        bins: list[tuple[str, Sequence[Bin]]] = [(candidate, getattr(item, kind)) for candidate, item in found]
        series = [item for item in bins if item[1]][: len(SERIES)]
        if series:
            made.append((caption, draw(series, f"{name}-{kind}")))
    return made


def _histogram(series: Series, name: str) -> str:
    """Share of the positions by the size of their KL; bars for one candidate, outlines for several."""
    edges = [item.label for item in series[0][1]]
    with _small(series) as (figure, axes):
        for place, (candidate, bins) in enumerate(series):
            total = sum(item.count for item in bins) or 1
            shares = [100 * item.count / total for item in bins]
            if len(series) == 1:
                axes.bar(range(len(shares)), shares, width=0.86, align="edge", color=SERIES[0])
            else:
                label = _cut(candidate, 18)
                axes.stairs(shares, color=SERIES[place], linestyle=DASHES[place], linewidth=2, label=label)
        axes.set_xticks(*_edge_ticks(edges))
        axes.set_xlim(0, len(edges))
        axes.set_ylim(0)
        _finish(figure, axes, "KL of a position, nats (left edge)", "% of positions")
        return svg(figure, "Histogram of KL over positions", name)


def _by_position(series: Series, name: str) -> str:
    """Mean KL along the text; each range of positions stands at its beginning."""
    labels = [item.label.partition("-")[0] for item in max((bins for _, bins in series), key=len)]
    with _small(series) as (figure, axes):
        for place, (candidate, bins) in enumerate(series):
            xs, ys = _known(bins)
            axes.plot(xs, ys, color=SERIES[place], marker=MARKERS[place], markersize=5, linewidth=2,
                      label=_cut(candidate, 18), linestyle=DASHES[place], markeredgecolor=PAPER)  # fmt: skip
        every = max(1, -(-len(labels) // 6))
        axes.set_xticks(range(0, len(labels), every), labels[::every])
        axes.set_ylim(0)
        _finish(figure, axes, "tokens in front, from … on", "mean KL, nats")
        return svg(figure, "Mean KL by the position of the token", name)


def _by_class(series: Series, name: str) -> str:
    """Mean KL by what kind of token comes next, a row each."""
    labels = [item.label for item in series[0][1]]
    with _small(series, left=108, more=20 * max(0, len(labels) - 8)) as (figure, axes):
        for place, (candidate, bins) in enumerate(series):
            ys, xs = _known(bins)
            if len(series) == 1:
                axes.hlines(ys, 0, xs, color=SERIES[0], linewidth=2)
            axes.plot(xs, ys, color=SERIES[place], marker=MARKERS[place], markersize=8, linestyle="",
                      label=_cut(candidate, 18), markeredgecolor=PAPER, clip_on=False, zorder=3)  # fmt: skip
            for x, y in zip(xs, ys, strict=True) if len(series) == 1 else ():
                axes.annotate(numbers.nats(x), (x, y), (8, 0), textcoords="offset points", va="center",
                              fontsize=11.5, color=SOFT)  # fmt: skip
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.margins(x=0.2)
        axes.set_xlim(0)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x")
        _finish(figure, axes, "mean KL, nats")
        return svg(figure, "Mean KL by the class of the token", name)


def _known(bins: Sequence[Bin]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Places and means of the bins that have positions."""
    known = [(place, item.mean) for place, item in enumerate(bins) if item.mean is not None]
    return tuple(place for place, _ in known), tuple(mean for _, mean in known)


@contextmanager
def _small(series: Series, left: int = 48, more: int = 0) -> Iterator[tuple[Any, Any]]:
    """A small figure with its axes, `more` pixels higher than usual, with room for a legend of several candidates."""
    legend = 20 * -(-len(series) // 2) if len(series) > 1 else 0
    height, top = _HEIGHT + legend + more, 28 + legend
    with drawing(_WIDTH, height) as figure:
        axes = figure.add_axes((left / _WIDTH, 48 / height, 1 - (left + 14) / _WIDTH, 1 - (48 + top) / height))
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0, pad=5)
        yield figure, axes


def _finish(figure: Any, axes: Any, across: str, up: str = "") -> None:
    axes.set_xlabel(across, labelpad=6)
    if up:
        axes.set_title(up, loc="left", fontsize=11.5, color=SOFT, pad=6)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        figure.legend(
            loc="upper right", ncols=2, borderaxespad=0.1, handlelength=2.2, columnspacing=1.2, labelcolor=INK
        )


def _edge_ticks(edges: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and texts of at most seven edges: of whole decades, where there are any."""
    decades = [place for place, edge in enumerate(edges) if _DECADE.fullmatch(edge)]
    places = decades if len(decades) > 2 else list(range(len(edges)))
    places = places[:: max(1, -(-len(places) // 7))]
    return places, [edges[place].replace("e-0", "e\N{MINUS SIGN}") for place in places]
