"""Mistakes are one line each, before anything is measured; and what was measured is not measured again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.plugins.diagnose.remedy.variants import Variants
from tests.exports import genai_export, hf_model, quickstart
from tests.refusals import refused

pytestmark = pytest.mark.slow

WORK: dict[str, Any] = {"tasks": ["quickstart_choice"], "include_path": str(quickstart.TASKS), "limit": 4, "by": "kind"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"tasks": ["quickstart_choise"]},
            {"code": "unknown_name", "field": "tasks", "value": ["quickstart_choise"], "holds": "quickstart_choice"},
        ),
        ({"reference": "nowhere"}, {"code": "not_found", "holds": "nowhere"}),
        ({"by": "nodes"}, {"code": "wrong_value", "field": "by", "value": "nodes"}),
        ({"tops": 3}, {"code": "unknown_key", "field": "tops", "value": 3, "holds": "top"}),
        ({"reference": {"path": "x", "mode": "resident"}}, {"code": "contradiction"}),
        ({"workers": 2}, {"code": "contradiction", "holds": "process"}),
    ],
)
def test_wrong_setting_is_one_line(changes: dict[str, Any], told: dict[str, Any]) -> None:
    given = {"reference": str(quickstart.exported()), **WORK, **changes}
    with refused(OliveExtError, **told) as error:
        olive_ext.locate(quickstart.quantized(4, 128), **given)
    assert "\n" not in str(error.value)


def test_model_is_not_its_own_reference() -> None:
    with pytest.raises(OliveExtError, match="is the model itself: give the float model"):
        olive_ext.locate(quickstart.quantized(4, 128), reference=quickstart.quantized(4, 128), **WORK)


def test_map_is_not_put_into_the_models_own_folder(tmp_path: Path) -> None:
    package = shutil.copytree(quickstart.quantized(4, 128), tmp_path / "package")
    names = sorted(package.iterdir())
    for place in (package, package / "map"):
        with refused(OliveExtError, "wrong_value", "output_dir"):
            olive_ext.locate(package, reference=quickstart.exported(), **WORK, output_dir=place)
    assert sorted(package.iterdir()) == names


def test_quantized_model_is_no_reference() -> None:
    """Float and quantized model in the wrong order."""
    with pytest.raises(OliveExtError, match=r"is quantized itself \(MatMulNBits\): give the float model"):
        olive_ext.locate(quickstart.exported(), reference=quickstart.quantized(4, 128), **WORK)


def test_model_of_another_vocabulary_is_refused() -> None:
    with refused(OliveExtError, "not_comparable"):
        olive_ext.locate(quickstart.quantized(4, 128), reference=genai_export("llama"), **WORK)


def test_model_of_another_architecture_is_refused_by_its_nodes() -> None:
    with refused(OliveExtError, "not_comparable"):
        olive_ext.locate(genai_export("llama", "0.14.1", "int4"), reference=genai_export("lfm2"), **WORK)


def test_hugging_face_model_has_no_quantized_graph() -> None:
    with refused(OliveExtError, "wrong_value", "model", str(hf_model("llama")), holds="ONNX"):
        olive_ext.locate(hf_model("llama"), reference=quickstart.exported(), **WORK)


def test_measurements_of_an_interrupted_map_are_taken_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"reference": str(quickstart.exported()), **WORK, "output_dir": tmp_path}
    first = olive_ext.locate(quickstart.quantized(4, 128), **given)

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Variants, "kl", refuse)
    assert olive_ext.locate(quickstart.quantized(4, 128), **given).to_json() == first.to_json()
    with pytest.raises(AssertionError, match="measured again"):
        olive_ext.locate(quickstart.quantized(4, 128), resume=False, **given)
