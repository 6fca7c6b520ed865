"""`OrtMending` in a recipe: a broken bound becomes a kept one, or the pass fails and says how far it came.
`OrtLossMap`: the model goes on unchanged, and its map travels with it. The mending recipe goes from a broken bound to a
kept one in few more bytes, and the settings that it writes make the same model again from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from olive.hardware.accelerator import DEFAULT_CPU_ACCELERATOR
from olive.model import CompositeModelHandler, ModelConfig, ONNXModelHandler
from olive.workflows import run as olive_run

import olive_ext
from olive_ext.check import check_recipe
from olive_ext.check.recipe import mistakes
from olive_ext.cli import main
from olive_ext.plugins.diagnose.passes import OrtMending
from olive_ext.workflow import register
from olive_ext.workflow.current_run import Run, running
from tests.exports import quickstart
from tests.exports.media import media_export
from tests.exports.quickstart import QUICKSTART
from tests.plugins.diagnose.remedy.test_corruption import in_bits
from tests.refusals import tells
from tests.workflow.recipes import recipe, saved

KEYS: dict[str, Any] = {
    "reference": str(quickstart.exported()),
    "tasks": ["quickstart_choice"],
    "include_path": str(quickstart.TASKS),
    "limit": 8,
}
BOUND = {"metric": "kl_mean", "max": 2e-3}


def blocks(**changes: Any) -> dict[str, Any]:
    mend = {"type": "OrtMending", "top": 1, "require": [BOUND], **KEYS, **changes}
    gate = {"type": "OrtLMEvaluation", **KEYS, "bootstrap_iters": 0}
    return {"passes": {"before": gate, "mend": mend, "after": {**gate, "require": [BOUND]}}}


def quantized() -> dict[str, Any]:
    return {"type": "ONNXModel", "model_path": str(quickstart.quantized(4, 128)), "onnx_file_name": "model.onnx"}


@pytest.mark.long
def test_bound_is_broken_before_and_kept_behind_the_pass(tmp_path: Path) -> None:
    register()
    olive_run(recipe(tmp_path, quantized(), **blocks()))
    (chain,) = (tmp_path / "out").rglob("chain.json")
    before, after = json.loads(chain.read_text())["steps"]
    column = next(name for name in before["values"] if "kl_mean" in name)
    assert before["values"][column] > BOUND["max"] > after["values"][column]
    assert after["name"] == "mend"
    (bill,) = (tmp_path / "out").rglob("bill.json")
    assert json.loads(bill.read_text())["goal"] == "kl_mean of at most 0.00200"
    with olive_ext.open(bill.parent, engine={"runtime": "genai"}) as session:
        assert session.generate(["The"])


def vision_package(folder: Path) -> Path:
    """LLaVA's three graphs, of which two are in 4 bits, and no genai_config.json."""
    source = media_export("llava")[0]
    in_bits(source, folder, "vision_encoder/*.onnx", 4)
    graph = in_bits(source, folder / "again", "embedding/*.onnx", 4, "Gather") / "embedding"
    shutil.copytree(graph, folder / "embedding", dirs_exist_ok=True)
    shutil.rmtree(folder / "again")
    return folder


PICTURES: dict[str, Any] = {
    "reference": "",
    "tasks": ["shapes_colour"],
    "include_path": str(QUICKSTART.parent / "vision" / "tasks"),
    "limit": 8,
}


def composite(package: Path, **more: Any) -> CompositeModelHandler:
    names = ["decoder", "embedding", "vision_encoder"]
    parts = [ONNXModelHandler(str(package / name), onnx_file_name="model.onnx") for name in names]
    return CompositeModelHandler(parts, names, **more)


@pytest.mark.long
def test_composite_model_becomes_one_of_mended_components(tmp_path: Path) -> None:
    """Its components lie in folders that nothing but the handler names together; the tokenizer travels along."""
    package = vision_package(tmp_path / "package")
    (package / "genai_config.json").unlink()
    beside = [str(path) for path in package.glob("*.json")]
    for path in beside:
        shutil.move(path, tmp_path)
    beside = [str(tmp_path / Path(path).name) for path in beside]
    model = composite(package, model_attributes={"additional_files": beside, "own": 1})
    keys = {**PICTURES, "reference": str(media_export("llava")[0]), "top": 1}
    made = OrtMending.generate_config(DEFAULT_CPU_ACCELERATOR, {**keys, "require": [BOUND]}, {}, True)
    output = OrtMending(DEFAULT_CPU_ACCELERATOR, made).run(model, str(tmp_path / "mended" / "model"))
    folder = tmp_path / "mended" / "model"
    assert Path(output.model_path) == folder
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    places = [Path(part.model_path).relative_to(folder).as_posix() for _, part in output.get_model_components()]
    assert places == [f"{name}/model.onnx" for name in model.model_component_names]
    assert output.model_attributes["own"] == 1
    bill = json.loads((folder / "bill.json").read_text(encoding="utf-8"))
    changed = {line["name"].rpartition(", ")[2] for line in bill["lines"] if line["chosen"]}
    assert changed == {"vision", "embedding"}
    assert (folder / "decoder" / "model.onnx").read_bytes() == (package / "decoder" / "model.onnx").read_bytes()


