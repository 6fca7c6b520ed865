"""Compares two checkouts of this package on the same models: are the numbers equal to the bit, and which is faster?

python docs/benchmarks/two_checkouts.py BEFORE AFTER MODEL [MODEL ...] [--rounds 5] [--output FILE]

BEFORE and AFTER are roots of checkouts. Each MODEL, an ONNX package on the CPU, answers the same random requests (510
scored ones with shared stems, 24 greedy generations) under each of `ENGINES`, in processes of one checkout and the
other by turns. Where weights lie in memory differs from process to process and moves times by some per cent: the
ratio is that of the medians over the rounds, and its spread is shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "tree batches": {"scoring": "tree", "chunk_size": 64, "num_slots": 4},
    "rows": {"scoring": "rows", "chunk_size": 64, "num_slots": 4},
    "untouched graph": {"scoring": "rows", "chunk_size": 256, "num_slots": 3, "graph": "untouched"},
}
"""Settings that leave nothing to a measurement: with "auto" a run may choose another form of steps, whose rounding is
another one."""


def answer(model: str) -> dict[str, dict[str, Any]]:
    """Digest of all numbers and seconds (wall, CPU) of each of `ENGINES`, in this process with the package it finds."""
    import olive_ext
    from olive_ext.session.requests import GenerationRequest, ScoringRequest

    found = {}
    for name, engine in ENGINES.items():
        with olive_ext.open(model, kind="onnx", engine=engine) as session:
            pairs, prompts = _requests(len(session.tokenizer.hf), session.max_length)
            asked = [ScoringRequest(context, target) for context, target in pairs]
            to_generate = [GenerationRequest(prompt, max_new_tokens=24) for prompt in prompts]
            session.loglikelihood(asked[:30])
            session.generate(to_generate[:2])
            session.gc()
            wall, cpu = time.perf_counter(), time.process_time()
            scored = session.loglikelihood(asked)
            generated = session.generate(to_generate)
            seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            runs_trees = "tree batches" not in name or session.describe_execution()["scoring"] == "tree"
        digest = hashlib.sha256()
        for output in scored:
            digest.update(struct.pack(f"{len(output.token_logprobs)}d?", *output.token_logprobs, output.is_greedy))
        digest.update(json.dumps([list(output.tokens) for output in generated]).encode())
        found[name] = {"digest": digest.hexdigest()[:16], **seconds, "is_as_named": runs_trees}
    return found


def _requests(vocab_size: int, max_length: int) -> tuple[list[tuple[list[int], list[int]]], list[list[int]]]:
    """(context, target) pairs and prompts, as token ids."""
    rng = random.Random(5)

    def draw(least: int, most: int) -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(rng.randint(least, min(most, max_length // 4)))]

    stems = [draw(1, 120) for _ in range(20)]
    pairs = []
    for _ in range(170):
        context = rng.choice(stems) + draw(1, 25)
        pairs += [(context, draw(1, 1)), (context, draw(1, 20)), (draw(1, 2), draw(1, 40))]
    return pairs, [rng.choice(stems) + draw(1, 10) for _ in range(24)]


def run(checkout: Path, model: Path) -> dict[str, dict[str, Any]]:
    """`answer` in a process that imports the package from `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, str(Path(__file__).resolve()), "--answer", str(model)]
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {model} failed:\n{done.stderr[-2000:]}")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(before: Path, after: Path, model: Path, rounds: int) -> list[dict[str, Any]]:
    """One row for each of `ENGINES`."""
    runs = [(run(before, model), run(after, model)) for _ in range(rounds)]
    rows = []
    for name in ENGINES:
        row: dict[str, Any] = {"model": model.name, "engine": name, "is_as_named": runs[0][0][name]["is_as_named"]}
        row["is_equal"] = len({side[name]["digest"] for pair in runs for side in pair}) == 1
        for clock in ("wall", "cpu"):
            old, new = ([pair[side][name][clock] for pair in runs] for side in (0, 1))
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            row[clock] = statistics.median(new) / statistics.median(old)
            row[f"{clock}_least"], row[f"{clock}_most"] = min(ratios), max(ratios)
        rows.append(row)
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(answer(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    print("| model | engine | numbers | seconds, after / before (spread) | CPU seconds, after / before (spread) |")
    print("|---|---|---|---|---|")
    rows = []
    for model in given.models:
        found = compare(given.before.resolve(), given.after.resolve(), model.resolve(), given.rounds)
        rows += found
        for row in found:
            equal = "equal to the bit" if row["is_equal"] else "DIFFER"
            name = row["engine"] if row["is_as_named"] else f"{row['engine']} (not to be had: rows)"
            spread = (f"{row[c]:.3f} ({row[f'{c}_least']:.2f} to {row[f'{c}_most']:.2f})" for c in ("wall", "cpu"))
            print(f"| {row['model']} | {name} | {equal} | {' | '.join(spread)} |", flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["is_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
