"""The speech recipe's task, model and recipes: reproducible, small, really learned."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipes.test_vision import report_metrics, run_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "speech"
MAX_BYTES = 1_500_000


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE / "tasks" / "tones.py"))


def test_recipe_names_files_that_exist() -> None:
    recipe = json.loads((RECIPE / "float.json").read_text(encoding="utf-8"))
    assert (ROOT / recipe["input_model"]["model_path"] / "model.safetensors").is_file()
    assert "file: float.json" in (RECIPE / "info.yml").read_text(encoding="utf-8")


def test_committed_files_stay_small() -> None:
    files = [path for path in RECIPE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_sounds_are_the_same_every_time_and_every_word_is_said(made: dict[str, Any]) -> None:
    sounds, again = made["load"]()["test"], made["load"]()["test"]
    assert sounds["text"] == again["text"]
    assert sounds[0]["samples"] == again[0]["samples"]
    words = Counter(word for text in sounds["text"] for word in text.split())
    assert words.keys() == set(made["WORDS"])
    assert max(words.values()) <= 0.25 * sum(words.values())
    assert max(len(samples) for samples in sounds["samples"]) <= 4 * made["RATE"]
    assert np.abs(sounds[0]["samples"]).max() <= 1


@pytest.mark.long
def test_model_hears_what_was_said(tmp_path: Path) -> None:
    pytest.importorskip("jiwer")
    run_recipe("recipes/speech/float.json", tmp_path)
    found = report_metrics(tmp_path / "out" / "speech" / "float" / "report.json")
    assert found["tones_words", "wer"] <= 0.1
