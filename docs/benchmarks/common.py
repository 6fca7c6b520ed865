"""Shared by the benchmark scripts: one call of `olive-ext bench`, and the table of the results of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; sys.path[:] = filter(None, sys.path); from olive_ext.cli import main; sys.exit(main())"


def bench(model: Path, output: Path, options: Sequence[object]) -> dict[str, Any] | None:
    """Runs one comparison from this checkout and returns its bench.json; None where it failed, which was printed."""
    words = ["bench", model, *options, "--output", output]
    status = _run("olive-ext", ["-c", COMMAND], words, {})
    return json.loads((output / "bench.json").read_text(encoding="utf-8")) if status == 0 else None


def run_script(name: str, words: Sequence[object], **environment: str) -> int:
    """Runs a script of this folder and returns its exit status."""
    return _run(name, [str(Path(__file__).parent / name)], words, environment)


def _run(name: str, start: Sequence[str], words: Sequence[object], environment: Mapping[str, str]) -> int:
    arguments = [str(word) for word in words]
    print(f"\n$ {name} {' '.join(arguments)}", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *start, *arguments], env={**os.environ, **environment, "PYTHONPATH": path}
    ).returncode


def table(found: dict[str, dict[str, Any] | None], goals: dict[str, dict[str, float]]) -> str:
    """A line for each row and peer: ours, the peer's, the ratio with its spread, the goal and whether it is reached."""
    lines = [
        "| row | against | ours, requests/s | its | ours / it | goal | reached | answers |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    for name, result in found.items():
        lines += _rows(name, result, goals.get(name, {}))
    return "\n".join(lines) + "\n"


def _rows(name: str, result: dict[str, Any] | None, goals: dict[str, float]) -> Iterable[str]:
    if result is None:
        yield f"| {name} | | | | | | failed | |"
        return
    summary = result["summary"]
    ours, *peers = summary["rows"]
    for peer in peers:
        goal = goals.get(peer["backend"])
        wanted = "" if goal is None else f"{goal:g}x"
        if peer["speedup"] is None:
            yield f"| {name} | {peer['backend']} | | | | {wanted} | | {peer['error']} |"
            continue
        middle, least, most = peer["speedup"]
        reached = "" if goal is None else "yes" if middle >= goal else "no"
        size = "" if peer["batch_size"] is None else f" (batch {peer['batch_size']})"
        differs = {True: "differ", False: "agree", None: ""}[peer["agreement"].get("differs")]
        yield (
            f"| {name} | {peer['backend']}{size} | {ours['requests_per_second']:.2f} | "
            f"{peer['requests_per_second']:.2f} | {middle:.2f} ({least:.2f} to {most:.2f}) | {wanted} | {reached} | "
            f"{differs} |"
        )
    used = "unknown" if summary["utilisation"] is None else f"{summary['utilisation']:.0%}"
    speed = f"{ours['requests_per_second']:.2f} requests/s"
    facts = f"{speed}, fed / distinct {summary['fed_over_distinct'] or 0:.3f}, utilisation {used}"
    above = f"{ours['memory_above'] / 1e6:.0f} MB above the model"
    agreed = "differ" if ours["agreement"].get("differs") else "agree" if ours["agreement"] else ""
    yield f"| {name} | itself | {facts}, {above} | | | | | {agreed} |"