def loss_map(**changes: Any) -> dict[str, Any]:
    return {"passes": {"map": {"type": "OrtLossMap", **KEYS, "top": 2, **changes}}}


@pytest.mark.long
def test_loss_map_lies_beside_the_model_that_is_handed_on(tmp_path: Path) -> None:
    register()
    olive_run(recipe(tmp_path, quantized(), **loss_map()))
    (stored,) = (tmp_path / "out").rglob("loss_map.json")
    assert len(json.loads(stored.read_text())["entries"]) == 21
    assert {"loss_map.html", "loss_map.md"} <= {file.name for file in stored.parent.iterdir()}
    (graph,) = (tmp_path / "out").rglob("model.onnx")
    assert graph.read_bytes() == (quickstart.quantized(4, 128) / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (loss_map(tops=3), ["'passes.map.tops' 'top'"]),
        (blocks(at_mots="1GB"), ["'passes.mend.at_mots' 'at_most'"]),
        (blocks(require=[]), ["passes.mend 'within' 'at_most'"]),
    ],
)
def test_wrong_keys_of_a_pass_are_named_in_place(made: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    model = {"type": "ONNXModel", "model_path": str(tmp_path)}
    (text,) = map(str, mistakes(recipe(tmp_path, model, **made), has_model=False))
    assert [tells(one, part) for one, part in zip(sorted(text.split("; ")), parts, strict=True)] == [True] * len(parts)


@pytest.mark.parametrize(("name", "made"), [("map", loss_map()), ("mend", blocks())])
def test_pass_before_any_onnx_model_is_refused_by_check(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    model = {"type": "HfModel", "model_path": str(quickstart.MODEL)}
    errors = check_recipe(saved(tmp_path, recipe(tmp_path, model, **made))).errors
    assert ("unsupported", f"passes.{name}") in [(error.code, error.field) for error in errors]


def test_olives_cache_tells_bounds_and_sizes_apart() -> None:
    def key(**goal: Any) -> Any:
        made = OrtMending.generate_config(DEFAULT_CPU_ACCELERATOR, {**KEYS, **goal}, {}, True)
        return OrtMending(DEFAULT_CPU_ACCELERATOR, made).config.to_json()

    assert key(require=[BOUND]) == key(require=[BOUND])
    assert key(require=[BOUND]) != key(require=[{**BOUND, "max": 1e-5}])
    assert key(at_most="1MB") != key(at_most="2MB")
    of_runs = []
    for _ in range(2):  # what tasks of one's own read may change
        token = running.set(Run(ModelConfig(type="HfModel", config={"model_path": "m"})))
        of_runs.append(key(require=[BOUND]))
        assert key(require=[BOUND]) == of_runs[-1]
        running.reset(token)
    assert of_runs[0] != of_runs[1]


ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "recipes" / "mend"
RECIPE = FOLDER / "recipe.json"


def read() -> dict[str, Any]:
    return json.loads(RECIPE.read_text(encoding="utf-8"))


def test_recipe_is_valid_and_bounds_what_it_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert check_recipe(RECIPE).problems == []
    passes = read()["passes"]
    assert list(passes) == ["build", "before", "mend", "after"]
    assert passes["mend"]["require"] == passes["after"]["require"]
    assert "file: recipe.json" in (FOLDER / "info.yml").read_text(encoding="utf-8")


@pytest.mark.long
def test_bound_is_broken_and_then_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    bound = read()["passes"]["mend"]["require"][0]["max"]
    assert main(["run", "--config", "recipes/mend/recipe.json"]) == 0
    before, after = json.loads(Path("out/mend/chain.json").read_text())["steps"]
    column = next(name for name in before["values"] if "kl_mean" in name)
    assert before["values"][column] > bound > after["values"][column]
    bill = json.loads(Path("out/mend/bill.json").read_text())
    assert bill["chosen"]["bytes"] < 1.1 * bill["unchanged"]["bytes"]
