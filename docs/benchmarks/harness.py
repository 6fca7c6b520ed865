"""What the benchmark scripts share: processes of one script, turns of what is compared, clocks, medians and ratios,
tables, and results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
Value = TypeVar("Value")

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for tests.exports and recipes, where a script makes its models


def parser_of(doc: str | None, *paths: str, rounds: int = 3) -> argparse.ArgumentParser:
    """A parser with the script's docstring, `paths` as positional arguments, `--rounds` and `--output FILE`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in paths:
        parser.add_argument(name, metavar=name.upper(), type=Path)
    parser.add_argument("--rounds", metavar="N", type=int, default=rounds)
    parser.add_argument("--output", metavar="FILE", type=Path, help="the results as JSON")
    return parser


def run_script(name: str, words: Sequence[object], **environment: str) -> int:
    """Runs a script of this folder, shows the command, and returns its exit status."""
    print(f"\n$ {name} {' '.join(map(str, words))}", flush=True)
    return _run([str(FOLDER / name), *words], environment).returncode


def measured(script: str, words: Sequence[object]) -> Any:
    """What a script of this folder prints as JSON in its last line, run in a process of its own."""
    done = _run([str(FOLDER / Path(script).name), *words], {}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _run(words: Sequence[object], environment: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *map(str, words)], env=environment, **options)


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """Each round's number and the names in its order, another one first in each. Round 0 is to warm up."""
    order = list(names)
    for number in range(rounds + 1):
        first = number % len(order)
        yield number, order[first:] + order[:first]


def clocks() -> tuple[float, float]:
    """Seconds of the wall, and of the processor in this process and all that it has started.

    This process's own are exact; the others' count in ticks of 10 ms, which a short call may not fill: 0 of them.
    """
    import psutil

    seconds = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one of Ray's own that has just ended
            seconds += sum(process.cpu_times()[:2])
    return time.perf_counter(), seconds


def timed(call: Callable[[], Value]) -> tuple[Value, float, float]:
    """What the call returns, and its seconds by both clocks."""
    wall, processor = clocks()
    value = call()
    wall_after, processor_after = clocks()
    return value, wall_after - wall, processor_after - processor


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, least and most: "1.22 (1.20 to 1.34)"."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table; columns whose first cell begins with a digit stand on the right."""
    body = [[str(cell) for cell in row] for row in rows]
    ends = ["--:" if cell[:1].isdigit() else "---" for cell in (body[0] if body else heads)]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(ends)}|", *(f"| {' | '.join(cells)} |" for cells in body)]
    return "\n".join(lines) + "\n"


def write(file: Path | None, given: argparse.Namespace, **results: Any) -> None:
    """Writes results and arguments to `file`, where one was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        arguments = {name: str(value) for name, value in vars(given).items()}
        file.write_text(json.dumps({"arguments": arguments, **results}, indent=1) + "\n", encoding="utf-8")


def bench(model: Path, output: Path, options: Sequence[object]) -> dict[str, Any] | None:
    """Runs one comparison from this checkout and returns its bench.json; None where it failed, which was printed."""
    status = run_script("bench.py", [model, *options, "--output", output])
    return json.loads((output / "bench.json").read_text(encoding="utf-8")) if status == 0 else None


def bench_table(results: dict[str, dict[str, Any] | None], goals: dict[str, dict[str, float]]) -> str:
    """A line for each row and peer: ours, the peer's, the ratio with its spread, the goal and whether it is reached."""
    heads = ("row", "against", "ours, requests/s", "its", "ours / it", "goal", "reached", "answers")
    return table(
        heads, [line for name, result in results.items() for line in _lines(name, result, goals.get(name, {}))]
    )


def _lines(name: str, result: dict[str, Any] | None, goals: dict[str, float]) -> Iterator[tuple[str, ...]]:
    if result is None:
        yield (name, "", "", "", "", "", "failed", "")
        return
    summary = result["summary"]
    ours, *peers = summary["rows"]
    speed = f"{ours['requests_per_second']:.2f}"
    for peer in peers:
        goal = goals.get(peer["backend"])
        wanted = "" if goal is None else f"{goal:g}x"
        if peer["speedup"] is None:
            yield (name, peer["backend"], "", "", "", wanted, "", str(peer["error"]))
            continue
        middle, least, most = peer["speedup"]
        reached = "" if goal is None else "yes" if middle >= goal else "no"
        against = peer["backend"] + ("" if peer["batch_size"] is None else f" (batch {peer['batch_size']})")
        differs = {True: "differ", False: "agree", None: ""}[peer["agreement"].get("differs")]
        ratio = f"{middle:.2f} ({least:.2f} to {most:.2f})"
        yield (name, against, speed, f"{peer['requests_per_second']:.2f}", ratio, wanted, reached, differs)
    used = "unknown" if summary["utilisation"] is None else f"{summary['utilisation']:.0%}"
    facts = f"{speed} requests/s, fed / distinct {summary['fed_over_distinct'] or 0:.3f}, utilisation {used}"
    agreed = "differ" if ours["agreement"].get("differs") else "agree" if ours["agreement"] else ""
    yield (name, "itself", f"{facts}, {ours['memory_above'] / 1e6:.0f} MB above the model", "", "", "", "", agreed)
