"""The folder of an Azure ML job: what moves, what is refused, and that every name in it is bound, which Azure's own
validation does not look at."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from olive_ext.check import mistakes, read_recipe
from olive_ext.cli import main
from olive_ext.plugins.jobs.azureml import make_azureml_job, portable

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "quickstart" / "recipe.json"


def unbound(folder: Path) -> list[str]:
    """Names in ${{...}} that job.yml binds to nothing, and paths of inputs, code and environment that are not there."""

    def look(job: dict[str, Any], parents: set[str]) -> list[str]:
        bound = {f"{kind}.{name}" for kind in ("inputs", "outputs", "search_space") for name in job.get(kind) or {}}
        steps = job.get("jobs") or {}
        above = {f"parent.{name}" for name in bound}
        above |= {f"parent.jobs.{step}.outputs.{name}" for step in steps for name in steps[step].get("outputs") or {}}
        own = {key: value for key, value in job.items() if key != "jobs"}
        paths = [value.get("path") for value in (job.get("inputs") or {}).values() if isinstance(value, dict)]
        part = job.get("trial") or job
        paths += [part.get("code"), ((part.get("environment") or {}).get("build") or {}).get("path")]
        gone = [path for path in paths if path and "${{" not in path and not (folder / path).exists()]
        names = set(re.findall(r"\$\{\{\s*([\w.-]+)\s*\}\}", str(own))) - bound - parents
        return [*sorted(names), *gone, *(fault for step in steps.values() for fault in look(step, above))]

    return look(yaml.safe_load((folder / "job.yml").read_text(encoding="utf-8")), set())


@pytest.fixture(autouse=True)
def _in_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The quickstart's job."""
    folder = tmp_path / "a job"
    assert main(["job", "azureml", str(RECIPE), "--compute", "cpus", "--output", str(folder)]) == 0
    submit, wheel = capsys.readouterr().out.splitlines()
    where = "--workspace-name WORKSPACE --resource-group GROUP"
    assert submit == f"cd '{folder}' && az ml job create --file job.yml {where}"
    assert wheel.endswith(f"python -m build --wheel --outdir '{folder}/environment' .")
    return folder


def test_folder_holds_a_job_that_lacks_nothing(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = yaml.safe_load((job / "job.yml").read_text(encoding="utf-8"))
    assert written["compute"] == "azureml:cpus"
    assert {name: (job / value["path"]).resolve().name for name, value in written["inputs"].items()} == {
        "model": "model",
        "tasks": "tasks",
    }
    assert unbound(job) == []
    pip = yaml.safe_load((job / "environment" / "conda.yml").read_text(encoding="utf-8"))["dependencies"][-1]["pip"]
    assert pip[-1] == "olive-ext[cpu,azureml]==0.1.0"
    assert (job / "environment" / "constraints.txt").read_bytes() == (ROOT / "constraints.txt").read_bytes()
    inputs = job / "code" / "inputs"
    inputs.mkdir()
    for name in ("model", "tasks"):
        (inputs / name).symlink_to(ROOT / "recipes" / "quickstart" / name)
    monkeypatch.chdir(job / "code")
    recipe = read_recipe("recipe.json")
    assert list(mistakes(recipe)) == []
    assert (recipe["output_dir"], recipe["cache_dir"]) == ("out", "out/cache")
    assert recipe["evaluators"]["quickstart"]["output_dir"] == "out/reports"


def test_copied_quickstart_becomes_a_job_with_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["quickstart", str(tmp_path / "copy")]) == 0
    monkeypatch.chdir(tmp_path / "copy")
    assert main(["job", "azureml", "recipe.json", "--compute", "c", "--output", "job"]) == 0
    code = {path.name for path in Path("job", "code").iterdir()}
    assert code == {"recipe.json", "olive_ext_plugin.py"}
    assert unbound(Path("job")) == []


