"""No Python of a stranger's folder runs: not where it is the working directory of a command or of what that starts, nor
where a model's files name it (`auto_map`), on any road by which a model, its tokenizer or its reference is opened."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export, hf_model
from tests.strangers import RAN, environment, put_classes, put_modules, run_commands
from tests.workflow.recipes import recipe

pytestmark = pytest.mark.usefixtures("forked_exports")

QUICK = ["--limit", "2", "--set", "bootstrap_iters=0"]
REFUSAL = "'trust_remote_code' = true"


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    return ["--tasks", "tiny_choice", "--include-path", str(write_tasks(tmp_path / "tasks"))]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_model("llama"), tmp_path / "hf"))


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Does not exist, unless Python of a stranger's ran. Exports are made anew."""
    monkeypatch.setenv(RAN, str(tmp_path / "ran"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "ran"


# the working directory


@pytest.fixture
def package_with_modules(tmp_path: Path) -> Path:
    model = Path(shutil.copytree(genai_export("llama"), tmp_path / "model"))
    put_modules(model)
    return model


@pytest.mark.long
def test_commands_within_a_models_folder(
    tmp_path: Path, ran: Path, package_with_modules: Path, tasks: list[str]
) -> None:
    written = recipe(tmp_path, {"type": "ONNXModel", "model_path": "."}, **blocks(tasks))
    (package_with_modules / "recipe.json").write_text(json.dumps(written))
    run_commands(
        package_with_modules,
        ran,
        ["evaluate", ".", *tasks, *QUICK],
        ["check", "recipe.json"],
        ["schema"],
        ["quickstart", str(tmp_path / "new")],
        ["job", "azureml", "recipe.json", "--compute", "cpu", "--output", str(tmp_path / "job")],
    )
    assert not ran.exists()
    assert telemetry(tmp_path) == set()


@pytest.mark.long
def test_comparison_within_a_models_folder(
    tmp_path: Path, ran: Path, package_with_modules: Path, hf: Path, tasks: list[str]
) -> None:
    """In a worker process, beside a reference that is exported."""
    put_modules(hf)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    evaluate = ["evaluate", ".", *tasks, *QUICK, "--set", "isolation=process", "--reference", str(hf), "--output"]
    commands = [[*evaluate, a], [*evaluate, b], ["compare", a, b], ["check", ".", "--verify"]]
    undecided = 3  # two reports of two documents can exclude no loss
    said = run_commands(package_with_modules, ran, *commands, statuses=(0, undecided))
    assert "exported" in said
    assert not ran.exists()
    assert telemetry(tmp_path) == set()


@pytest.mark.long
@pytest.mark.parametrize("entry", ["ours", "olive"])
def test_recipe_within_a_models_folder(tmp_path: Path, ran: Path, hf: Path, tasks: list[str], entry: str) -> None:
    """By `olive-ext run` and by Olive's own command with a `user_script`, which lies elsewhere and is the user's."""
    put_modules(hf)
    put_classes(hf)
    (tmp_path / "plugin.py").write_text("import olive_ext.workflow\n")
    own = blocks(tasks, reference=".", user_script=str(tmp_path / "plugin.py"))
    passes = {"fp32": {"type": "ModelBuilder", "precision": "fp32"}}
    written = recipe(tmp_path, {"type": "HfModel", "model_path": "."}, passes=passes, **own)
    (hf / "recipe.json").write_text(json.dumps(written))
    if entry == "ours":
        run_commands(hf, ran, ["run", "--config", "recipe.json"])
    else:
        command = [str(Path(sys.executable).with_name("olive")), "run", "--config", "recipe.json"]
        done = subprocess.run(command, cwd=hf, env=environment(ran), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "metrics.json").is_file()
    assert not ran.exists()
    assert telemetry(tmp_path) <= (set() if entry == "ours" else {"deviceid", "olive.json"})  # Olive's, outside of CI


def telemetry(folder: Path) -> set[str]:
    """Files of libraries that tell their makers of their use, in the user's cache."""
    return {file.name for file in (folder / "cache" / "Microsoft").rglob("*") if file.is_file()}


def blocks(tasks: list[str], **more: Any) -> dict[str, Any]:
    own = {"type": "OrtLMEvaluator", "tasks": [tasks[1]], "include_path": tasks[3], "limit": 2, "bootstrap_iters": 0}
    return {"evaluators": {"e": {**own, **more}}, "evaluator": "e"}


# what a model's files name


def package(hf: Path, **tokenizer: Any) -> str:
    """An ONNX package; where `tokenizer` is given, with that in its tokenizer's configuration."""
    folder = shutil.copytree(genai_export("llama"), hf.with_name("onnx"))
    if tokenizer:
        (folder / "own.py").write_text((hf / "own.py").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


OWN_TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
KNOWN, UNKNOWN = "llama", "unheard_of"
ROADS: dict[str, tuple[Callable[[Path], list[str]], set[str]]] = {
    "model": (lambda hf: ["evaluate", str(hf)], {UNKNOWN}),
    "reference": (lambda hf: ["evaluate", package(hf), "--reference", str(hf)], {UNKNOWN}),
    "reference, on transformers": (
        lambda hf: ["evaluate", package(hf), "--reference", str(hf), "--set", "reference.export=never"],
        {UNKNOWN},
    ),
    "tokenizer": (lambda hf: ["evaluate", package(hf), "--set", f"tokenizer={hf}"], set()),
    "tokenizer of the package": (lambda hf: ["evaluate", package(hf, **OWN_TOKENIZER)], {KNOWN, UNKNOWN}),
    "check": (lambda hf: ["check", str(hf)], set()),
    "check of a package": (lambda hf: ["check", package(hf, **OWN_TOKENIZER), "--verify"], {KNOWN, UNKNOWN}),
}
"""Command lines, and for which types of model they are refused: transformers have the classes of the known one."""


EXPORTS_AGAIN = (("model", KNOWN), ("model", UNKNOWN), ("reference", KNOWN), ("reference", UNKNOWN))
"""Seconds of the processor each."""

CASES = [(road, model_type) for road in ROADS for model_type in (KNOWN, UNKNOWN)]


@pytest.mark.parametrize(
    ("road", "model_type"),
    [pytest.param(*case, marks=pytest.mark.long if case in EXPORTS_AGAIN else ()) for case in CASES],
)
def test_python_named_by_a_models_files(
    road: str, model_type: str, hf: Path, tasks: list[str], ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_classes(hf, model_type=model_type)
    command, refused = ROADS[road]
    argv = command(hf)
    status = main([*argv, *(tasks + QUICK if argv[0] == "evaluate" else [])])
    said = " ".join(capsys.readouterr().err.split())
    assert not ran.exists()
    assert status == (2 if model_type in refused else 0), said
    assert (REFUSAL in said) == (model_type in refused)


@pytest.mark.long
def test_python_named_by_a_models_files_runs_where_it_is_trusted(
    hf: Path, tasks: list[str], ran: Path, tmp_path: Path
) -> None:
    put_classes(hf, model_type=UNKNOWN)
    trusted = ["--set", "trust_remote_code=true"]
    run_commands(tmp_path, ran, ["evaluate", str(hf), *tasks, *QUICK, *trusted], HF_HOME=str(tmp_path / "home"))
    assert any(name.endswith("own") for name in ran.read_text().split())


def test_weights_that_are_a_pickle_run_nothing(
    hf: Path, tasks: list[str], ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hf / "model.safetensors").unlink()
    command = f"echo it > {ran}"
    (hf / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(V" + command.encode() + b"\ntR.")
    assert main(["evaluate", str(hf), *tasks, *QUICK]) == 2
    assert not ran.exists()
    assert "transformers" in capsys.readouterr().err
