"""Kills evaluations with SIGKILL at random points, resumes them, and compares the bytes of what they found.

    python -m tests.faults --kills 50

Four evaluations of a tiny model are killed: scoring, generation, and a comparison with a resident and with a recorded
reference; and a search of Olive's over two quantizations of it, at any moment of its passes and evaluations. Each is
run once undisturbed; then `kills` times it is killed at a random moment of its run and run again. The metrics of every
model, and the comparison, must be the same bytes; and no answer may be in a journal twice, which means that nothing but
the chunk in flight was computed again. Processes are forked from one that has imported everything and has opened
nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from olive_ext.backends import lm_eval_run, task_loading  # noqa: F401  (imported before the forks)
from olive_ext.config import EvaluationConfig
from olive_ext.report import Report, from_json
from olive_ext.run import evaluate
from olive_ext.workflow import cli_run
from tests.exports import TEXT, genai_export
from tests.workflow.recipes import recipe, saved, search_blocks

WORDS = TEXT.split()
LOADER = f"""
import datasets

WORDS = {WORDS[:700]!r}


def load(**_):
    rows = [
        {{"question": " ".join(WORDS[n * 7 : n * 7 + 30]), "choices": WORDS[n * 7 + 30 : n * 7 + 34], "answer": n % 4}}
        for n in range(80)
    ]
    return {{"test": datasets.Dataset.from_list(rows)}}
"""
HEAD = 'custom_dataset: !function local.load\ntest_split: test\ndoc_to_text: "{{question}}"\nmetadata:\n  version: 1\n'
CHOICE = f"""task: kill_choice
{HEAD}output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
"""
GENERATE = f"""task: kill_generate
{HEAD}output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
EVALUATIONS: dict[str, dict[str, Any]] = {
    "scoring": {"tasks": ["kill_choice"]},
    "generation": {"tasks": ["kill_generate"]},
    "resident reference": {"tasks": ["kill_choice", "kill_generate"], "reference": {"mode": "resident"}},
    "recorded reference": {"tasks": ["kill_choice", "kill_generate"], "reference": {"mode": "recorded"}},
}
SEARCH = "search"
KINDS = [*EVALUATIONS, SEARCH]


def settings(folder: Path) -> dict[str, Any]:
    """What every evaluation has, with task files beside `folder`."""
    tasks = folder.parent / "tasks"
    tasks.mkdir(exist_ok=True)
    for name, content in (("local.py", LOADER), ("choice.yaml", CHOICE), ("generate.yaml", GENERATE)):
        (tasks / name).write_text(content, encoding="utf-8")
    engine = {"num_threads": 1, "num_slots": 4}
    return {"include_path": str(tasks), "engine": engine, "bootstrap_iters": 0, "isolation": "none"}


def configuration(kind: str, folder: Path) -> EvaluationConfig:
    """The evaluation of `kind` that keeps what it writes in `folder`."""
    given = {**settings(folder), **EVALUATIONS[kind], "output_dir": str(folder)}
    if "reference" in given:
        path = str(genai_export("llama", precision="int4"))
        given["reference"] = {**given["reference"], "path": path, "records_dir": str(folder / "records")}
    return EvaluationConfig.parse({"model": {"path": str(genai_export("llama"))}, **given})


def search_recipe(folder: Path) -> str:
    """The path of a recipe that searches among two quantizations, and keeps what it writes in `folder`."""
    package = folder.parent / "package"
    if not package.exists():
        shutil.copytree(genai_export("llama"), package)
    model = {"type": "ONNXModel", "model_path": str(package), "onnx_file_name": "model.onnx"}
    size = {"name": "size_on_disk", "type": "size_on_disk", "sub_types": [{"name": "bytes", "priority": 1}]}
    evaluator = {
        **settings(folder),
        "type": "OrtLMEvaluator",
        "tasks": ["kill_choice", "kill_generate", "size_on_disk"],
        "metrics": [size],
        "output_dir": str(folder / "reports"),
    }
    return saved(folder, recipe(folder, model, **search_blocks(evaluator)))


