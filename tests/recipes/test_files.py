"""What every recipe has: it is valid, its files are there and small, and it is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olive_ext.check import check_recipe

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes"
RECIPES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.glob("*/*.json")
    if "input_model" in json.loads(path.read_text(encoding="utf-8"))
)
MOST_BYTES = {"quickstart": 8_000_000, "speech": 1_500_000, "vision": 5_000_000}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_listed_and_names_files_that_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = read(name)
    folder, _, file = name.partition("/")
    model = recipe["input_model"]
    if not str(model["model_path"]).startswith("out/"):  # what another recipe makes
        assert check_recipe(FOLDER / name).problems == []
        assert Path(model["model_path"]).exists()
    places = [data["load_dataset_config"]["data_files"] for data in recipe.get("data_configs", ())]
    blocks = [
        *recipe.get("evaluators", {}).values(),
        *(one for one in recipe["passes"].values() if isinstance(one, dict)),
    ]
    places += [block[key] for block in blocks for key in ("include_path", "user_script") if key in block]
    assert [place for place in places if not Path(place).exists()] == []
    assert f"file: {file}\n" in (FOLDER / folder / "info.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", MOST_BYTES)
def test_committed_files_stay_small(folder: str) -> None:
    files = [path for path in (FOLDER / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES[folder]
