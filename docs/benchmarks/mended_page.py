"""Writes the table of docs/locate.md and its picture from data/mended_*.json, which `mended_models` has measured.

python -m docs.benchmarks mended_page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness import FOLDER, ROOT, table
from mended_models import BASE, BY_ERROR, MIXED, PEERS

PAGE, PICTURE = ROOT / "docs" / "locate.md", ROOT / "docs" / "images" / "mended.png"
BEGIN, END = "<!-- Made by mended_page from here -->\n", "<!-- to here -->"
HEADS = ("model", "compared with", "MB", "KL, 1e-3 nats", "mended: MB", "KL, 1e-3 nats", "difference")
SHOWN = ("int4, blocks of 32", MIXED)
"""The table has these of the peers; the picture has all."""

TITLES = {
    "quickstart": "the quickstart's, 21 weights",
    "llama": "Llama, 7.6 M parameters",
    "qwen3": "Qwen 3, tied, 8.1 M",
}
Losses = dict[str, dict[str, Any]]


def models() -> dict[str, dict[str, Any]]:
    """What was measured of each model."""
    files = {name: FOLDER / "data" / f"mended_{name}.json" for name in TITLES}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def page_with_table(text: str) -> str:
    """The page with the table of what was measured."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [row for name, facts in models().items() for row in _rows(TITLES[name], facts["losses"])]
    return f"{before}{BEGIN}\n{table(HEADS, rows)}\n{END}{after}"


def _rows(title: str, losses: Losses) -> Iterator[tuple[str, ...]]:
    yield title, BASE, _megabytes(losses[BASE]), _interval(losses[BASE]["kl"]), "", "", ""
    for name in SHOWN:
        yield _row(name, losses[name], _mended_like(name, losses))
    random = sorted(_random(losses), key=lambda one: float(one["kl"]["mean"]))
    yield _row(f"best of {len(random)} random mixes", random[0], losses[f"mended like {MIXED}"])


def _mended_like(peer: str, losses: Losses) -> dict[str, Any] | None:
    """The model that was mended to as many bytes; None where the peer is smaller than the model that is mended."""
    mended = losses[f"mended like {peer}"]
    return mended if mended["bytes"] <= losses[peer]["bytes"] else None


def _row(name: str, other: dict[str, Any], mended: dict[str, Any] | None) -> tuple[str, ...]:
    own = ("", "", "") if mended is None else (_megabytes(mended), _interval(mended["kl"]), _interval(other["more"]))
    return "", name, _megabytes(other), _interval(other["kl"]), *own


def _random(losses: Losses) -> list[dict[str, Any]]:
    return [one for name, one in losses.items() if name.startswith("random ")]


def _megabytes(one: dict[str, Any]) -> str:
    return f"{one['bytes'] / 1e6:.2f}"


def _interval(one: dict[str, float]) -> str:
    return "{mean:.2f} ({low:.2f} to {high:.2f})".format(**{name: 1000 * value for name, value in one.items()})


def draw() -> None:
    """The picture: bytes to the right, loss upwards, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = models()
    figure, panels = pyplot.subplots(1, len(measured), figsize=(4.2 * len(measured), 3.8), squeeze=False)
    for panel, (name, facts) in zip(panels[0], measured.items(), strict=True):
        losses: Losses = facts["losses"]
        random = _random(losses)
        sizes = [one["bytes"] / 1e6 for one in random]
        panel.plot(sizes, [one["kl"]["mean"] for one in random], "x", color="0.6", label="random mixes", zorder=1)
        mended = [one for peer in PEERS if peer != BASE and (one := _mended_like(peer, losses)) is not None]
        _points(panel, [losses[BASE], *mended], "o-", "#0072b2", "mended")
        _points(panel, [losses[peer] for peer in PEERS if peer.startswith("int4")], "s--", "#d55e00", "int4, blocks")
        _points(panel, [losses["rtn_last"]], "v", "#cc79a7", "rtn_last")
        _points(panel, [losses[peer] for peer in PEERS if "k_quant" in peer], "D:", "#009e73", "k_quant_last, _mixed")
        _points(panel, [losses[BY_ERROR]], "^", "black", "by weight error")
        panel.set(yscale="log", title=TITLES[name], xlabel="MB")
    panels[0][0].set_ylabel("KL on held-out documents, nats")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _points(panel: Any, ones: list[dict[str, Any]], style: str, colour: str, label: str) -> None:
    means = [one["kl"]["mean"] for one in ones]
    below = [one["kl"]["mean"] - one["kl"]["low"] for one in ones]
    above = [one["kl"]["high"] - one["kl"]["mean"] for one in ones]
    sizes = [one["bytes"] / 1e6 for one in ones]
    panel.errorbar(
        sizes, means, [below, above], fmt=style, color=colour, label=label, markersize=5, capsize=2, linewidth=1
    )


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw()
