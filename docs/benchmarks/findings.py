"""Writes findings.md from data/findings.json: the questions that a script has answered, and what the answer decides."""

from __future__ import annotations

import json
from typing import Any

from harness import FOLDER, table

HEAD = """# Findings

Questions that are settled: each script's numbers, and what they decide. The scripts are in git: `git show
{scripts}:docs/benchmarks/NAME`. This page is written by `python -m docs.benchmarks findings`.

"""


def page() -> str:
    """The page as markdown."""
    data: dict[str, Any] = json.loads((FOLDER / "data" / "findings.json").read_text(encoding="utf-8"))
    rows = [(one["question"], one["finding"], f"[{one['decides']}]({one['where']})", one["script"])
            for one in data["findings"]]  # fmt: skip
    return HEAD.format(scripts=data["scripts"]) + table(("question", "finding", "decides", "script"), rows)


if __name__ == "__main__":
    (FOLDER / "findings.md").write_text(page(), encoding="utf-8")
