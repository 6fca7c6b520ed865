"""Recipes run by Olive itself: from outside in a process of its own, in three ways, and through `cli_run`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from olive_ext.cli import main
from olive_ext.errors import RequirementError, TaskError
from olive_ext.report import from_json
from olive_ext.run import evaluate
from olive_ext.workflow import cli_run
from olive_ext.workflow.olive_run import watched_runs
from tests.backends.local_tasks import write_tasks
from tests.exports import genai_export, hf_model
from tests.refusals import refused, tells
from tests.workflow.recipes import TWO_SIZES, recipe, saved, search_blocks

ROOT = Path(__file__).resolve().parents[2]
PLAIN = [sys.executable, "-m", "olive", "run"]
OURS = [sys.executable, "-c", "import sys; from olive_ext.cli import main; sys.exit(main())", "run"]
PYTHON = [
    sys.executable,
    "-c",
    "import sys, olive_ext.workflow; from olive.workflows import run; run(sys.argv[2])",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a folder that has the name of a task."""
    write_tasks(tmp_path / "tasks")
    (tmp_path / "tiny_choice").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")
    return tmp_path


def evaluator(**settings: Any) -> dict[str, Any]:
    return {
        "type": "OrtLMEvaluator",
        "tasks": ["tiny_choice", "tiny_generate", "size_on_disk"],
        "include_path": "tasks",
        "bootstrap_iters": 0,
        **settings,
    }


def onnx() -> dict[str, Any]:
    """A copy in the working directory: Olive's passes refuse files that another test may have linked to."""
    shutil.copytree(genai_export("llama"), "package")
    return {"type": "ONNXModel", "model_path": str(Path("package").resolve()), "onnx_file_name": "model.onnx"}


def hf() -> dict[str, Any]:
    return {"type": "HfModel", "model_path": str(hf_model("llama"))}


def outside(command: list[str], path: str) -> subprocess.Popen[str]:
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])  # a checkout of Olive first, where there is one
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [*command, "--config", path], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_outside(command: list[str], path: str) -> tuple[int, str]:
    process = outside(command, path)
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout + stderr


