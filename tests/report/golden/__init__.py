"""Golden reports: what people read of stored evaluations of the quickstart's model.

`python -m tests.report.golden` renews what they read; `python -m tests.report.golden runs` evaluates anew before.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from olive_ext.report import Report, from_json, to_json
from olive_ext.report.html.render import to_html
from olive_ext.report.plain_text import print_page, print_table, to_markdown
from olive_ext.run import compare

FOLDER = Path(__file__).parent
RUNS = ("float", "int4")
"""The models; the second is compared with the first."""

_TASKS = ["quickstart_choice", "quickstart_perplexity", "quickstart_generate", "size_on_disk"]


def stored(name: str) -> Report:
    """The report of one of `RUNS`."""
    return from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def goldens() -> dict[str, str]:
    """What people read of the stored reports, by the names of the files that keep it."""
    report, page = stored("int4"), compare([str(FOLDER / f"{name}.json") for name in RUNS])
    terminal, side_by_side = io.StringIO(), io.StringIO()
    print_table(report, Path("report.html"), terminal)
    print_page(page, (), side_by_side)
    html = re.sub(r"(?s)(<style.*?>|<script>).*?(</style>|</script>)", "", to_html(report))
    return {
        "int4.md": to_markdown(report),
        "int4.txt": terminal.getvalue(),
        "compare.txt": side_by_side.getvalue(),
        "int4.html": re.sub(r"\s*\n\s*", "\n", re.sub(r"(?<!^)<(?!/)", "\n<", html)),
    }


def renew() -> None:
    """Writes the goldens."""
    for name, text in goldens().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def run() -> None:
    """Evaluates the quickstart's model and writes the reports."""
    from olive_ext import evaluate
    from tests.exports.quickstart import TASKS, exported, quantized

    places = {str(exported()): "models/float", str(quantized(4, 128)): "models/int4", str(TASKS): "tasks"}
    reference, *_ = places
    for name, path in zip(RUNS, places, strict=False):
        keys: dict[str, Any] = {"model": {"path": path}, "include_path": str(TASKS), "engine": {"num_threads": 1}}
        keys |= {} if path == reference else {"reference": {"path": reference, "mode": "resident"}}
        made = to_json(evaluate({"tasks": _TASKS, "limit": 12, **keys}))
        for place, called in places.items():
            made = made.replace(place, called)
        values = json.loads(to_json(from_json(json.dumps(_small(json.loads(made))))))
        small = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(f"{small}\n", encoding="utf-8")


def _small(value: Any) -> Any:
    """With six digits."""
    if isinstance(value, dict):
        return {key: _small(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_small(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