def run(kind: str, folder: Path) -> str:
    """Runs what is killed in this process, which prints into a file from here on, and gives what must be the same
    bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    if kind != SEARCH:
        return found(evaluate(configuration(kind, folder)))
    assert cli_run(["--config", search_recipe(folder)]) == 0
    reports = sorted((folder / "reports").glob("*/report.json"))
    return "\n".join(f"{file.parent.name} {found(from_json(file.read_text(encoding='utf-8')))}" for file in reports)


def found(report: Report) -> str:
    """The metrics and the comparison."""
    comparison = None if report.comparison is None else asdict(report.comparison)
    if comparison is not None:
        del comparison["reference"], comparison["metrics"]  # how it ran, and when
    return json.dumps([[asdict(metric) for metric in report.metrics], comparison], sort_keys=True, default=str)


def forked(kind: str, folder: Path, wait: Callable[[int], object]) -> str | None:
    """What `run` gives in a process of its own; None where `wait(pid)` has killed it."""
    result = folder / "found.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            draft = result.with_suffix(".new")
            draft.write_text(run(kind, folder), encoding="utf-8")
            draft.replace(result)
            code = 0
        finally:
            os._exit(code)
    wait(pid)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return None
    assert status == 0, f"it failed with status {status}: {(folder / 'printed').read_text(encoding='utf-8')[-2000:]}"
    return result.read_text(encoding="utf-8")


def import_what_it_imports(action: Callable[[], object]) -> None:
    """Runs `action` in a process of its own, and imports here what was imported there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "modules.json")
        pid = os.fork()
        if pid == 0:
            try:
                with suppress(Exception):
                    action()
                file.write_text(json.dumps(list(sys.modules)), encoding="utf-8")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        for name in json.loads(file.read_text(encoding="utf-8")):
            if name not in sys.modules and "__" not in name:
                with suppress(Exception):
                    importlib.import_module(name)


def answers_kept(folder: Path) -> Iterator[str]:
    """Every answer in every journal below `folder`, by file and key."""
    for file in folder.rglob("*.jsonl"):
        name = file.relative_to(folder)
        for line in file.read_text(encoding="utf-8").splitlines():
            checksum, _, body = line.partition(" ")
            if len(checksum) == 8:
                yield from (f"{name} {key}" for key in json.loads(body).get("answers", ()))


def kill_and_resume(kind: str, kills: int, root: Path, rng: random.Random) -> dict[str, Any]:
    """Counts over `kills` evaluations of one kind, each killed once. Raises `AssertionError` for a difference."""
    begin = time.monotonic()
    expected = forked(kind, root / "whole", lambda pid: None)
    seconds = time.monotonic() - begin
    whole = Counter(answers_kept(root / "whole"))
    counts = {"kills": 0, "finished first": 0, "answers": len(whole), "kept at most": 0, "kept at least": len(whole)}
    while counts["kills"] < kills:
        folder, after = root / "killed", rng.uniform(0.02, 1) * seconds
        shutil.rmtree(folder, ignore_errors=True)

        def kill(pid: int, after: float = after) -> None:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)

        if forked(kind, folder, kill) is not None:
            counts["finished first"] += 1
            continue
        counts["kills"] += 1
        kept = len(set(answers_kept(folder)))
        counts["kept at most"] = max(counts["kept at most"], kept)
        counts["kept at least"] = min(counts["kept at least"], kept)
        again = forked(kind, folder, lambda pid: None)
        assert again == expected, f"{kind}: killed after {after:.3f} s, it found other bytes:\n{again}\n{expected}"
        assert Counter(answers_kept(folder)) == whole, f"{kind}: an answer was computed twice, or is missing"
    return counts


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    os.environ["OLIVE_DISABLE_TELEMETRY"] = "1"
    for kind in {"recorded reference", *({SEARCH} & set(arguments.kinds))}:
        with tempfile.TemporaryDirectory() as folder:
            import_what_it_imports(partial(run, kind, Path(folder, "warm")))
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            counts = kill_and_resume(kind, arguments.kills, Path(folder), rng)
        sys.stdout.write(f"{kind}: {', '.join(f'{name} {count}' for name, count in counts.items())}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
