"""The mending recipe: valid, it goes from a broken bound to a kept one in few more bytes, and the settings that it
writes make the same model again from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olive_ext.check.recipe_check import check_recipe
from olive_ext.cli import main
from tests.plugins.diagnose.remedy.test_mended_package import logits

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "recipes" / "mend"
RECIPE = FOLDER / "recipe.json"


def read() -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(RECIPE.read_text(encoding="utf-8"))
    return recipe


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
    again = {**read(), "passes": json.loads(Path("out/mend/olive_settings.json").read_text())["builder_passes"]}
    Path("again.json").write_text(json.dumps({**again, "output_dir": "out/again"}))
    assert main(["run", "--config", "again.json"]) == 0
    np.testing.assert_array_equal(logits(Path("out/again")), logits(Path("out/mend")))
