"""How often the 90 % intervals of predicted changes hold on documents that were held out, at 8, 4, 3 and 2 bits.

The quickstart's model answers 2,000 new documents of two tasks in float32, and so do copies of it whose weights were
rounded to nearest. Then a part of the documents is drawn many times, at random or the smallest margins with more
probability: the model of changes is fitted to it and predicts how many of all others change. In the rows "count" the
others' margins are not told to it, as behind a limit. Evaluations in FOLDER are kept.

    python -m docs.benchmarks margins MODEL FOLDER [--rounds N] [--plain]

MODEL is the quickstart's model as a float32 ONNX package. With --plain the logistic model is one of the margin itself.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import harness
import numpy as np

from olive_ext.stats.margins import ChangeModel

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
TASKS = ("quickstart_choice", "quickstart_letters")
BITS = (8, 4, 3, 2)
BLOCK = 32
DOCUMENTS = 2000
PARTS = (50, 200, 1000)


class PlainModel(ChangeModel):
    """Logistic in the margin itself."""

    def _design(self, margins: np.ndarray) -> np.ndarray:
        return np.stack([np.ones_like(margins), margins / self._scale], axis=1)


def write_tasks(folder: Path) -> None:
    """The quickstart's two tasks of choices, with documents that it was not trained on."""
    sys.path.insert(0, str(RECIPE / "make"))
    import make_data
    from documents import story

    shutil.copytree(RECIPE / "tasks", folder)
    random = Random(1)
    told = make_data.distinct(lambda: story(random, held_out=True, mix=make_data.CHOICE_MIX), DOCUMENTS)
    choices = [{"context": item.context, "endings": item.options, "answer": item.answer} for item in told]
    letters = make_data.letters_rows(random, True, DOCUMENTS)
    for name, rows in (("choice", choices), ("letters", letters)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rounded(source: Path, folder: Path, bits: int) -> None:
    """A copy of a package with the weights of its products rounded in blocks, as float32."""
    import onnx
    from onnx import numpy_helper

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.onnx*", "cache"))
    model = onnx.load(source / "model.onnx")
    used = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    for tensor in model.graph.initializer:
        if tensor.name in used and len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(rounded(numpy_helper.to_array(tensor), bits), tensor.name))
    onnx.save(model, folder / "model.onnx")


def rounded(weights_KN: np.ndarray, bits: int) -> np.ndarray:
    """To the nearest of 2^bits values in blocks along K, the block's largest one exactly."""
    num_rows, num_columns = weights_KN.shape
    padded = np.pad(weights_KN, ((0, -num_rows % BLOCK), (0, 0))).reshape(-1, BLOCK, num_columns)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(1)[:, None], 1)
    scale = np.where(largest == 0, 1, -largest / 2 ** (bits - 1))
    levels = np.clip(np.round(padded / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (levels * scale).reshape(-1, num_columns)[:num_rows].astype(weights_KN.dtype)


def scores(model: Path, tasks: Path, output: Path) -> dict[str, np.ndarray]:
    """Log-probabilities [D, C] of the choices, by task; evaluated where they are not kept."""
    if not (output / "report.json").exists():
        command: list[str | Path] = [Path(sys.executable).with_name("olive-ext"), "evaluate", model]
        command += ["--tasks", ",".join(TASKS), "--include-path", tasks, "--sample-log-num", str(DOCUMENTS)]
        subprocess.run([*command, "--output", output], check=True, stdout=subprocess.DEVNULL)
    found = {}
    for task in TASKS:
        lines = (output / f"samples_{task}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
        rows = {item["doc_id"]: [float(each[0][0]) for each in item["resps"]] for item in map(json.loads, lines)}
        found[task] = np.array([rows[number] for number in range(DOCUMENTS)])
    return found


def margins(reference_DC: np.ndarray, candidate_DC: np.ndarray) -> list[np.ndarray]:
    """Both models' margins [D] of the reference's answers."""
    rows, best = np.arange(len(reference_DC)), reference_DC.argmax(1)
    found = []
    for own in (reference_DC, candidate_DC):
        others = own.copy()
        others[rows, best] = -np.inf
        found.append(own[rows, best] - others.max(1))
    return found


def drawn(reference: np.ndarray, how: str, random: np.random.Generator) -> np.ndarray:
    """All documents in the order of a draw: uniform, or a small margin up to 11 times as likely as a large one."""
    if how == "alike":
        return random.permutation(len(reference))
    ranks = np.argsort(np.argsort(reference)) / len(reference)
    return np.argsort(random.exponential(size=len(reference)) * (0.1 + ranks))


def coverage(kind: Any, reference: np.ndarray, candidate: np.ndarray, how: str, part: int, draws: int) -> list[float]:
    """Share of intervals that hold, and mean numbers predicted and changed."""
    random = np.random.default_rng([part, draws])
    changed, rows = candidate < 0, []
    for _ in range(draws):
        order = drawn(reference, "near" if how == "near" else "alike", random)
        own, rest = order[:part], order[part:]
        model = kind(reference[own], candidate[own], changed[own])
        told = (reference[own], len(rest)) if how == "count" else (reference[rest],)
        number, low, high = model.predict(*told)
        real = changed[rest].sum()
        rows.append((low <= real <= high, number, real))
    return np.mean(rows, axis=0).tolist()


def main() -> None:
    """Evaluates what is not kept, and prints the table."""
    parser = harness.parser_of(__doc__, "model", "folder", rounds=200)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    folder, source = Path(args.folder).absolute(), Path(args.model).absolute()
    if not (folder / "tasks").exists():
        write_tasks(folder / "tasks")
    reference = scores(source, folder / "tasks", folder / "out-float")
    print("| documents drawn | bits | task | changed | " + " | ".join(f"{part} drawn" for part in PARTS) + " |")
    print("|---|--:|---|--:|" + "--:|" * len(PARTS))
    candidates = {}
    for bits in BITS:
        if not (folder / f"int{bits}").exists():
            write_rounded(source, folder / f"int{bits}", bits)
        candidates[bits] = scores(folder / f"int{bits}", folder / "tasks", folder / f"out-int{bits}")
    kind = PlainModel if args.plain else ChangeModel
    shares: dict[int, list[float]] = {bits: [] for bits in BITS}
    for how, bits, task in itertools.product(("alike", "count", "near"), BITS, TASKS):
        pair = margins(reference[task], candidates[bits][task])
        found = [coverage(kind, *pair, how, part, args.rounds) for part in PARTS]
        cells = [f"{100 * held:.0f} % ({number:.0f} for {real:.0f})" for held, number, real in found]
        print(f"| {how} | {bits} | {task[11:]} | {(pair[1] < 0).sum()} | {' | '.join(cells)} |", flush=True)
        shares[bits] += [held for held, *_ in found]
    print()
    for bits, own in shares.items():
        print(f"{bits} bits: {100 * np.mean(own):.1f} % of {args.rounds * len(own):,} intervals held")


if __name__ == "__main__":
    main()