def test_files_that_name_neighbours_come_with_their_folder(tmp_path: Path) -> None:
    for name in ("m/model.onnx", "other/model.onnx", "t/mine.yaml", "calibration.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    recipe = {
        "input_model": {"type": "ONNXModel", "model_path": str(tmp_path / "m" / "model.onnx")},
        "data_configs": [{"load_dataset_config": {"data_files": str(tmp_path / "calibration.jsonl")}}],
        "passes": {"e": {"type": "OrtLMEvaluation", "tasks": ["mmlu", str(tmp_path / "t" / "mine.yaml")]}},
        "evaluators": {"e": {"type": "OrtLMEvaluator", "tasks": ["a"], "reference": str(tmp_path / "other")}},
    }
    made = portable(recipe)
    assert made.recipe["input_model"]["model_path"] == "inputs/m/model.onnx"
    assert made.recipe["data_configs"][0]["load_dataset_config"]["data_files"] == "inputs/calibration"
    assert made.recipe["passes"]["e"]["tasks"] == ["mmlu", "inputs/t/mine.yaml"]
    assert made.recipe["evaluators"]["e"]["reference"] == "inputs/other"
    assert made.inputs == {
        "m": tmp_path / "m",
        "calibration": tmp_path / "calibration.jsonl",
        "t": tmp_path / "t",
        "other": tmp_path / "other",
    }


def test_scripts_of_one_name_in_two_folders_both_come_along(tmp_path: Path) -> None:
    scripts = [tmp_path / name / "plug.py" for name in ("a", "b", "c")]
    for script in scripts:
        script.parent.mkdir()
        script.write_text(f"# {script.parent.name}", encoding="utf-8")
    evaluators = {
        str(number): {"type": "OrtLMEvaluator", "tasks": ["hellaswag"], "user_script": str(script)}
        for number, script in enumerate([*scripts, scripts[1]])
    }
    recipe = tmp_path / "recipe.json"
    model = {"type": "HfModel", "model_path": str(tmp_path / "a")}
    written = {"input_model": model, "evaluators": evaluators, "evaluator": "0"}
    recipe.write_text(json.dumps(written), encoding="utf-8")
    make_azureml_job(recipe, "c", tmp_path / "job")
    code = tmp_path / "job" / "code"
    written = json.loads((code / "recipe.json").read_text(encoding="utf-8"))["evaluators"]
    names = [keys["user_script"] for keys in written.values()]
    assert names == ["plug.py", "plug_2.py", "plug_3.py", "plug_2.py"]
    assert [(code / name).read_text(encoding="utf-8") for name in names] == ["# a", "# b", "# c", "# b"]


def test_wrong_recipe_and_taken_folder_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"input_model": {"type": "HfModel", "model_path": "./gone"}}), encoding="utf-8")
    arguments = ["--compute", "c", "--output"]
    assert main(["job", "azureml", str(RECIPE), *arguments, str(tmp_path / "taken")]) == 2
    assert "/taken'" in capsys.readouterr().err
    assert main(["job", "azureml", str(wrong), *arguments, str(tmp_path / "new")]) == 2
    assert "'input_model.model_path' = './gone'" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["taken", "wrong.json"]


def test_all_examples_lack_nothing(tmp_path: Path) -> None:
    made: dict[str, Any] = runpy.run_path(str(ROOT / "recipes" / "azureml" / "make.py"))
    made["make"](tmp_path, "cpus", "gpus")
    found = {folder.name: unbound(folder) for folder in tmp_path.iterdir()}
    assert set(found) == {"command", "gpu", "pipeline", "sweep"}
    assert not any(found.values()), found
    gpu = json.loads((tmp_path / "gpu" / "code" / "recipe.json").read_text(encoding="utf-8"))
    assert gpu["systems"]["local"]["accelerators"] == [
        {"device": "gpu", "execution_providers": ["CUDAExecutionProvider"]}
    ]
    job = tmp_path / "pipeline" / "job.yml"
    job.write_text(job.read_text(encoding="utf-8").replace("jobs.gate.outputs", "jobs.gates.outputs"), encoding="utf-8")
    assert unbound(tmp_path / "pipeline") == ["parent.jobs.gates.outputs.passed"]
