"""Tokens a second of 8 rows that decode together against one at a time: every exported family, on the CPU.

    python docs/benchmarks/row_speed.py OUT.json                    the tiny exports of tests/exports
    python docs/benchmarks/row_speed.py OUT.json NAME ... PACKAGE   some of them, or folders with other shapes

Eight greedy answers of the same length behind prompts of 12 tokens (encoder-decoders: behind one source), with one
slot and with eight, one thread, in turns; the better of the runs counts. Seconds are the processor's, which other work
on the machine does not take away. Each model runs in a process of its own; rows of earlier runs are kept in OUT.
`--table` prints OUT as a table.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT, ROWS = 12, 8


def measured(name: str, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a processor second by the number of slots, and tokens a step with all of them."""
    import olive_ext
    from olive_ext.text.requests import GenerationRequest

    path, source = _found(name)
    draw = random.Random(5)
    prompts = [[draw.randrange(40, 900) for _ in range(PROMPT)] for _ in range(ROWS)]
    asked = [GenerationRequest(prompt, max_new_tokens=new_tokens, source=source) for prompt in prompts]
    sessions = {}
    for slots in (1, ROWS):
        engine = {"num_slots": slots, "num_threads": 1}
        sessions[slots] = olive_ext.open(path, execution_provider="cpu", engine=engine)
        sessions[slots].stop_ids = frozenset()
    best = dict.fromkeys(sessions, 0.0)
    steps = 0.0
    for _ in range(rounds):
        for slots, session in sessions.items():
            session.gc()
            before, begin = session.counters.steps, time.process_time()
            made = sum(len(output.tokens) for output in session.generate(asked))
            best[slots] = max(best[slots], made / (time.process_time() - begin))
            steps = made / (session.counters.steps - before)
    return {"one": best[1], "eight": best[ROWS], "times": best[ROWS] / best[1], "tokens_a_step": steps}


def _found(name: str) -> tuple[Path, Any]:
    """Where the model is, and the source of an encoder-decoder's requests."""
    sys.path.insert(0, str(ROOT))
    if Path(name).is_dir():
        return Path(name), None
    from docs.decoders import _source
    from tests.exports import export

    made = export(name)
    return made.path, _source(made)


def table(rows: dict[str, Any]) -> str:
    """One line for each model."""
    lines = ["| model | 1 row, tokens/s | 8 rows, tokens/s | times | tokens a step |", "|---|--:|--:|--:|--:|"]
    for name, row in sorted(rows.items()):
        numbers = f"{row['one']:,.0f} | {row['eight']:,.0f} | {row['times']:.1f} | {row['tokens_a_step']:.1f}"
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=48)
    parser.add_argument("--rounds", metavar="N", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one, given.new_tokens, given.rounds)))
        return
    rows = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    for name in [] if given.table else given.names or _families():
        sizes = ["--new-tokens", str(given.new_tokens), "--rounds", str(given.rounds)]
        command = [sys.executable, __file__, str(given.out), "--one", name, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: {(done.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr, flush=True)
            continue
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: rows[name]}), flush=True)
    print(table(rows))


def _families() -> list[str]:
    """An fp32 export of each family and exporter that the CPU runs."""
    sys.path.insert(0, str(ROOT))
    from tests.exports import ALL, export

    found: dict[tuple[str, str], str] = {}
    for name in ALL:
        made = export(name)
        if made.dtype == made.kv_dtype == "fp32" and not made.not_on_cpu and not made.differs:
            found.setdefault((made.family, made.exporter.split()[0]), name)
    return list(found.values())


if __name__ == "__main__":
    main()
