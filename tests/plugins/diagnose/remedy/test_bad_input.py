"""Mistakes are one line each, before anything is measured; and what was measured is not measured again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.plugins.diagnose.remedy.variants import Variants
from olive_ext.report import to_json
from olive_ext.report.comparison import KV_CACHE
from tests.exports import genai_export, hf_model, quickstart
from tests.exports.edited import continue_wrongly, edited
from tests.refusals import refused

WORK: dict[str, Any] = {"tasks": ["quickstart_choice"], "include_path": str(quickstart.TASKS), "limit": 4}
MODELS: dict[str, Callable[[], Path]] = {
    "float": quickstart.exported,
    "int4": lambda: quickstart.quantized(4, 128),
    "llama": lambda: genai_export("llama"),
    "llama_int4": lambda: genai_export("llama", "0.14.1", "int4"),
    "lfm2": lambda: genai_export("lfm2"),
    "hf": lambda: hf_model("llama"),
}


@pytest.mark.parametrize(
    ("model", "reference", "changes", "error"),
    [
        ("int4", "float", {"tasks": ["quickstart_choise"]}, {"code": "unknown_name", "field": "tasks",
                                                             "holds": ("'quickstart_choise'", "'quickstart_choice'")}),
        ("int4", "nowhere", {}, {"code": "not_found", "field": "reference", "value": "nowhere"}),
        ("int4", "float", {"tops": 3}, {"code": "unknown_key", "field": "tops", "value": 3, "holds": "top"}),
        ("int4", "float", {"reference": {"path": "x", "mode": "resident"}}, {"code": "contradiction"}),
        ("int4", "float", {"workers": 2}, {"code": "contradiction", "holds": "process"}),
        ("int4", "int4", {}, {"code": "contradiction", "holds": "itself"}),
        ("float", "int4", {}, {"code": "wrong_value", "holds": "(MatMulNBits)"}),
        ("int4", "llama", {}, {"code": "not_comparable"}),
        ("llama_int4", "lfm2", {}, {"code": "not_comparable"}),
        ("hf", "float", {}, {"code": "wrong_value", "field": "model", "holds": "ONNX"}),
    ],
)  # fmt: skip
def test_mistake_is_one_line(model: str, reference: str, changes: dict[str, Any], error: dict[str, Any]) -> None:
    """Settings, and models that cannot be compared: another vocabulary, another architecture, the wrong order."""
    path = MODELS[reference]() if reference in MODELS else reference
    with refused(OliveExtError, **error) as raised:
        olive_ext.locate(MODELS[model](), **{"reference": str(path), **WORK, **changes})
    assert "\n" not in str(raised.value)


def test_map_is_not_put_into_the_models_own_folder(tmp_path: Path) -> None:
    package = shutil.copytree(quickstart.quantized(4, 128), tmp_path / "package")
    names = sorted(package.iterdir())
    for place in (package, package / "map"):
        with refused(OliveExtError, "wrong_value", "output_dir"):
            olive_ext.locate(package, reference=quickstart.exported(), **WORK, output_dir=place)
    assert sorted(package.iterdir()) == names


def test_a_model_that_continues_wrongly_is_not_mended(tmp_path: Path) -> None:
    """Whole texts keep the bound as it is: "handed on unchanged", and every answer was garbage."""
    model = edited(quickstart.quantized(4, 128), tmp_path / "model", continue_wrongly)
    reference = str(quickstart.exported())
    with refused(OliveExtError, "damaged", holds=(KV_CACHE, "export it again")):
        olive_ext.mend(
            model, reference=reference, **{**WORK, "limit": 8}, within={"kl_mean": 9.0}, output_dir=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_measurements_of_an_interrupted_map_are_taken_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"reference": str(quickstart.exported()), **WORK, "output_dir": tmp_path}
    first = olive_ext.locate(quickstart.quantized(4, 128), **given)

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Variants, "kl", refuse)
    assert to_json(olive_ext.locate(quickstart.quantized(4, 128), **given)) == to_json(first)
    with pytest.raises(AssertionError, match="measured again"):
        olive_ext.locate(quickstart.quantized(4, 128), resume=False, **given)
