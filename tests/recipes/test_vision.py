"""The vision recipe's tasks, package and recipes: reproducible, small, learned, and the halves' costs told apart."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from olive_ext.backends.lm_eval import OrtLM

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "vision"
PACKAGE = RECIPE / "model"
TASKS = ["shapes_answer", "shapes_colour"]
HALVES = {
    "decoder_int4": "decoder",
    "encoder_int4": "vision_encoder",
    "decoder_int8": "decoder",
    "encoder_int8": "vision_encoder",
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE / "tasks" / "shapes.py"))


@pytest.mark.parametrize("name", HALVES)
def test_recipe_carries_the_whole_package_and_that_of_eight_bits_is_that_of_four(name: str) -> None:
    text = (RECIPE / f"{name}.json").read_text(encoding="utf-8")
    model = json.loads(text)["input_model"]
    (component,) = model["model_components"]
    named = [component["model_path"], *model["model_attributes"]["additional_files"]]
    assert {Path(path).name for path in named} == {path.name for path in PACKAGE.iterdir()} - {"processor_config.json"}
    assert not name.endswith("_int8") or text == eight_bits(RECIPE / f"{name.replace('int8', 'int4')}.json")


def test_pictures_are_the_same_every_time_and_in_both_tasks_which_ask_for_every_answer(drawn: dict[str, Any]) -> None:
    choices, answers, again = (drawn[name]()["test"] for name in ("choices", "answers", "choices"))
    count = drawn["NUM_PICTURES"]
    first = [[row["image"].tobytes() for row in rows.select(range(count))] for rows in (choices, answers, again)]
    assert first[0] == first[1] == first[2]
    assert len(set(first[0])) == count
    assert choices["text"] == again["text"]
    colours, others = Counter(choices["answer"]), Counter(answers["answer"])
    assert colours.keys() == drawn["COLOURS"].keys()
    assert others.keys() == {*drawn["SHAPES"], *drawn["NUMBERS"], *drawn["PLACES"]}
    assert max(colours.values()) <= 0.3 * sum(colours.values())
    assert max(others.values()) <= 0.2 * sum(others.values())


@pytest.mark.long
def test_model_has_seen_what_it_is_asked_about() -> None:
    """Chance is 0.17 for a colour, and less for an answer."""
    with OrtLM(str(PACKAGE), engine={"num_threads": 1}) as lm:
        found = simple_evaluate(
            lm,
            tasks=list(TASKS),
            limit=40,
            task_manager=TaskManager(include_path=str(RECIPE / "tasks"), include_defaults=False),
            bootstrap_iters=0,
        )
        num_encoded = lm.session.describe_execution()["images_encoded"]
    assert num_encoded == 40  # both tasks ask about the same pictures
    assert found["results"]["shapes_colour"]["acc,none"] >= 0.5
    assert found["results"]["shapes_answer"]["exact_match,strip"] >= 0.45


def run_recipe(path: str, folder: Path) -> None:
    """`olive-ext run --config path` as the page has it, in a folder that has the repository's recipes."""
    if not (folder / "recipes").exists():
        (folder / "recipes").symlink_to(ROOT / "recipes")
    start = "import sys; from olive_ext.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "run", "--config", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def eight_bits(int4: Path) -> str:
    """What the recipe beside `int4` is, whose weights have eight bits."""
    return int4.read_text(encoding="utf-8").replace("_int4", "_int8").replace('"bits": 4', '"bits": 8')


def report_metrics(path: Path) -> dict[tuple[str, str], float]:
    found = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return {(one["task"], one["metric"]): one["value"] for one in found}


def quantized_products(file: Path) -> int:
    return sum(node.op_type == "MatMulNBits" for node in onnx.load(file, load_external_data=False).graph.node)


@pytest.mark.long
@pytest.mark.parametrize(("name", "half"), HALVES.items())
def test_recipe_quantizes_one_half_and_tells_its_cost(name: str, half: str, tmp_path: Path) -> None:
    run_recipe(f"recipes/vision/{name}.json", tmp_path)
    output = tmp_path / "out" / "vision" / name
    for component in ("decoder", "vision_encoder"):
        num_quantized = quantized_products(output / component / "model.onnx")
        assert (num_quantized > 0) is (component == half)
    reports = [report_metrics(output / file) for file in ("report.json", "report-2.json")]
    assert reports[1]["shapes_colour", "kl_mean"] > (1e-6 if name.endswith("int4") else 0)
    for task, metric in (("shapes_colour", "acc"), ("shapes_answer", "exact_match")):
        assert abs(reports[1][task, metric] - reports[0][task, metric]) < 0.15