def metrics(path: Path) -> dict[str, float]:
    return {key: entry["value"] for key, entry in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(
    ("keys", "has_traceback", "words"),
    [
        ({"tassks": ["a"]}, False, "'evaluators.mine.tassks' 'tasks'"),
        ({"type": None}, True, "'evaluators.mine.type' 'OrtLMEvaluator'"),
    ],
)
@pytest.mark.long
def test_plain_olive_run_ends_with_our_line(
    folder: Path, keys: dict[str, Any], has_traceback: bool, words: str
) -> None:
    (folder / "olive_ext_plugin.py").write_text("import olive_ext.workflow\n")
    block = {name: value for name, value in evaluator(user_script="olive_ext_plugin.py", **keys).items() if value}
    builds = {"fp32": {"type": "ModelBuilder", "precision": "fp32"}}
    written = recipe(folder, hf(), passes=builds, evaluators={"mine": block}, evaluator="mine")
    code, text = run_outside(PLAIN, saved(folder, written))
    line = text.splitlines()[-1]
    assert (code, line[:18]) == (1, "olive-ext: error: ")
    assert tells(line, words)
    assert ("Traceback" in text) == has_traceback


@pytest.mark.long
@pytest.mark.usefixtures("forked_exports")
def test_float_model_of_an_earlier_pass_splits_the_distance(folder: Path) -> None:
    reference = {"path": "input_model", "float_model": "auto"}
    block = evaluator(tasks=["tiny_choice"], reference=reference, output_dir="reports")
    measure = {"type": "OrtLMEvaluation", "tasks": ["tiny_choice"], "include_path": "tasks", "reference": reference}
    passes = {
        "fp32": {"type": "ModelBuilder", "precision": "fp32"},
        "int4": {"type": "OnnxKQuantQuantization"},
        "measure": measure,
    }
    path = saved(folder, recipe(folder, hf(), passes=passes, evaluators={"e": block}, evaluator="e"))
    assert main(["run", "--config", path]) == 0
    reports = [from_json(file.read_text()) for file in (folder / "reports").glob("*/report.json")]
    carried = from_json((folder / "out/report.json").read_text())
    of_output = next(report for report in reports if report.comparison is not None)
    conversion, quantization = of_output.comparison.stages
    assert (conversion.name, conversion.is_exact) == ("conversion", True)
    assert quantization.kl_mean > 1e-4
    assert carried.comparison.stages == of_output.comparison.stages


@pytest.mark.long
def test_import_before_olives_run_is_enough_and_a_failure_ends_the_process(folder: Path) -> None:
    block = evaluator(tasks=["tiny_choise"])
    path = saved(folder, recipe(folder, onnx(), evaluators={"e": block}, evaluator="e"))
    code, text = run_outside(PYTHON, path)
    assert code == 1
    assert tells(text.strip().splitlines()[-1], "'tiny_choise' 'tiny_choice'")


@pytest.mark.long  # a run of Olive in a process of its own, interrupted midway
def test_interruption_ends_the_run_and_leaves_no_report(folder: Path) -> None:
    task = (folder / "tasks" / "local.py").read_text()
    (folder / "tasks" / "local.py").write_text(
        task.replace(
            "def load(**_):",
            "import pathlib, time\n\ndef load(**_):\n    pathlib.Path('loading').touch()\n    time.sleep(300)",
        )
    )
    path = saved(folder, recipe(folder, onnx(), evaluators={"e": evaluator(output_dir="reports")}, evaluator="e"))
    process = outside(OURS, path)
    deadline = time.monotonic() + 120
    while not (folder / "loading").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    said = stderr.strip().splitlines()[-1]
    assert (process.returncode, said[:23]) == (130, "olive-ext: interrupted:")
    assert said.endswith(f"'{folder / 'cache'}'")
    assert not (folder / "reports").exists()
    assert not (folder / "out" / "input_model_metrics.json").exists()


@pytest.mark.long
def test_composite_model_is_measured_by_the_pass_and_its_report_travels_along(folder: Path) -> None:
    part = onnx()
    model = {
        "type": "CompositeModel",
        "model_path": part["model_path"],
        "model_components": [part],
        "model_component_names": ["decoder"],
    }
    passes = {"measure": {"type": "OrtLMEvaluation", "tasks": ["tiny_choice"], "include_path": "tasks"}}
    assert cli_run(["--config", saved(folder, recipe(folder, model, passes=passes))]) == 0
    assert from_json((folder / "out/report.json").read_text()).metrics[0].task == "tiny_choice"


def test_search_follows_the_declared_metrics(folder: Path) -> None:
    sub_types = [{"name": "bytes", "priority": 1, "goal": {"type": "percent-min-improvement", "value": 10}}]
    block = evaluator(tasks=["tiny_choice"], metrics=[{"name": "size", "type": "size_on_disk", "sub_types": sub_types}])
    blocks = {**search_blocks(block), "evaluate_input_model": True}
    assert cli_run(["--config", saved(folder, recipe(folder, onnx(), **blocks))]) == 0
    footprint = json.loads((folder / "out/footprint.json").read_text())
    sizes = {
        node["metrics"]["value"]["size-bytes"]["value"]: node["is_pareto_frontier"]
        for node in footprint.values()
        if node.get("metrics") and node.get("from_pass")
    }
    assert len(sizes) == 2
    assert sizes[min(sizes)]
    assert not sizes[max(sizes)]


def test_search_in_which_every_evaluation_fails_is_a_failure(folder: Path) -> None:
    block = evaluator(tasks=["tiny_choise"])
    blocks = search_blocks(block, {"q": {"type": "OnnxKQuantQuantization"}})
    with refused(TaskError, "unknown_name", "evaluators.e.tasks", ["tiny_choise"]):
        cli_run(["--config", saved(folder, recipe(folder, onnx(), **blocks))])


def test_failure_that_olive_swallows_is_exit_code_1(folder: Path) -> None:
    model = onnx()
    (folder / "package" / "model.onnx").write_bytes(b"\x08\x01 this is no graph")
    blocks = {"passes": {"int4": {"type": "OnnxKQuantQuantization"}}}
    assert cli_run(["--config", saved(folder, recipe(folder, model, **blocks))]) == 1


def measuring(**settings: Any) -> dict[str, Any]:
    return {"type": "OrtLMEvaluation", "tasks": ["tiny_choice"], "include_path": "tasks", **settings}


def test_gate_stops_the_chain_after_its_model_report_and_table(folder: Path) -> None:
    """A second run has the models of Olive's cache, and measures anew what tasks of one's own read."""
    bounds = [{"metric": "size_on_disk", "max": 1}, {"metric": "acc", "min": 0}]
    passes = {
        "before": measuring(),
        "int4": {"type": "OnnxKQuantQuantization"},
        "gate": measuring(require=bounds),
        "never": {"type": "OnnxKQuantQuantization", "bits": 8},
    }
    block = recipe(folder, onnx(), passes=passes)
    with refused(RequirementError, "bound_broken", holds=("passes.gate", "size_on_disk/bytes")):
        cli_run(["--config", saved(folder, block)])
    steps = json.loads((folder / "out/chain.json").read_text())["steps"]
    assert [step["name"] for step in steps] == ["input model", "int4"]
    sizes = [step["values"]["size_on_disk"] for step in steps]
    assert sizes[1] < sizes[0]
    assert (folder / "out/model.onnx").exists()
    written_last = from_json((folder / "out/report-2.json").read_text())
    assert written_last.model["passes"] == ["int4"]
    assert [item.words.split()[0] for item in written_last.broken] == ["size_on_disk/bytes"]
    assert not (folder / "out/footprint.json").exists()

    (quantized,) = (folder / "cache").rglob("models/model.onnx")
    made = quantized.stat().st_mtime_ns
    bounds[0]["max"] = 1e9
    del passes["never"]
    code = folder / "tasks" / "local.py"
    longer = code.read_text().replace("range(1, 7)", "range(1, 1 + 4)")  # Python's cache compares seconds and size
    code.write_text(longer)
    assert cli_run(["--config", saved(folder, block)]) == 0
    assert quantized.stat().st_mtime_ns == made
    measured = [from_json((folder / "out" / name).read_text()) for name in ("report.json", "report-2.json")]
    assert [report.metrics[0].documents for report in measured] == ["4", "4"]


def test_olives_own_command_fails_by_the_evaluators_bounds_behind_the_saved_model(folder: Path) -> None:
    """In this process; that a failure ends one with 1 and that a user script suffices is shown above."""
    from olive.cli.launcher import main as olive_main

    (folder / "olive_ext_plugin.py").write_text("import olive_ext.workflow\n")
    where = {"user_script": "olive_ext_plugin.py", "output_dir": "reports"}
    against = {"reference": "input_model", "matters": 1, "fail_on_loss": 2}
    block = evaluator(tasks=["tiny_choice"], require=[{"metric": "acc", "min": 1}], **where, **against)
    blocks = {"passes": {"q": {"type": "OnnxKQuantQuantization"}}, "evaluators": {"e": block}, "evaluator": "e"}
    with refused(RequirementError, "bound_broken", holds=("evaluators.e", "tiny_choice/acc")):
        olive_main(["run", "--config", saved(folder, recipe(folder, onnx(), **blocks))])
    assert (folder / "out/model.onnx").exists()
    reports = {path.parent.name: from_json(path.read_text()) for path in folder.glob("reports/*/report.json")}
    assert {name: len(one.broken) for name, one in reports.items()} == {"input_model": 0, "q": 1}  # bounds are output's
    for name, where_it_is in (("input_model", "package"), ("q", "out")):
        compared = reports[name].comparison
        assert compared.arguments.split()[0].endswith(where_it_is), "not in Olive's cache"
        assert compared.over_all
    assert "tiny_choice-acc" in metrics(folder / "out/metrics.json")


@pytest.mark.parametrize(
    ("task", "losses"), [("tiny_choice", (2, 60)), pytest.param("tiny_rolling", (60, 0.5), marks=pytest.mark.long)]
)
def test_verdict_of_the_same_settings_is_the_same_by_every_door(
    folder: Path, task: str, losses: tuple[float, float], capfd: pytest.CaptureFixture[str]
) -> None:
    """And in a second run, whose Olive has the first one's evaluations in its cache."""
    package = str(Path("package").resolve())
    settings = {"tasks": [task], "include_path": "tasks", "reference": package, "tokenizer": package}
    block = recipe(folder, onnx(), passes={"q": {"type": "OnnxKQuantQuantization"}}, evaluator="e")
    options = ["--tasks", task, "--include-path", "tasks", "--reference", package, "--tokenizer", package]
    for loss in losses:
        block["passes"]["measure"] = {"type": "OrtLMEvaluation", **settings, "fail_on_loss": loss}
        block["evaluators"] = {"e": {"type": "OrtLMEvaluator", **settings, "fail_on_loss": loss, "output_dir": "r"}}
        status = main(["run", saved(folder, block)])
        told = "".join(capfd.readouterr())
        assert (told.count("bound broken: "), told.count(" is broken")) == (status == 1, 0), "once, by the verdict"
        assert main(["evaluate", "out", *options, "--fail-on-loss", str(loss), "--output", "cli"]) == status
        try:
            of_python = evaluate("out", **settings, fail_on_loss=loss, isolation="none").verdict
        except RequirementError as error:
            of_python = error.report.verdict
        for door in ("cli", "out", "r/q")[: 2 if status == 1 else 3]:  # a pass fails before the evaluator
            found = from_json(Path(door, "report.json").read_text())
            assert found.comparison.over_all
            assert found.comparison.matters == loss
            assert bool(found.broken) == (of_python.code == "bound_broken") == (status == 1), door
            assert (found.verdict.status, found.verdict.headline) == (of_python.status, of_python.headline), door


@pytest.mark.long
def test_search_with_shared_passes_keeps_to_a_threshold_or_fails(folder: Path) -> None:
    goal = {"type": "threshold", "value": 1}
    sub_types = [{"name": "bytes", "priority": 1, "goal": goal}]
    block = evaluator(tasks=["tiny_choice"], metrics=[{"name": "size", "type": "size_on_disk", "sub_types": sub_types}])
    tied = {"type": "GraphSurgeries", "surgeries": [{"surgeon": "TieWordEmbeddings"}]}
    whole = recipe(folder, onnx(), **search_blocks(block, {"first": tied, **TWO_SIZES}))
    with refused(RequirementError, "bound_broken", holds=("2", "1")):
        cli_run(["--config", saved(folder, whole)])
    goal["value"] = 1e9
    assert cli_run(["--config", saved(folder, whole)]) == 0
    assert (folder / "out/model.onnx").exists()


@pytest.mark.long
def test_model_of_olives_own_conversion_has_its_originals_answers(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By torch.export; with TorchScript it ends without a model, which is no success here."""
    convert = {"type": "OnnxConversion", "use_dynamo_exporter": True, "target_opset": 20}
    block = evaluator(tasks=["tiny_choice"], reference="input_model", output_dir="reports")
    blocks = {
        "passes": {"convert": convert},
        "evaluators": {"e": block},
        "evaluator": "e",
        "evaluate_input_model": False,
    }
    assert cli_run(["--config", saved(folder, recipe(folder, hf(), **blocks))]) == 0
    assert (folder / "out/model.onnx").exists()
    (found,) = [from_json(path.read_text()) for path in (folder / "reports").glob("*/report.json")]
    distances = {metric.metric: metric.value for metric in found.metrics if metric.task == "all"}
    assert distances["kl_mean"] < 1e-6

    convert["use_dynamo_exporter"] = False
    assert main(["run", "--config", saved(folder, recipe(folder, hf(), **blocks))]) == 1
    assert "'list' object" in capfd.readouterr().err


@pytest.mark.long
def test_pass_and_evaluator_run_in_a_python_environment(folder: Path) -> None:
    """A real one, of this very Python, in which Olive starts a process for each of them."""
    system = {"type": "PythonEnvironment", "python_environment_path": str(Path(sys.executable).parent)}
    accelerators = [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]
    measure = {"type": "OrtLMEvaluation", "tasks": ["tiny_choice"], "include_path": "tasks", "reference": "input_model"}
    blocks = {
        "passes": {"q": {"type": "OnnxKQuantQuantization"}, "measure": measure},
        "systems": {"local": {**system, "accelerators": accelerators}},
        "evaluators": {
            "e": evaluator(tasks=["tiny_choice"], user_script="olive_ext_plugin.py", reference="input_model")
        },
        "evaluator": "e",
        "evaluate_input_model": False,
    }
    (folder / "olive_ext_plugin.py").write_text("import olive_ext.workflow\n")
    whole = recipe(folder, onnx(), **blocks)
    with watched_runs() as runs:
        assert cli_run(["--config", saved(folder, whole)]) == 0
    assert [report.comparison is None for run in runs for report in run.reports] == [False, False]
    assert "tiny_choice-acc" in metrics(folder / "out/metrics.json")
    found = from_json((folder / "out/report.json").read_text())
    assert found.model["passes"] == ["q"]
    assert found.comparison is not None
    measure["require"] = [{"metric": "acc", "task": "tiny_choice", "min": 1}]
    with pytest.raises(RequirementError, match="is broken: tiny_choice/acc = "):
        cli_run(["--config", saved(folder, whole)])
