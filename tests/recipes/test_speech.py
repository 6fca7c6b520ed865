"""The speech recipe's task, model and recipes: reproducible, small, learned, and the halves' costs told apart."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipes.test_vision import eight_bits, quantized_products, report_metrics, run_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "speech"


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE / "tasks" / "tones.py"))


def test_recipes_name_each_other_s_files() -> None:
    """The halves are those that the first recipe's output has."""
    first = json.loads((RECIPE / "float.json").read_text(encoding="utf-8"))
    assert (ROOT / first["input_model"]["model_path"] / "model.safetensors").is_file()
    info = (RECIPE / "info.yml").read_text(encoding="utf-8")
    for half, other in (("decoder", "encoder"), ("encoder", "decoder")):
        recipe = json.loads((RECIPE / f"{half}_int4.json").read_text(encoding="utf-8"))
        (component,) = recipe["input_model"]["model_components"]
        assert component["model_path"] == recipe["input_model"]["model_path"] == first["output_dir"]
        assert component["onnx_file_name"] == f"{half}.onnx"
        assert f"{first['output_dir']}/{other}.onnx" in recipe["input_model"]["model_attributes"]["additional_files"]
        int8 = (RECIPE / f"{half}_int8.json").read_text(encoding="utf-8")
        assert int8 == eight_bits(RECIPE / f"{half}_int4.json")
        assert all(f"file: {half}_{bits}.json" in info for bits in ("int4", "int8"))


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
def test_model_hears_what_was_said_and_recipes_tell_what_each_half_costs(tmp_path: Path) -> None:
    pytest.importorskip("jiwer")
    halves = [f"{half}_{bits}" for half in ("decoder", "encoder") for bits in ("int4", "int8")]
    outputs = {name: tmp_path / "out" / "speech" / name for name in ("float", *halves)}
    for name in outputs:
        run_recipe(f"recipes/speech/{name}.json", tmp_path)
    errors = {name: report_metrics(output / "report.json")["tones_words", "wer"] for name, output in outputs.items()}
    assert errors["float"] <= 0.1
    assert max(errors.values()) <= errors["float"] + 0.2
    for name in halves:
        half, _, _ = name.partition("_")
        num_quantized = {one: quantized_products(outputs[name] / f"{one}.onnx") for one in ("decoder", "encoder")}
        assert num_quantized.pop(half) > 0
        assert set(num_quantized.values()) == {0}
